"""Jobs that are submitted on this machine."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

from horovod_train.client.handle import JobHandle, JobResult
from horovod_train.client.tails import FileTail, OutputTail, Tail
from horovod_train.config.load import job_from, load_job, plain_values
from horovod_train.config.schema import Job
from horovod_train.config.shipped import job_file
from horovod_train.events.file import EVENTS_FILE, Record, read_events
from horovod_train.events.series import Series, series_of
from horovod_train.events.types import Summary
from horovod_train.events.wire import parse_line
from horovod_train.launch.base import JobStatus, Launcher, Submitted
from horovod_train.launch.jobs import LOG_FILE, find_job, known_jobs
from horovod_train.launch.submit import launcher_named, make_plan, resolve, submit_job, submit_once

ORIGIN = "the overrides"


class LocalJob:
    """Access to a job of this account."""

    def __init__(self, job: Submitted) -> None:
        self._job = job

    @cached_property
    def _launcher(self) -> Launcher:
        """Launcher of the job; raises ``UnknownNameError`` if it is not installed."""
        return launcher_named(self._job.launcher)

    @property
    def id(self) -> str:
        """ID of the job."""
        return self._job.job_id

    @property
    def launcher(self) -> str:
        """Name of the launcher."""
        return self._job.launcher

    @property
    def folder(self) -> Path:
        """Run folder."""
        return self._job.log_dir

    @property
    def submitted_unix_s(self) -> float:
        """Time of the submission."""
        return self._job.submitted_unix_s

    @property
    def queries_a_server(self) -> bool:
        """Whether a status is the answer of another system, such as Slurm or Kubernetes."""
        return getattr(self._launcher, "queries_a_server", True)

    @property
    def has_local_files(self) -> bool:
        """Whether the run folder is on this machine."""
        return self._launcher.has_local_files

    def status(self) -> JobStatus:
        """Return the status."""
        return self._launcher.status(self._job)

    def wait(self, timeout_s: float) -> JobStatus:
        """Block until the job has ended."""
        return self._launcher.wait(self._job, timeout_s)

    def result(self) -> JobResult:
        """Return the result of a job that has succeeded."""
        summary = next((r.event for r in reversed(self.events()) if isinstance(r.event, Summary)), None)
        if summary is None:  # a script
            return JobResult({}, None, max((step for step, _ in self.metrics().get("loss", [])), default=0))
        return JobResult(
            dict(summary.metrics), Path(summary.checkpoint) if summary.checkpoint else None, summary.steps
        )

    def logs(self, *, follow: bool) -> Iterator[str]:
        """Yield the readable lines of the output."""
        for line in self._launcher.logs(self._job, follow=follow):
            text = parse_line(line).readable()
            if text is not None:
                yield text

    def events(self) -> list[Record]:
        """Return the events so far."""
        path = self.folder / EVENTS_FILE
        if path.exists():
            return list(read_events(path))
        if self.has_local_files:
            return []
        lines = map(parse_line, self._launcher.logs(self._job, follow=False))
        return [Record(self.submitted_unix_s, each.rank, each.event) for each in lines if each.event]

    def metrics(self) -> Series:
        """Return the values of steps and evaluations."""
        return series_of(record.event for record in self.events())

    def drain(self) -> None:
        """Request the ranks to save and exit."""
        self._launcher.cancel(self._job, "drain")

    def cancel(self, *, now: bool) -> None:
        """End the job, without waiting for it."""
        self._launcher.cancel(self._job, "kill" if now else "stop")

    def tail_of_events(self, position: str) -> Tail:
        """Return a reader of the lines of ``events.jsonl`` after a position; see ``tails.py``."""
        if self.has_local_files:
            return FileTail(self.folder / EVENTS_FILE, position, has_times=True)
        return OutputTail(self._launcher, self._job, position, as_events=True)

    def tail_of_log(self, position: str) -> Tail:
        """Return a reader of the lines of the output after a position; see ``tails.py``."""
        if self.has_local_files:
            return FileTail(self.folder / LOG_FILE, position)
        return OutputTail(self._launcher, self._job, position)


def submit(
    job: str | Path | Mapping[str, object] | Job,
    overrides: Mapping[str, object] | None = None,
    *,
    key: str | None = None,
) -> JobHandle:
    """Start a job, and return without waiting for it.

    Args:
        job: A file, the name of a shipped task, a job description as a mapping, or a ``Job``. Relative paths
            in a mapping refer to the current directory. Environment variables override fields of files, not
            of mappings and ``Job`` objects.
        overrides: Values by dotted path, such as ``{"train.epochs": 3}``; they override the job.
        key: Any text. If a job was started with this key before, its handle is returned, and no job is
            started. A process that may be killed and started again submits each job once this way.

    Raises:
        ConfigError: The job description is not valid; the error lists all problems.
        KeyUsedError: The key was used for a job with another description.
        LaunchError: The launcher rejects the job, or cannot start it.
    """
    return JobHandle(LocalJob(start(described(job, overrides), key)[0]))


def described(
    job: str | Path | Mapping[str, object] | Job,
    overrides: Mapping[str, object] | None,
    folder: Path = Path(),
) -> Job:
    """Return the job that the arguments of ``submit`` describe; relative paths refer to ``folder``.

    Raises:
        ConfigError: The job description is not valid; the error lists all problems.
    """
    settings = plain_values(overrides or {})
    if isinstance(job, str | Path):
        return load_job(job_file(str(job)), settings=settings, origin=ORIGIN)
    tree = job.model_dump(mode="json") if isinstance(job, Job) else plain_values(job)
    return job_from(tree, folder, "the job", environ={}, settings=settings, origin=ORIGIN)


def start(job: Job, key: str | None) -> tuple[Submitted, bool]:
    """Start a job, or find the one that was started with a key; return its record, and whether it is new.

    Raises:
        KeyUsedError: The key was used for a job with another description.
        LaunchError: The launcher rejects the job, or cannot start it.
    """

    def warn(text: str) -> None:
        warnings.warn(text, stacklevel=4)

    if key:
        return submit_once(job, key, warn)
    request = resolve(job)
    return submit_job(request, make_plan(request), warn), True


def jobs() -> list[JobHandle]:
    """Return all jobs that were started from this account, newest first, ended ones included."""
    return [JobHandle(LocalJob(each)) for each in known_jobs()]


def job(job_id: str) -> JobHandle:
    """Return a job by its ID, a unique prefix of it, or its name.

    A name selects the newest job of this name that has not ended, or else the newest.

    Raises:
        UserError: No job, or more than one, matches.
    """
    return JobHandle(LocalJob(find_job(job_id)))
