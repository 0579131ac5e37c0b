"""On every rank: train the small network in one framework in several ways, and write down what came out.

The test compares it with a computation in NumPy, which shares no code with this.
usage: FRAMEWORK OUT_FOLDER; the folder ``checkpoints`` in it has one of the version before
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

from frameworks.cases import BEFORE, NOT_A_NUMBER, OVERFLOW, OVERFLOWING, STOPPED_WITHIN, cases_of

from horovod_train.checkpoint.manager import CheckpointManager
from horovod_train.collectives.base import Mesh
from horovod_train.config.rules import broken_rules
from horovod_train.config.schema import Job
from horovod_train.errors import HorovodTrainError, UserError
from horovod_train.health.comparisons import fingerprints
from horovod_train.registry import FRAMEWORKS
from horovod_train.training.hooks.base import Hook
from horovod_train.training.hooks.saving import EvaluateWithinEpoch
from horovod_train.training.loop import evaluate
from horovod_train.training.run import Run
from horovod_train.worker import make_run, restore_from, train_all

name, folder = sys.argv[1], Path(sys.argv[2])
task = import_module(f"frameworks.{name}_task")
framework = FRAMEWORKS.load(name)()


class Evaluations(Hook):
    """Notes the steps and results of evaluations."""

    def __init__(self) -> None:
        self.found: list[tuple[int, dict[str, float]]] = []

    def on_evaluation(self, run: Run, *, begins: bool) -> None:
        if not begins:
            self.found.append((run.progress.step, dict(run.progress.metrics)))


def train(job: Job, checkpoints: Path | None = None):
    if problems := broken_rules(job):
        raise UserError("; ".join(f"{problem.path} {problem.message}" for problem in problems))
    mesh = Mesh.data_parallel(world)
    replica, train_reader, eval_reader = framework.prepare(job, mesh)
    run = make_run(job, mesh, replica, train_reader, eval_reader)
    evaluations = Evaluations()
    run.hooks += [EvaluateWithinEpoch(), evaluations]
    replica.broadcast()
    if checkpoints is not None:
        manager = CheckpointManager(checkpoints, job.checkpoint, world, job.model_dump(mode="json"))
        restore_from(run, manager.latest(), framework)
        manager.close()
    error = ""
    try:
        train_all(framework, run)
    except HorovodTrainError as stopped:
        error = f"{type(stopped).__name__}: {stopped}"
    found = {
        "weights": [array.astype("float64").ravel().tolist() for array in task.weights(replica)],
        "fingerprints": fingerprints(replica.state(copy=False)),
        "metrics": {} if error else evaluate(run),
        "evaluations": evaluations.found,
        "steps": run.progress.step,
        "error": error,
    }
    # Reducers of earlier cases must not listen to later ones.
    getattr(getattr(replica, "gradients", None), "close", lambda: None)()
    return found


def train_or_refuse(job: Job):
    try:
        return {"refused": "", **train(job)}
    except UserError as refused:
        return {"refused": str(refused)}


world = framework.connect(Job.model_validate(NOT_A_NUMBER[0].job(name)))
found = {
    case.name: train_or_refuse(Job.model_validate(case.job(name, huge=huge)))
    for cases, huge in (
        (cases_of(name), None),
        ([STOPPED_WITHIN], None),
        ([OVERFLOW], OVERFLOWING),
        (NOT_A_NUMBER, float("inf")),
    )
    for case in cases
}
found["version before"] = {
    "refused": "",
    **train(Job.model_validate(BEFORE.job(name)), folder / "checkpoints"),
}
(folder / f"rank-{world.rank}.json").write_text(json.dumps(found))
world.close()
