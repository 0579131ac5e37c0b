"""Estimate the memory of a job in one process, without allocating it.

One step runs with PyTorch's fake tensors, which have shape and dtype but no memory; PyTorch's ``MemTracker``
adds up the tensors that are alive. A step that reads numbers from tensors is refused with an error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import psutil
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from horovod_train.config.schema import Job
from horovod_train.config.support import JobSizes, Sizes, strategy_support
from horovod_train.errors import HorovodTrainError, UserError
from horovod_train.frameworks.base import load_task
from horovod_train.frameworks.torch.framework import optimizer_of
from horovod_train.frameworks.torch.sizes import (
    layers_to_recompute,
    modules_matching,
    recompute_activations,
    saved_activations,
    units_to_shard,
)
from horovod_train.frameworks.torch.state.model import (
    batch_of,
    empty_like,
    fake_step_errors,
    loss_of,
    meta_model,
    to_fake_tensor,
)
from horovod_train.frameworks.torch.state.rank_state import seed_generators
from horovod_train.frameworks.torch.strategies import TensorPlan
from horovod_train.frameworks.torch.strategies.fsdp import Arguments as FsdpArguments
from horovod_train.frameworks.torch.strategies.tensor_parallel.strategy import (
    SHARD_DIMENSION,
    check_can_be_cut,
    modules_of_plan,
    plan_of,
)
from horovod_train.frameworks.torch.task import REQUIRED, TorchTask

PROCESS_BYTES = psutil.Process().memory_info().rss
"""Resident memory of a process with the imports of a rank."""


def sizes_of(job: Job, num_ranks: int) -> JobSizes:
    """Return the sizes of a job in one process, and in a rank of a tensor-parallel group.

    Raises:
        UserError: The step cannot run with fake tensors.
    """
    task = load_task(job.task, job.task_args, REQUIRED)
    seed_generators(job.train.seed, 0, 0)
    batch = batch_of(job, task)
    with FakeTensorMode(allow_non_fake_inputs=True), fake_step_errors(job):
        whole = _sizes(job, task, meta_model(task), batch)
    of_tensor_rank = None
    with FakeTensorMode(allow_non_fake_inputs=True), suppress(UserError), fake_step_errors(job):
        part = meta_model(task)
        if num_ranks > 1 and _cut(job, part, num_ranks):
            of_tensor_rank = _sizes(job, task, part, batch)
    return JobSizes(job, num_ranks, whole, of_tensor_rank)


def _sizes(job: Job, task: TorchTask, model: torch.nn.Module, batch: Any) -> Sizes:
    model.train()
    fake = to_fake_tensor(batch)
    layers, budget_mib = job.train.activation_checkpointing, job.train.activation_memory_mib
    if budget_mib is not None:
        layers = layers_to_recompute(
            saved_activations(model, lambda: loss_of(job, task, model, fake)), budget_mib
        )
    recompute_activations(model, layers)
    optimizer = optimizer_of(job, task, model, 1)
    loss_of(job, task, model, fake).backward()  # type: ignore[no-untyped-call]
    optimizer.step()  # creates its state
    if job.train.accumulation_steps == 1:
        optimizer.zero_grad()
    with _tracked(model, optimizer, fake) as passes:
        loss_of(job, task, model, fake).backward()  # type: ignore[no-untyped-call]
    with _tracked(model, optimizer) as update:
        optimizer.step()
    weights = sum(p.nbytes for p in model.parameters())
    buffers = sum(b.nbytes for b in model.buffers())
    optimized = [p for group in optimizer.param_groups for p in group["params"]]
    trained = sum(p.nbytes for p in optimized if p.requires_grad)
    state, gradients = _state_bytes(optimizer), passes.get("GRAD", 0)
    resident = weights + buffers + state
    return Sizes(
        weights=weights,
        trained=trained,
        buffers=buffers,
        optimizer=state,
        activations=max(0, passes["Total"] - resident - gradients),
        gradients_by_then=gradients,
        update=max(0, update["Total"] - resident - trained),
        largest=max(p.nbytes for p in model.parameters()),
        units=[sum(p.nbytes for p in unit.parameters()) for unit in _units(job, model)],
        process=PROCESS_BYTES,
    )


@contextmanager
def _tracked(*external: Any) -> Iterator[dict[str, int]]:
    """Track tensors while the block runs; afterwards the yielded dictionary contains peak bytes by kind."""
    found: dict[str, int] = {}
    tracker = MemTracker()
    tracker.track_external(*external)
    with tracker:
        yield found
    for of_device in tracker.get_tracker_snapshot("peak").values():
        for kind, size_bytes in of_device.items():
            name = str(getattr(kind, "name", kind))
            found[name] = found.get(name, 0) + int(size_bytes)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    entries = (value for entry in optimizer.state.values() for value in entry.values())
    return sum(value.nbytes for value in entries if isinstance(value, torch.Tensor))


def _units(job: Job, model: torch.nn.Module) -> list[torch.nn.Module]:
    arguments = strategy_support(job.strategy.name).arguments_of(job.strategy.args)
    patterns = arguments.units if isinstance(arguments, FsdpArguments) else None
    found = (
        units_to_shard(model) if not patterns else modules_matching(model, patterns, "strategy.args.units")
    )
    return list(found.values())


def _cut(job: Job, model: torch.nn.Module, num_ranks: int) -> bool:
    """Replace the parameters of tensor-parallel layers by one rank's shards; return whether this succeeds."""
    arguments = strategy_support(job.strategy.name).arguments_of(job.strategy.args)
    try:
        plan = (arguments.plan if isinstance(arguments, TensorPlan) else None) or plan_of(model)
        for name, style in modules_of_plan(model, plan).items():
            if style in SHARD_DIMENSION:
                check_can_be_cut(name, model.get_submodule(name), style, num_ranks)
                _leave_part(model.get_submodule(name), SHARD_DIMENSION[style], num_ranks)
    except UserError:
        return False
    return True


def _leave_part(module: torch.nn.Module, dimension: int, num_ranks: int) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        if dimension == 0 or parameter.dim() > 1:
            part = parameter.detach().chunk(num_ranks, dim=dimension)[0]
            fake = torch.nn.Parameter(empty_like(part), parameter.requires_grad)
            setattr(module, name, fake)


def main() -> None:
    """Read a job and its number of ranks as JSON from standard input, and print sizes as JSON."""
    document = json.loads(sys.stdin.read())
    try:
        sizes = sizes_of(Job.model_validate(document["job"]), document["num_ranks"])
        found: dict[str, Any] = {"whole": asdict(sizes.whole)}
        found["of_tensor_rank"] = sizes.of_tensor_rank and asdict(sizes.of_tensor_rank)
    except HorovodTrainError as error:
        found = {"problem": error.message, "hint": error.hint}
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
