"""On every rank: train the shipped language model for three steps, and write down what tensors took.

usage: OUT_FOLDER STRATEGY_JSON TASK_ARGS_JSON TRAIN_JSON
"""

from __future__ import annotations

import json
import resource
import sys
from contextlib import nullcontext
from pathlib import Path

import psutil
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from horovod_train.collectives.base import Mesh
from horovod_train.config.arguments import axes_of
from horovod_train.config.schema import Job
from horovod_train.frameworks.torch.framework import TorchFramework
from horovod_train.training.loop import rest_of_epoch
from horovod_train.worker import make_run

torch.set_num_threads(1)
out, strategy, task_args, train = sys.argv[1:]
job = Job.model_validate(
    {
        "name": "memory",
        "task": "gpt",
        "task_args": json.loads(task_args),
        "train": json.loads(train),
        "optimizer": {"name": "adamw"},
        "strategy": json.loads(strategy),
        "health": {"verify_strategy": False},
    }
)
framework = TorchFramework()
world = framework.connect(job)
base = psutil.Process().memory_info().rss
mesh = Mesh.of(world, axes_of(job.strategy, world.size))
run = make_run(job, mesh, *framework.prepare(job, mesh))
replica = run.replica
replica.broadcast()
steps = iter(rest_of_epoch(run))
replica.step(next(steps), 1e-3, want_norm=False)
own = [local.tensor for local in replica.strategy.local_tensors().values()]
state = replica.strategy.saved_optimizer.state.values()
kept = [v.to_local() if hasattr(v, "to_local") else v for entry in state for v in entry.values()]
replica.gradient_watch.watched = lambda share: nullcontext()  # the tracker registers hooks of gradients
tracker = MemTracker()
tracker.track_external(replica.model, replica.strategy.saved_optimizer, *own)
with tracker:
    replica.step(next(steps), 1e-3, want_norm=False)
peak = max(of_device["Total"] for of_device in tracker.get_tracker_snapshot("peak").values())
(Path(out) / f"rank-{world.rank}.json").write_text(
    json.dumps(
        {
            "weights": sum(t.nbytes for t in own),
            "optimizer": sum(t.nbytes for t in kept),
            "peak": peak,
            "base": base,
            "rss": psutil.Process().memory_info().rss,
            "process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
    )
)
replica.strategy.close()
world.close()
