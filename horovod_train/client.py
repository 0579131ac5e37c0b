"""Python client: start jobs, and observe and end them.

    import horovod_train as ht

    job = ht.submit("spiral.yaml", {"train.epochs": 30, "launch.num_ranks": 4})
    job.wait()
    print(job.result().metrics)

All launchers are supported: jobs on this machine, on other hosts, in Slurm and on Kubernetes. A job does not
depend on the process that submitted it. Methods block; in an event loop, call them in a thread:
``await asyncio.to_thread(job.wait)``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from html import escape
from pathlib import Path

from horovod_train.config.load import job_from, load_job
from horovod_train.config.schema import Job
from horovod_train.config.shipped import job_file
from horovod_train.errors import HorovodTrainError, JobFailedError
from horovod_train.events.file import EVENTS_FILE, Record, read_events
from horovod_train.events.series import Series, series_of
from horovod_train.events.types import Summary
from horovod_train.events.wire import parse_line
from horovod_train.launch.base import JobStatus, State, Submitted
from horovod_train.launch.jobs import find_job, known_jobs
from horovod_train.launch.submit import launcher_named, make_plan, resolve, submit_job

ORIGIN = "the overrides"
SPARK_WIDTH, SPARK_HEIGHT = 240, 48


@dataclass(frozen=True)
class JobResult:
    """Result of a job that has trained to its end.

    Attributes:
        metrics: Metrics of the last evaluation.
        checkpoint: Newest checkpoint; None: none was written.
        num_steps: Number of optimizer steps, including those before a resume.
    """

    metrics: Mapping[str, float]
    checkpoint: Path | None
    num_steps: int


class JobHandle:
    """A job that was started from this account. A handle may be created at any time, in any process."""

    def __init__(self, job: Submitted) -> None:
        self._job = job
        self._launcher = launcher_named(job.launcher)

    @property
    def id(self) -> str:
        """ID of the job, as ``horovod-train list`` shows it."""
        return self._job.job_id

    @property
    def launcher(self) -> str:
        """Name of the launcher."""
        return self._job.launcher

    @property
    def folder(self) -> Path:
        """Run folder, with events, state and output. With ``mpijob``, it is on a volume of the cluster."""
        return self._job.log_dir

    @property
    def state(self) -> State:
        """Current state, such as ``running`` or ``succeeded``; see ``status``."""
        return self.status().state

    def status(self) -> JobStatus:
        """Return state, exit code (None: not ended) and an explanation.

        Raises:
            LaunchError: The status cannot be determined, because Slurm or the cluster does not respond.
        """
        return self._launcher.status(self._job)

    def wait(self, timeout_s: float = math.inf) -> JobStatus:
        """Block until the job has ended, however it ended, and return its status.

        Raises:
            TimeoutError: The job has not ended within ``timeout_s``; it continues.
        """
        return self._launcher.wait(self._job, timeout_s)

    def result(self, timeout_s: float = math.inf) -> JobResult:
        """Wait for the end of the job, and return its result.

        Raises:
            JobFailedError: The job did not succeed: ``status`` of the error has the state, ``exit_code`` is
                75 if it was preempted: then submit it again to resume.
            TimeoutError: The job has not ended within ``timeout_s``; it continues.
        """
        status = self.wait(timeout_s)
        if status.state != "succeeded":
            raise JobFailedError(
                f"{self.id}: {status}", status, 1 if status.exit_code is None else status.exit_code
            )
        summary = next((r.event for r in reversed(self.events()) if isinstance(r.event, Summary)), None)
        if summary is None:  # a script
            return JobResult({}, None, max((step for step, _ in self.metrics().get("loss", [])), default=0))
        return JobResult(
            dict(summary.metrics), Path(summary.checkpoint) if summary.checkpoint else None, summary.steps
        )

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Yield the lines of the output, with the rank of each; with ``follow``, until the job ends."""
        for line in self._launcher.logs(self._job, follow=follow):
            text = parse_line(line).readable()
            if text is not None:
                yield text

    def events(self) -> list[Record]:
        """Return the events so far, oldest first; see docs/events.md.

        If the run folder is not on this machine, events are read from the output of the job, and their times
        are that of the submission.
        """
        path = self.folder / EVENTS_FILE
        if path.exists():
            return list(read_events(path))
        if self._launcher.has_local_files:
            return []
        lines = map(parse_line, self._launcher.logs(self._job, follow=False))
        return [Record(self._job.submitted_unix_s, each.rank, each.event) for each in lines if each.event]

    def metrics(self) -> Series:
        """Return ``loss``, ``lr``, ``samples_per_s`` and further numbers of steps, and ``eval/<metric>``.

        Values are those of the reported steps (a few per second). After a return to a checkpoint, values of
        steps that were repeated are the new ones.
        """
        return series_of(record.event for record in self.events())

    def drain(self) -> None:
        """Request the ranks to save a checkpoint and exit, without a time limit; does not wait for it.

        Raises:
            LaunchError: The launcher of the job runs on another host.
        """
        self._launcher.cancel(self._job, "drain")

    def cancel(self, *, now: bool = False) -> JobStatus:
        """End the job, and return its final status.

        Ranks may save a checkpoint within ``launch.grace_s``; with ``now``, they are killed immediately.

        Raises:
            LaunchError: The launcher of the job runs on another host.
        """
        self._launcher.cancel(self._job, "kill" if now else "stop")
        return self._launcher.wait(self._job)

    def __repr__(self) -> str:
        return f"<JobHandle {self.id}>"

    def _repr_html_(self) -> str:
        """Return state, progress and loss curve for a notebook."""
        try:
            status = str(self.status())
        except HorovodTrainError as error:
            status = f"unknown. {error.message}"
        losses = self.metrics().get("loss", [])
        at = f"step {losses[-1][0]:,}, loss {losses[-1][1]:.4g}" if losses else "no step yet"
        return f"<p><b>{escape(self.id)}</b>: {escape(status)}<br>{at}</p>{_sparkline(losses)}"


