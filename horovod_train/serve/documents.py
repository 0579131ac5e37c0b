"""JSON documents of the HTTP API."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from horovod_train.client.local import LocalJob
from horovod_train.errors import HorovodTrainError, Problem
from horovod_train.launch.base import JobStatus, State

MAX_FILES = 200
JobId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)]
FileName = Annotated[str, Field(min_length=1, max_length=255)]


class Submission(BaseModel):
    """A job to start."""

    model_config = ConfigDict(extra="forbid", strict=True)

    job: dict[str, object] = Field(description="Job description, as in a job file; see docs/job.md.")
    overrides: dict[str, object] = Field(
        default={}, description="Values by dotted path, such as `train.epochs`; they override the job."
    )
    files: dict[FileName, str] = Field(
        default={},
        max_length=MAX_FILES,
        description="Contents of Python files by relative path; `task: train.py:Task` may refer to them.",
    )


class Cancellation(BaseModel):
    """How a job is ended."""

    model_config = ConfigDict(extra="forbid", strict=True)

    now: bool = Field(default=False, description="Kill the ranks at once, without saving a checkpoint.")


class JobDocument(BaseModel):
    """A job and its status."""

    id: str
    launcher: str
    folder: str = Field(description="Run folder on the server's machine.")
    submitted_unix_s: float
    state: State
    exit_code: int | None = Field(description="75: preempted, with a checkpoint; null: not ended.")
    has_ended: bool
    message: str
    cause: str
    lost_ranks: list[int]

    @classmethod
    def of(cls, job: LocalJob, status: JobStatus) -> JobDocument:
        """Return the document of a job with a status."""
        return cls(
            id=job.id,
            launcher=job.launcher,
            folder=str(job.folder),
            submitted_unix_s=job.submitted_unix_s,
            state=status.state,
            exit_code=status.exit_code,
            has_ended=status.has_ended,
            message=status.message,
            cause=status.cause,
            lost_ranks=list(status.lost_ranks),
        )


class JobPage(BaseModel):
    """A page of the list of jobs, newest first."""

    jobs: list[JobDocument]
    next: str | None = Field(description="Value of `after` for the next page; null: this is the last one.")


class Points(BaseModel):
    """Values of a metric, by completed steps. NaN and infinity are null."""

    step: list[int]
    value: list[float | None]


class MetricsDocument(BaseModel):
    """Values of steps and evaluations."""

    series: dict[str, Points]


class ResultDocument(BaseModel):
    """Result of a job that has succeeded; of a script, without metrics and checkpoint."""

    metrics: dict[str, float | None] = Field(description="Metrics of the last evaluation.")
    checkpoint: str | None = Field(description="Newest checkpoint, on the server's machine.")
    num_steps: int


class ProblemDocument(BaseModel):
    """One problem of a job description, or of a request."""

    path: str
    found: str
    message: str
    hint: str


class ErrorDocument(BaseModel):
    """Response to a request that failed."""

    kind: str = Field(description="config, key_used, launch, user, request, ...")
    message: str
    hint: str
    problems: list[ProblemDocument] = Field(description="All problems of a job description or a request.")

    @classmethod
    def of(cls, error: HorovodTrainError) -> ErrorDocument:
        """Return the document of an error."""
        problems: tuple[Problem, ...] = getattr(error, "problems", ())
        known = next(each for each in type(error).__mro__ if each.__module__ == HorovodTrainError.__module__)
        name = known.__name__.removesuffix("Error")
        return cls(
            kind=re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower(),
            message=error.message,
            hint=error.hint,
            problems=[
                ProblemDocument(path=each.path, found=each.found, message=each.message, hint=each.hint)
                for each in problems
            ],
        )
