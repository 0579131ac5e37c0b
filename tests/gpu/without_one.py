"""Steps on a GPU that is not there, with PyTorch's fake tensors: PyTorch has CUDA, the machine has not.

They know shapes, types and devices, and no numbers: whatever reads one, or mixes devices, is an error.
Backward needs a driver; gradients are made in its place. Run by `make engine-cuda`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support.deferred import BATCH_SIZE, WAYS, Task
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from horovod_train.collectives.base import SingleRank
from horovod_train.config.schema import Allreduce, Job
from horovod_train.data.shard import PlannedStep, share_of_step
from horovod_train.frameworks.torch.codecs import make_codec
from horovod_train.frameworks.torch.comm.collectives import TorchSingleRank
from horovod_train.frameworks.torch.state.optimizer import optimizer_over
from horovod_train.frameworks.torch.step import replica as replica_module
from horovod_train.frameworks.torch.step.deferred import DeferredOutcome, HostTimer, Sent
from horovod_train.frameworks.torch.step.replica import TorchReplica
from horovod_train.frameworks.torch.step.update import UpdateOnDevice
from horovod_train.frameworks.torch.strategies.allreduce.strategy import AllreduceStrategy, SingleRankStrategy

GPU = torch.device("cuda", 0)


class Replica(TorchReplica):
    """One whose gradients are there without a backward pass."""

    def _add_gradient(self, loss: object, share: float) -> None:
        assert isinstance(loss, torch.Tensor)
        weighted = loss.detach() * share
        self.loss.add(weighted)
        self.scaler.scale(weighted)
        for parameter in self.model.parameters():
            parameter.grad = torch.empty_like(parameter)


@contextmanager
def no_driver() -> Iterator[None]:
    """Let what needs a driver, and is not asked for anything here, do nothing."""
    replica_module.CudaTimer = HostTimer  # type: ignore[misc]
    torch.cuda.Event = lambda **_: SimpleNamespace(record=lambda: None)  # type: ignore[assignment,misc]
    Sent.read = lambda _: [0.0]  # type: ignore[assignment,method-assign]
    with FakeTensorMode():
        yield


def model() -> nn.Module:
    layers = [
        nn.Linear(3, 8, device=GPU),
        nn.BatchNorm1d(8, device=GPU),
        nn.Tanh(),
        nn.Linear(8, 2, device=GPU),
    ]
    return nn.Sequential(*layers)


def steps(fields: dict[str, Any], wire_dtype: str | None) -> None:
    """Make four steps alone, or as one of two ranks with a type on the wire."""
    job = Job.model_validate({"name": "j", "task": "own:Task", "optimizer": {"name": "adamw"}, **fields})
    trained = model()
    optimizer = optimizer_over(job, trained.parameters(), 1)
    assert optimizer.param_groups[0]["fused"]
    world = SingleRank() if wire_dtype is None else TorchSingleRank(size=2)
    strategy = (
        SingleRankStrategy()
        if wire_dtype is None
        else AllreduceStrategy(
            world,
            codec=make_codec(Allreduce(wire_dtype=wire_dtype)),
            bucket_size_bytes=64,  # type: ignore[arg-type]
        )
    )
    strategy.bind(trained, optimizer)
    replica = Replica(
        model=trained, optimizer=optimizer, strategy=strategy, data_ranks=world, train=job.train, task=Task(),
        health=job.health,
    )  # fmt: skip
    assert isinstance(replica._update, UpdateOnDevice)
    share = share_of_step(0, BATCH_SIZE, batch_size=BATCH_SIZE, accumulation_steps=1, rank=0, size=1)
    for number in range(4):
        batch = torch.randn(BATCH_SIZE, 3, device=GPU)
        outcome = replica.step(PlannedStep(share, iter([batch])), 0.1, want_norm=number % 2 == 0)
        assert isinstance(outcome, DeferredOutcome)


def main() -> None:
    assert torch.version.cuda, "this PyTorch knows no GPU"
    with no_driver():
        for wire_dtype in (None, "fp32", "fp16", "bf16"):
            for way, fields in WAYS.items():
                steps(fields, wire_dtype)
                sys.stdout.write(f"ok   no read of the device: {way}, {wire_dtype or 'one rank'}\n")


if __name__ == "__main__":
    main()
