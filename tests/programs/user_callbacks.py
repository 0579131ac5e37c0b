"""In one process: train with callbacks of a user, undisturbed and resumed, and with those that jobs refuse.

usage: FRAMEWORK OUT_FOLDER
"""

from __future__ import annotations

import json
import logging
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from frameworks.cases import Case

from horovod_train.checkpoint.manager import CheckpointManager
from horovod_train.collectives.base import Mesh
from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.registry import FRAMEWORKS
from horovod_train.training.hooks.saving import SaveCheckpoints
from horovod_train.worker import make_run, restore_from, train_all

name, folder = sys.argv[1], Path(sys.argv[2])
task = import_module(f"frameworks.{name}_task")
callbacks: Any = import_module(f"frameworks.{name}_callbacks")
framework = FRAMEWORKS.load(name)()
EPOCHS = 4
messages: list[str] = []


class Messages(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        messages.append(record.getMessage())


logging.getLogger("horovod_train").addHandler(Messages())


def job(epochs: int) -> Job:
    document = Case("callbacks", num_samples=24).job(name)
    document["train"]["epochs"] = epochs
    return Job.model_validate(document)


def train(epochs: int, brought: list[Any], checkpoints: str) -> dict[str, Any]:
    """Train to an epoch, from the newest checkpoint in a folder if there is one."""
    task.Task.callbacks = lambda self: brought
    messages.clear()
    mesh = Mesh.data_parallel(world)
    replica, *readers = framework.prepare(job(epochs), mesh)
    run = make_run(job(epochs), mesh, replica, *readers)
    manager = CheckpointManager(
        folder / checkpoints, job(epochs).checkpoint, world, job(epochs).model_dump(mode="json")
    )
    run.hooks.append(SaveCheckpoints(manager, framework))
    if (resumed := manager.latest()) is not None:
        restore_from(run, resumed, framework)
    try:
        train_all(framework, run)
    finally:
        manager.close()
    return {
        "weights": [array.astype("float64").ravel().tolist() for array in task.weights(replica)],
        "metrics": run.progress.current_metrics,
        "messages": list(messages),
    }


def refusal(brought: list[Any]) -> str:
    try:
        train(1, brought, "refused")
    except UserError as error:
        return str(error)
    return ""


world = framework.connect(job(1))
found: dict[str, Any] = {"undisturbed": train(EPOCHS, whole := callbacks.make(), "undisturbed")}
found["undisturbed"]["state"] = callbacks.state(whole)
train(2, callbacks.make(), "resumed")
found["resumed"] = train(EPOCHS, again := callbacks.make(), "resumed")
found["resumed"]["state"] = callbacks.state(again)
found["without"] = train(EPOCHS + 1, [], "resumed")
found["at the end"] = train(2, callbacks.changing_at_the_end(), "at the end")
found["refused"] = {type(each).__name__: refusal([each]) for each in callbacks.refused()}
found["rate"] = refusal(callbacks.setting_the_rate())
(folder / "found.json").write_text(json.dumps(found))
world.close()
