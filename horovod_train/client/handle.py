"""Handle of a job, and access to the job behind it: on this machine, or through a server."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Protocol

from horovod_train.errors import HorovodTrainError, JobFailedError
from horovod_train.events.file import Record
from horovod_train.events.series import Series
from horovod_train.events.thinning import places_to_keep
from horovod_train.launch.base import JobStatus, State

SPARK_WIDTH, SPARK_HEIGHT = 240, 48
MAX_SPARK_POINTS = 500


@dataclass(frozen=True)
class JobResult:
    """Result of a job that has succeeded. For scripts, ``metrics`` is empty and ``checkpoint`` is None.

    Attributes:
        metrics: Metrics of the last evaluation.
        checkpoint: Newest checkpoint; None: none was written.
        num_steps: Number of optimizer steps, including those before a resume.
    """

    metrics: Mapping[str, float]
    checkpoint: Path | None
    num_steps: int


class JobAccess(Protocol):
    """Access to one job. Methods raise the errors that those of ``JobHandle`` document."""

    @property
    def id(self) -> str:
        """ID of the job."""
        ...

    @property
    def launcher(self) -> str:
        """Name of the launcher."""
        ...

    @property
    def folder(self) -> Path:
        """Run folder."""
        ...

    def status(self) -> JobStatus:
        """Return the status."""
        ...

    def wait(self, timeout_s: float) -> JobStatus:
        """Block until the job has ended."""
        ...

    def result(self) -> JobResult:
        """Return the result of a job that has succeeded."""
        ...

    def logs(self, *, follow: bool) -> Iterator[str]:
        """Yield the readable lines of the output."""
        ...

    def events(self) -> list[Record]:
        """Return the events so far."""
        ...

    def metrics(self) -> Series:
        """Return the values of steps and evaluations."""
        ...

    def drain(self) -> None:
        """Request the ranks to save and exit."""
        ...

    def cancel(self, *, now: bool) -> None:
        """End the job, without waiting for it."""
        ...


class JobHandle:
    """A job that was submitted. A handle may be created at any time, in any process.

    Through a server, all methods may also raise ``ServerError`` (no response within ``patience_s``) and
    ``UserError`` (request rejected).
    """

    def __init__(self, access: JobAccess) -> None:
        self._access = access

    @property
    def id(self) -> str:
        """ID of the job, as ``horovod-train list`` shows it."""
        return self._access.id

    @property
    def launcher(self) -> str:
        """Name of the launcher."""
        return self._access.launcher

    @property
    def folder(self) -> Path:
        """Run folder, with events, state and output, on the machine that submitted the job.

        With ``mpijob``, it is on a volume of the cluster.
        """
        return self._access.folder

    @property
    def state(self) -> State:
        """Current state.

        One of waiting, starting, running, leaving (saving a checkpoint before the exit), succeeded, failed,
        preempted, cancelled, unknown.
        """
        return self.status().state

    def status(self) -> JobStatus:
        """Return the status.

        Raises:
            LaunchError: The system of the launcher does not respond.
        """
        return self._access.status()

    def wait(self, timeout_s: float = math.inf) -> JobStatus:
        """Block until the job has ended, and return its final status.

        Raises:
            TimeoutError: The job has not ended within ``timeout_s``; it continues.
            LaunchError: The status could not be determined for ten minutes.
        """
        return self._access.wait(timeout_s)

    def result(self, timeout_s: float = math.inf) -> JobResult:
        """Block until the job has ended, and return its result.

        Raises:
            JobFailedError: The job failed, was preempted or cancelled; the error has its status.
            TimeoutError: The job has not ended within ``timeout_s``; it continues.
        """
        status = self.wait(timeout_s)
        if status.state != "succeeded":
            raise JobFailedError(
                f"{self.id}: {status}", status, 1 if status.exit_code is None else status.exit_code
            )
        return self._access.result()

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Yield the lines of the output, with the rank of each; with ``follow``, until the job ends."""
        return self._access.logs(follow=follow)

    def events(self) -> list[Record]:
        """Return the events so far, oldest first; see docs/events.md.

        With ``mpijob``, events are read from the output of the job, and their times are that of the
        submission.
        """
        return self._access.events()

    def metrics(self) -> Series:
        """Return ``loss``, ``lr``, ``samples_per_s`` and further values of steps, and ``eval/<metric>``.

        Values are those of the reported steps (a few per second). After a return to a checkpoint, values of
        steps that were repeated are the new ones.
        """
        return self._access.metrics()

    def drain(self) -> None:
        """Request the ranks to save a checkpoint and exit, without a time limit; does not wait for it.

        Raises:
            LaunchError: The launcher of the job runs on another host.
        """
        self._access.drain()

    def cancel(self, *, now: bool = False) -> JobStatus:
        """End the job, and return its final status.

        Ranks may save a checkpoint within ``launch.grace_s``; with ``now``, they are killed (in Slurm, after
        its KillWait).

        Raises:
            LaunchError: The launcher of the job runs on another host.
        """
        self._access.cancel(now=now)
        return self.wait()

    def __repr__(self) -> str:
        return f"<JobHandle {self.id}>"

    def _repr_html_(self) -> str:
        """Return state, progress and loss curve for a notebook."""
        losses: list[tuple[int, float]] = []
        try:
            status = str(self.status())
            losses = self.metrics().get("loss", [])
        except HorovodTrainError as error:
            status = f"unknown. {error.message}"
        at = f"step {losses[-1][0]:,}, loss {losses[-1][1]:.4g}" if losses else "no step yet"
        return f"<p><b>{escape(self.id)}</b>: {escape(status)}<br>{at}</p>{_sparkline(losses)}"


def _sparkline(points: list[tuple[int, float]]) -> str:
    """Return a curve as an SVG image; empty for fewer than two finite points."""
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    steps, values = zip(*finite, strict=True)
    first, width, top = steps[0], (steps[-1] - steps[0]) or 1, max(values)
    height = (top - min(values)) or 1.0
    path = " ".join(
        f"{(steps[i] - first) / width * SPARK_WIDTH:.1f},{(top - values[i]) / height * SPARK_HEIGHT:.1f}"
        for i in places_to_keep(steps, [{"loss": value} for value in values], MAX_SPARK_POINTS)
    )
    return (
        f'<svg width="{SPARK_WIDTH}" height="{SPARK_HEIGHT}" role="img" aria-label="loss">'
        f'<polyline points="{path}" fill="none" stroke="currentColor"/></svg>'
    )
