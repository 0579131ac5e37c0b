"""On every rank: train small models under each strategy, go on under another, and write the weights down.

usage: OUT_FOLDER [CASE ...]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from strategy_cases import ALLREDUCE, CASES, SERVER, Way

from horovod_train.checkpoint.arrays import dump_state
from horovod_train.checkpoint.manager import CheckpointManager
from horovod_train.collectives.base import Mesh, allgather_json
from horovod_train.config.arguments import axes_of
from horovod_train.config.optimization import Checkpoint
from horovod_train.config.schema import Job
from horovod_train.frameworks.torch.framework import TorchFramework
from horovod_train.health.comparisons import check_replicas_identical
from horovod_train.training.hooks.base import resume_from, save_checkpoint
from horovod_train.training.loop import evaluate, train
from horovod_train.training.run import Run
from horovod_train.worker import make_run

torch.set_num_threads(1)
framework = TorchFramework()
# As a job with parameter servers joins: over MPI it takes MPI up before Horovod does.
strategy = SERVER if "OMPI_COMM_WORLD_RANK" in os.environ else ALLREDUCE
world = framework.connect(Job.model_validate({"name": "x", "task": "digits", "strategy": strategy}))
FILE = f"{Path(__file__).parent / 'strategy_cases.py'}"


def run_of(way: Way, **more: Any) -> Run:
    if way.start is not None:
        file = Path(out) / f"initial-{world.rank}.safetensors"
        save_file(way.first_model().state_dict(), file)
        more["initial_weights"] = str(file)
    job = Job.model_validate(way.job(FILE, world.size, **more))
    mesh = Mesh.of(world, axes_of(job.strategy, world.size))
    run = make_run(job, mesh, *framework.prepare(job, mesh))
    run.replica.broadcast()
    return run


def whole(tensor: torch.Tensor) -> torch.Tensor:
    if hasattr(tensor, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def weights(run: Run) -> list[float]:
    run.replica.strategy.local_tensors()  # gives back what an evaluation has gathered
    found = {name: whole(p).flatten() for name, p in run.replica.model.named_parameters()}
    mine = {name: tensor.tolist() for name, tensor in found.items() if not tensor.is_meta}
    everyone = {name: values for of_rank in allgather_json(world, mine) for name, values in of_rank.items()}
    return [value for name in found for value in (everyone | mine)[name]]


def kept(run: Run) -> dict[str, int]:
    """What this rank holds between steps, in bytes."""
    state = run.replica.state(copy=False)
    return {
        "model": sum(len(blob.data) for blob in state.model.values()),
        "optimizer": sum(len(blob.data) for blob in state.optimizer.values()),
    }


@torch.no_grad()
def seen_to_be_finite(run: Run) -> dict[str, bool]:
    """Whether weights are finite, and when one that the last rank holds is not."""
    before = run.replica.is_finite()
    local = [each.tensor for each in run.replica.strategy.local_tensors().values() if each.tensor.numel()]
    if world.rank == world.size - 1:
        local[-1].fill_(torch.nan)
    return {"finite": before, "finite_when_spoiled": run.replica.is_finite()}


def trained(way: Way) -> dict[str, Any]:
    run = run_of(way)
    train(run)
    check_replicas_identical(world, run.replica.state(copy=False), "at the end")
    found = {"weights": weights(run), "metrics": evaluate(run), "kept": kept(run)}
    found |= seen_to_be_finite(run)
    run.replica.strategy.close()
    return found


def gone_on(way: Way, folder: Path) -> dict[str, Any]:
    """Train half of the way, save, and go on under the other strategy in new replicas."""
    half = run_of(way, max_steps=3)
    train(half)
    manager = CheckpointManager(folder, Checkpoint(), world, {})
    save_checkpoint(manager, world, half.replica, half.progress, dump_state(None, {}), wait=True)
    half.replica.strategy.close()
    second = run_of(way, strategy=way.then)
    resumed = manager.latest()
    assert resumed is not None
    resume_from(world, resumed, second.replica, second.progress, lambda *_: None, lambda: None)
    train(second)
    manager.close()
    found = {"weights": weights(second), "metrics": evaluate(second), **seen_to_be_finite(second)}
    second.replica.strategy.close()
    return found


out, *wanted = sys.argv[1:]
controller = "mpi" if world.is_over_mpi else "gloo"
found = {}
for way in CASES:
    if (wanted and way.name not in wanted) or not way.runs_on(world.size, controller):
        continue
    found[way.name] = (
        trained(way) if way.then is None else gone_on(way, Path(out) / way.name.replace(" ", "-"))
    )
(Path(out) / f"rank-{world.rank}.json").write_text(json.dumps(found))
world.close()