def submit(
    job: str | Path | Mapping[str, object] | Job, overrides: Mapping[str, object] | None = None
) -> JobHandle:
    """Start a job, and return without waiting for it.

    Args:
        job: A file, the name of a shipped task, a job description as a mapping, or a ``Job``. Relative paths
            in a mapping refer to the current directory. Environment variables override only files.
        overrides: Values by dotted path, such as ``{"train.epochs": 3}``; they override the job.

    Raises:
        ConfigError: The job description is not valid; the error lists all problems.
        LaunchError: The launcher rejects the job, or cannot start it.
    """
    settings = {} if overrides is None else dict(overrides)
    if isinstance(job, str | Path):
        described = load_job(job_file(str(job)), settings=settings, origin=ORIGIN)
    else:
        tree = job.model_dump(mode="json") if isinstance(job, Job) else deepcopy(dict(job))
        described = job_from(tree, Path(), "the job", environ={}, settings=settings, origin=ORIGIN)
    request = resolve(described)
    return JobHandle(submit_job(request, make_plan(request), lambda text: warnings.warn(text, stacklevel=2)))


def jobs() -> list[JobHandle]:
    """Return all jobs that were started from this account, newest first, ended ones included."""
    return [JobHandle(each) for each in known_jobs()]


def job(job_id: str) -> JobHandle:
    """Return a job by its ID, by a unique prefix of it, or by its name (of several, the newest running one).

    Raises:
        UserError: No job, or more than one, matches.
    """
    return JobHandle(find_job(job_id))


def _sparkline(points: list[tuple[int, float]]) -> str:
    """Return a curve as an SVG image; empty for fewer than two finite points."""
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    steps, values = zip(*finite, strict=True)
    width, height = (steps[-1] - steps[0]) or 1, (max(values) - min(values)) or 1.0
    path = " ".join(
        f"{(step - steps[0]) / width * SPARK_WIDTH:.1f},{(max(values) - value) / height * SPARK_HEIGHT:.1f}"
        for step, value in finite
    )
    return (
        f'<svg width="{SPARK_WIDTH}" height="{SPARK_HEIGHT}" role="img" aria-label="loss">'
        f'<polyline points="{path}" fill="none" stroke="currentColor"/></svg>'
    )
