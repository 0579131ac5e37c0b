"""Lightning on Horovod.

In a script:

    from horovod_train.plugins.lightning import HorovodStrategy

    trainer = Trainer(strategy=HorovodStrategy(), accelerator="cpu", devices=1)

or ``Trainer(strategy="horovod")``, after ``horovod_train.plugins.lightning.strategy`` has been imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from horovod_train.config.support import FrameworkSupport, RefusedCallback
from horovod_train.plugins.frameworks import (
    REPORTS_PROGRESS,
    SAVES_CHECKPOINTS,
    attributes_in,
    keeps_its_model,
    updates_at_once,
)

if TYPE_CHECKING:
    from horovod_train.plugins.lightning.strategy import HorovodStrategy


__all__ = ["HorovodStrategy"]
__getattr__ = attributes_in(
    __name__,
    {"HorovodStrategy": "strategy"},
)

_SCRIPT = "use Lightning's Trainer with HorovodStrategy in a script (docs/own-loop.md)"
_AVERAGE = "use framework: torch with ema:, or Lightning's Trainer with HorovodStrategy in a script"
CALLBACKS = {
    "Checkpoint": SAVES_CHECKPOINTS,
    "WeightAveraging": RefusedCallback(
        "averages weights, and the job's checkpoints would not contain the averages", _AVERAGE
    ),
    "StochasticWeightAveraging": RefusedCallback(
        "averages weights, and sets the learning rate, which the job does", _AVERAGE
    ),
    "GradientAccumulationScheduler": RefusedCallback(
        "changes the number of micro-batches, which the job sets", "set train.accumulation_steps"
    ),
    "LearningRateFinder": RefusedCallback("sets the learning rate, which the job does", "set lr.base_lr"),
    "BatchSizeFinder": RefusedCallback(
        "changes the batch size, which the job sets", "set train.batch_size_per_rank"
    ),
    "BaseFinetuning": RefusedCallback("adds parameters to the optimizer during training", _SCRIPT),
    "ModelPruning": RefusedCallback("replaces parameters during training", _SCRIPT),
    "LearningRateMonitor": RefusedCallback(
        "needs a logger of Lightning", "leave it out; the job exports the learning rate"
    ),
    "DeviceStatsMonitor": RefusedCallback(
        "needs a logger of Lightning", "leave it out; the job exports metrics of devices"
    ),
    "ProgressBar": REPORTS_PROGRESS,
    "ModelSummary": RefusedCallback("prints the model on each rank", "leave it out"),
}

SUPPORT = FrameworkSupport(
    f"{__name__}.framework:LightningFramework",
    ("lightning",),
    "2.6.6",
    "Trainer.fit",
    (*keeps_its_model("Lightning"), updates_at_once("Lightning")),
    modules=frozenset({"lightning", "pytorch_lightning"}),
    callbacks=CALLBACKS,
    uses_torch_binding=True,
)
