"""On every rank: train small models with our trainer in several ways and write the weights down.

The test compares them with a plain PyTorch loop over the joint batch, which shares no code with
this. usage: OUT_FOLDER
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from cases import CASES, Task

from horovod_train.collectives.base import Mesh
from horovod_train.config.schema import Job
from horovod_train.data.order import DataOrder
from horovod_train.frameworks.torch.framework import TorchFramework
from horovod_train.health.comparisons import FiniteGuard, fingerprints
from horovod_train.lr.policy import LearningRatePolicy
from horovod_train.training.loop import evaluate, train
from horovod_train.training.run import Progress, Run

torch.set_num_threads(1)
framework = TorchFramework()
world = framework.connect(Job(name="x", task="digits"))
found = {}
for case in CASES:
    job = Job.model_validate(case.job(f"{Path(__file__).parent / 'cases.py'}:Task"))
    mesh = Mesh.data_parallel(world)
    replica, train_reader, eval_reader = framework.prepare(job, mesh)
    replica.broadcast()
    run = Run(
        job=job,
        mesh=mesh,
        replica=replica,
        train_reader=train_reader,
        eval_reader=eval_reader,
        policy=LearningRatePolicy(job.lr, job.global_batch_size(world.size), job.train.epochs),
        guard=FiniteGuard(job.health, world, scaler_skips=True),
        progress=Progress(DataOrder(len(train_reader), job.train.seed, job.data.shuffle)),
    )
    train(run)
    state = replica.state(copy=False)
    if state.is_sharded:  # what all ranks have are the weights
        state = replace(state, optimizer={}, optimizer_tree=None)
    found[case.name] = {
        "weights": torch.cat([p.detach().double().flatten() for p in replica.model.parameters()]).tolist(),
        "fingerprints": fingerprints(state),
        "metrics": evaluate(run),
        "steps": run.progress.step,
    }
    # Reducers of earlier cases must not listen to later ones.
    replica.strategy.close()
assert Task is not None
(Path(sys.argv[1]) / f"rank-{world.rank}.json").write_text(json.dumps(found))
world.close()
