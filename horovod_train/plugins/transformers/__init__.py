"""Hugging Face Transformers on Horovod.

In a script:

    from horovod_train.plugins.transformers import HorovodTrainer, init

    init()                                 # first: before TrainingArguments
    trainer = HorovodTrainer(model=model, args=TrainingArguments(...), train_dataset=data)
    trainer.train()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from horovod_train.config.support import FrameworkSupport, RefusedCallback
from horovod_train.plugins.frameworks import (
    REPORTS_PROGRESS,
    attributes_in,
    keeps_its_model,
    updates_at_once,
)

if TYPE_CHECKING:
    from horovod_train.plugins.transformers.trainer import HorovodTrainer, HorovodTrainerMixin, init


__all__ = ["HorovodTrainer", "HorovodTrainerMixin", "init"]
__getattr__ = attributes_in(
    __name__,
    {"HorovodTrainer": "trainer", "HorovodTrainerMixin": "trainer", "init": "trainer"},
)

CALLBACKS = {
    "EarlyStoppingCallback": RefusedCallback(
        "needs evaluations that Trainer plans; the job plans them",
        "leave it out, and set evaluation.early_stopping",
    ),
    "ProgressCallback": REPORTS_PROGRESS,
}

SUPPORT = FrameworkSupport(
    f"{__name__}.framework:TransformersFramework",
    ("transformers",),
    "5.23.0",
    "Trainer.train",
    (*keeps_its_model("Transformers"), updates_at_once("Transformers")),
    note="no fp16 on a CPU",
    affected_by=("accelerate",),
    modules=frozenset({"transformers"}),
    callbacks=CALLBACKS,
    uses_torch_binding=True,
)
