"""Callbacks of Keras, Lightning and Transformers that a job refuses, and what to set instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from horovod_train.errors import UserError


@dataclass(frozen=True)
class RefusedCallback:
    """Reason why a job refuses a class of callbacks, and classes derived from it.

    Attributes:
        reason: Predicate of the error message "the callback NAME ...".
        instead: Hint of the error.
        condition: Returns whether an instance is refused; default: always.
    """

    reason: str
    instead: str
    condition: Callable[[Any], bool] = bool


_CHECKPOINTS = RefusedCallback("saves checkpoints, which the job does", "leave it out, and set checkpoint:")
_RATE = RefusedCallback("sets the learning rate, which the job does", "leave it out, and set lr.decay")
_PROGRESS = RefusedCallback("reports progress, which the job does", "leave it out")
_SCRIPT = "use Lightning's Trainer with HorovodStrategy in a script (docs/own-loop.md)"
_AVERAGE = "use framework: torch with ema:, or Lightning's Trainer with HorovodStrategy in a script"

REFUSED: dict[str, dict[str, RefusedCallback]] = {
    "keras": {
        "ModelCheckpoint": _CHECKPOINTS,
        "OrbaxCheckpoint": _CHECKPOINTS,
        "BackupAndRestore": _CHECKPOINTS,
        "EarlyStopping": RefusedCallback(
            "restores the best weights at the end (restore_best_weights), without the optimizer state "
            "that belongs to them",
            "leave restore_best_weights out, and set checkpoint.best, which keeps the best checkpoint",
            lambda callback: callback.restore_best_weights,
        ),
        "LearningRateScheduler": _RATE,
        "ReduceLROnPlateau": _RATE,
        "SwapEMAWeights": RefusedCallback(
            "swaps averaged weights in for evaluations, so that checkpoints would contain these",
            "leave it out; the optimizer's use_ema saves the averages with its state",
        ),
    },
    "lightning": {
        "Checkpoint": _CHECKPOINTS,
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
        "ProgressBar": _PROGRESS,
        "ModelSummary": RefusedCallback("prints the model on each rank", "leave it out"),
    },
    "transformers": {
        "EarlyStoppingCallback": RefusedCallback(
            "needs evaluations that Trainer plans; the job plans them",
            "leave it out, and set evaluation.early_stopping",
        ),
        "ProgressCallback": _PROGRESS,
    },
}
"""Refused callbacks by framework and class name."""

PACKAGES = {
    "keras": {"keras"},
    "lightning": {"lightning", "pytorch_lightning"},
    "transformers": {"transformers"},
}


def check_callbacks(callbacks: Iterable[object], framework: str) -> None:
    """Raise UserError if a callback conflicts with a function of the job."""
    for callback in callbacks:
        for each in type(callback).__mro__:
            refused = REFUSED[framework].get(each.__name__)
            is_of_framework = each.__module__.partition(".")[0] in PACKAGES[framework]
            if refused and is_of_framework and refused.condition(callback):
                raise UserError(
                    f"the callback {type(callback).__name__} {refused.reason}", hint=refused.instead
                )
