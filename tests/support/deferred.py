"""A small model that is trained as on a device: decided there, read later."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

from horovod_train.collectives.base import Mesh, SingleRank
from horovod_train.config.schema import Job
from horovod_train.data.shard import PlannedStep, share_of_step
from horovod_train.frameworks.torch.step.replica import TorchReplica
from horovod_train.frameworks.torch.strategies.base import make_strategy
from support.torch_threads import on_torch_ranks

NUM_SAMPLES, BATCH_SIZE, NUM_STEPS = 48, 8, 6
SGD = ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01})
ADAMW = ("AdamW", {"lr": 0.01, "weight_decay": 0.01})
with torch.random.fork_rng():
    torch.manual_seed(3)
    MODEL = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    DATA = torch.randn(NUM_SAMPLES, 3)


class Task:
    """Its loss is not a number in some step, on some rank."""

    def __init__(self, poison: tuple[int, int] = (0, 0), value: float = math.nan, at: str = "loss") -> None:
        self.poison, self.value, self.at = poison, value, at
        self.num_steps, self.rank = 0, 0

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self.num_steps += 1
        loss = model(batch).float().square().mean()
        if (self.num_steps, self.rank) != self.poison:
            return loss
        if self.at == "loss":
            return loss * self.value
        # A finite loss with a gradient that is not: the square root at zero.
        return loss * 0 + (loss - loss.detach()).abs().sqrt() + loss.detach()


def replica_of(
    world: Any,
    lag_steps: int,
    *,
    device: Any = None,
    task: Any = None,
    optimizer: Any = SGD,
    dtype: Any = torch.float32,
    **fields: Any,
) -> TorchReplica:
    job = Job.model_validate({"name": "late", "task": "own:Loop", **fields})
    model = copy.deepcopy(MODEL).to(device=device, dtype=dtype)
    name, args = optimizer
    made = getattr(torch.optim, name)(model.parameters(), **{"fused": True, **args})
    strategy = make_strategy(job, Mesh.data_parallel(world))
    strategy.bind(model, made)
    task = task or Task()
    task.rank = world.rank
    replica = TorchReplica(
        model=model, optimizer=made, strategy=strategy, data_ranks=world, train=job.train, task=task,
        health=job.health, lag_steps=lag_steps,
    )  # fmt: skip
    if job.train.precision == "fp16":
        calm = {"scale": 256.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
        replica.scaler.load_state_dict({**calm, "_growth_tracker": 0})  # nothing overflows by itself
    return replica


def planned(world: Any, number: int, dtype: Any = torch.float32, accumulation: int = 1) -> PlannedStep:
    per_rank = BATCH_SIZE // world.size // accumulation
    share = share_of_step(
        number * BATCH_SIZE, BATCH_SIZE, batch_size=per_rank, accumulation_steps=accumulation,
        rank=world.rank, size=world.size,
    )  # fmt: skip
    return PlannedStep(share, (DATA[m.start : m.stop].clone().to(dtype) for m in share.micro_batches))


def trained(replica: TorchReplica, world: Any, *, skipping: int = 0, **how: Any) -> list[Any]:
    """Make all steps, but one perhaps; return their readings."""
    numbers = [n for n in range(NUM_STEPS) if n + 1 != skipping]
    return [replica.step(planned(world, n, **how), 0.1, want_norm=True) for n in numbers]


def everything(replica: TorchReplica) -> dict[str, torch.Tensor]:
    """All that must not differ: weights, statistics, the optimizer's state, the loss scale."""
    found = {name: value.clone() for name, value in replica.model.state_dict().items()}
    for number, state in replica.optimizer.state_dict()["state"].items():
        found |= {f"{number}.{name}": v.clone() for name, v in state.items() if v is not None}
    scaler = replica.scaler.state_dict()
    return found | {name: torch.tensor(scaler[name]) for name in scaler.keys() & {"scale", "_growth_tracker"}}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    # NaN, in the statistics of a step that ends training, is NaN on either side.
    differing = [
        name for name in wanted if not torch.equal(found[name].nan_to_num(7.5), wanted[name].nan_to_num(7.5))
    ]
    assert differing == []


def worlds(size: int, function: Any) -> list[Any]:
    """Results by rank; errors are raised."""
    if size == 1:
        return [function(SingleRank())]
    results = on_torch_ranks(size, function)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


WAYS = {
    "plain": {},
    "clipped": {"train": {"clip_grad_norm": 0.3}},
    "never clipped": {"train": {"clip_grad_norm": 1e6}},
    "bf16": {"train": {"precision": "bf16"}},
    "fp16": {"train": {"precision": "fp16", "clip_grad_norm": 0.3}},
    "skip": {"health": {"non_finite": "skip"}},
}
