"""Sections of the job description for evaluations and checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from horovod_train.config.duration import Duration, Interval
from horovod_train.config.fields import Count, Section
from horovod_train.config.former import with_present_names


def as_list(value: object) -> object:
    """Return a single value as a list; null as an empty one."""
    return [] if value is None else value if isinstance(value, list) else [value]


class EarlyStopping(Section):
    """Stop training when an evaluation metric no longer improves."""

    metric: Annotated[str, StringConstraints(min_length=1)]
    """Name of an evaluation metric."""

    mode: Literal["min", "max"]
    """Whether smaller or larger is better."""

    patience: Count = 3
    """Number of evaluations without an improvement before all ranks stop."""

    min_delta: Annotated[float, Field(ge=0, le=1e12)] = 0.0
    """Smallest change that counts as an improvement."""


class Evaluation(Section):
    """Interval and batch size of evaluations, and early stopping."""

    every: Interval = Duration(1)
    """Interval of evaluations; the end of training is always evaluated."""

    batch_size_per_rank: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """Samples per rank and step; null: as in training."""

    early_stopping: EarlyStopping | None = None
    """Early stopping; null: train all epochs."""

    @model_validator(mode="before")
    @classmethod
    def _as_it_was_called(cls, values: object) -> object:
        """Rename ``every_epochs``, a field of previous versions."""
        return with_present_names("evaluation", values)


class Best(Section):
    """Criterion of the best checkpoint."""

    metric: Annotated[str, StringConstraints(min_length=1)]
    """Name of an evaluation metric."""

    mode: Literal["min", "max"]
    """Whether smaller or larger is better."""


class Checkpoint(Section):
    """Interval and folder of checkpoints, and whether to resume."""

    dir: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Folder that all ranks can read (under sharded strategies, also write); null: ``checkpoints`` in the
    folder of the job."""

    every: Annotated[
        list[Interval], BeforeValidator(as_list, json_schema_input_type=Interval | list[Interval] | None)
    ] = [Duration(1)]
    """Intervals of checkpoints: a duration, or a list. null: only the end of training is saved, as always."""

    keep_last: Count = 3
    """Number of newest checkpoints to retain."""

    best: Best | None = None
    """Criterion of a best checkpoint, which is also saved and retained; null: none."""

    resume: Literal["auto", "never", "required"] = "auto"
    """auto: resume from the newest valid checkpoint, if any; required: fail if none; never: start over."""

    background: bool = True
    """Write checkpoints in the background."""

    @model_validator(mode="before")
    @classmethod
    def _as_they_were_called(cls, values: object) -> object:
        """Merge ``every_epochs`` and ``every_steps``, fields of previous versions."""
        return with_present_names("checkpoint", values)
