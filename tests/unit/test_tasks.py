"""Methods of a task that a job does not call are named when it starts."""

from __future__ import annotations

import pytest

from horovod_train.collectives.base import SingleRank
from horovod_train.frameworks.base import report_unused_methods
from horovod_train.frameworks.torch.task import OPTIONAL, REQUIRED
from horovod_train.plugins.lightning.framework import OPTIONAL as OF_LIGHTNING


def task_with(*names):
    return type("Task", (), {name: lambda self: None for name in names})()


def reported(caplog, task, known=(*REQUIRED, *OPTIONAL)):
    report_unused_methods(task, known, SingleRank())
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("after_updates", "did you mean after_update()?"),
        ("param_group", "did you mean param_groups()?"),
        ("val_data", "eval_data()"),
        ("configure_optimizers", "param_groups()"),
        ("lr_scheduler", "the job's lr: is used"),
        ("collate_fn", "the dataset's collate() is called"),
        ("on_epoch_end", "a job has no such hook"),
    ],
)
def test_a_method_that_looks_like_one_of_a_job_is_named(caplog, name, instead):
    (message,) = reported(caplog, task_with(*REQUIRED, name))

    assert message == f"methods of Task that the job does not call: {name}() ({instead})"


def test_a_task_may_have_methods_of_its_own(caplog):
    task = task_with(*REQUIRED, *OPTIONAL, "build_encoder", "lossy", "_on_start", "data_folder")

    assert reported(caplog, task) == []


def test_what_is_called_in_place_of_a_method_follows_the_framework(caplog):
    (message,) = reported(caplog, task_with("training_step", "after_step"), ("model", *OF_LIGHTNING))

    assert "training_step() (the module's training_step() is called)" in message
    assert "after_step() (a job has no such hook)" in message
