"""Python client: start jobs, and observe and end them.

.. code-block:: python

    import horovod_train as ht

    job = ht.submit("spiral.yaml", {"train.epochs": 30, "launch.num_ranks": 4})
    job.wait()
    print(job.result().metrics)

All launchers are supported. ``ht.Client`` (``plugins/serve/remote.py``) uses the HTTP API of ``horovod-train
serve`` instead. A job does not depend on the process that submitted it. Methods block; in an event loop, call
them in a thread: ``await asyncio.to_thread(job.wait)``.

    JobHandle, JobResult          a submitted job, and its result
    JobAccess, LocalJob           interface of the access to a job, and the access on this machine
    Tail, FileTail, OutputTail    incremental readers of events and output
    submit, start, jobs, job      jobs that are submitted on this machine

A job is on this machine, or behind a server.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import BinaryIO, Protocol
from zlib import crc32

from horovod_train.config.load import job_file, job_from, load_job, plain_values
from horovod_train.config.schema import Job
from horovod_train.errors import HorovodTrainError, JobFailedError
from horovod_train.events.file import EVENTS_FILE, Record, Series, places_to_keep, read_events, series_of
from horovod_train.events.types import Summary
from horovod_train.events.wire import parse_line
from horovod_train.launch.base import JobStatus, Launcher, State, Submitted
from horovod_train.launch.jobs import LOG_FILE, find_job, known_jobs
from horovod_train.launch.submit import launcher_named, make_plan, resolve, submit_job, submit_once
from horovod_train.system.files import open_regular

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

    Through a server, all methods may also raise ``ServerError`` (no response within ``retry_timeout_s``) and
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

        One of queued, starting, running, stopping (saving a checkpoint before the exit), succeeded, failed,
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
        if (error := self.exception(timeout_s)) is not None:
            raise error
        return self._access.result()

    def done(self) -> bool:
        """Return whether the job has ended."""
        return self.status().has_ended

    def exception(self, timeout_s: float = math.inf) -> JobFailedError | None:
        """Block until the job has ended, and return the error that ``result`` raises; None: it succeeded.

        Raises:
            TimeoutError: The job has not ended within ``timeout_s``; it continues.
        """
        status = self.wait(timeout_s)
        if status.state == "succeeded":
            return None
        code = 1 if status.exit_code is None else status.exit_code
        return JobFailedError(f"{self.id}: {status}", status, code)

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

        On Kubernetes, ranks have ``launch.grace_s``, and the call waits until the pods have ended.

        Raises:
            LaunchError: The launcher of the job runs on another host.
        """
        self._access.drain()

    def cancel(self, *, now: bool = False) -> JobStatus:
        """End the job, and return its final status.

        Ranks may save a checkpoint within ``launch.grace_s``; with ``now``, they are killed (in Slurm, after
        its KillWait; in Grid Engine, after the ``notify`` time of the queue; on Kubernetes, after the
        termination grace period of the pods).

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


CHUNK_BYTES = 256 * 1024
MAX_LINE_BYTES = 16 * 2**20


class Tail(Protocol):
    """Reader of lines.

    Each line has a position, a text from which another reader continues after this line, in any process.

    Attributes:
        pause_s: Time to wait after a call of ``read`` that has returned no line.
    """

    pause_s: float

    def read(self, *, is_complete: bool = False) -> list[tuple[str, str]]:
        """Return new lines as (position after the line, line); empty: there are none at present.

        Args:
            is_complete: The writer has ended: an unfinished last line is returned, too.

        Raises:
            LaunchError: The output cannot be read from the system of the launcher.
        """
        ...


@dataclass
class _Place:
    """Place after a line of a file: inode, offset, and size, checksum and time of the line."""

    inode: int = 0
    offset: int = 0
    size_bytes: int = 0
    checksum: int = 0
    time_unix_s: float = float("-inf")

    @classmethod
    def of(cls, position: str) -> _Place:
        """Parse a position; an invalid one is the start of the file."""
        numbers = position.split("-", 4)
        try:
            inode, offset, size_bytes, checksum = (int(number) for number in numbers[:4])
            time_unix_s = float(numbers[4])
        except (ValueError, IndexError):
            return cls()
        return cls(inode, max(0, offset), max(0, size_bytes), checksum, time_unix_s)

    def __str__(self) -> str:
        return f"{self.inode}-{self.offset}-{self.size_bytes}-{self.checksum}-{self.time_unix_s!r}"

    def is_in(self, file: BinaryIO) -> bool:
        """Return whether a file has the line at its place; inodes of deleted files are used again."""
        if os.fstat(file.fileno()).st_ino != self.inode or self.size_bytes > self.offset:
            return False
        file.seek(self.offset - self.size_bytes)
        return crc32(file.read(self.size_bytes)) == self.checksum


class FileTail:
    """Reader of a file to which lines are appended, and which may be missing or replaced.

    Args:
        path: The file.
        position: Position after the last line that was read; empty or invalid: start of the file.
        has_times: Lines are JSON objects with ``time_unix_s``. After the file was replaced by one with fewer
            lines (``events/file.py``), reading continues after the last line that was read, or, if this line
            was removed, with the first later time.
    """

    pause_s = 1.0

    def __init__(self, path: Path, position: str = "", *, has_times: bool = False) -> None:
        self._path = path
        self._has_times = has_times
        self._last = _Place.of(position)

    def read(self, *, is_complete: bool = False) -> list[tuple[str, str]]:
        """Return new lines, at most about ``CHUNK_BYTES`` at once."""
        try:
            with open_regular(self._path) as file:
                found = os.fstat(file.fileno())
                if not self._last.is_in(file):
                    self._last.inode, self._last.offset = found.st_ino, self._offset_in(file)
                    self._last.size_bytes = self._last.checksum = 0
                file.seek(self._last.offset)
                data = file.read(CHUNK_BYTES)
                while data and b"\n" not in data and len(data) < min(MAX_LINE_BYTES, found.st_size):
                    more = file.read(CHUNK_BYTES)
                    if not more:
                        break
                    data += more
        except FileNotFoundError:  # not written yet
            return []
        is_end = self._last.offset + len(data) >= found.st_size
        return self._lines(data, is_complete=is_complete and is_end)

    def _offset_in(self, file: BinaryIO) -> int:
        """Return the offset in a file that has replaced the one that was read."""
        if not self._has_times or self._last.time_unix_s == float("-inf"):
            return 0
        file.seek(0)
        offset = after = 0
        for line in file:
            offset += len(line)
            if len(line) == self._last.size_bytes and crc32(line) == self._last.checksum:
                return offset
            time_unix_s = _time_of(line.decode(errors="replace"))
            if time_unix_s is not None and time_unix_s <= self._last.time_unix_s:
                after = offset
        return after

    def _lines(self, data: bytes, *, is_complete: bool) -> list[tuple[str, str]]:
        lines = []
        *whole, rest = data.split(b"\n")
        parts = [line + b"\n" for line in whole]
        if rest and (is_complete or len(data) >= MAX_LINE_BYTES):
            parts.append(rest)
        for part in parts:
            text = part.decode(errors="replace").removesuffix("\n").rstrip("\r")
            place = self._last
            place.offset, place.size_bytes, place.checksum = place.offset + len(part), len(part), crc32(part)
            if self._has_times:
                time_unix_s = _time_of(text)
                if time_unix_s is None:
                    continue
                place.time_unix_s = time_unix_s
            lines.append((str(place), text))
        return lines


def _time_of(line: str) -> float | None:
    try:
        return float(json.loads(line)["time_unix_s"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


class OutputTail:
    """Reader of a job's output through its launcher. A position is the number of lines read.

    Args:
        launcher: Launcher of the job.
        job: The job.
        position: Position after the last line that was read.
        as_events: Return only events, as lines of ``events.jsonl`` with the time of the submission.
    """

    pause_s = 5.0  # each read requests the whole output

    def __init__(
        self, launcher: Launcher, job: Submitted, position: str = "", *, as_events: bool = False
    ) -> None:
        self._launcher, self._job = launcher, job
        self._num_read = int(position) if position.isdecimal() else 0
        self._as_events = as_events

    def read(self, *, is_complete: bool = False) -> list[tuple[str, str]]:
        """Return new lines."""
        del is_complete  # the launcher returns unfinished lines
        lines = []
        found = list(self._launcher.logs(self._job, follow=False))
        if len(found) < self._num_read:  # the log was rotated
            self._num_read = 0
        for line in found[self._num_read :]:
            self._num_read += 1
            parsed = parse_line(line)
            if not self._as_events:
                lines.append((str(self._num_read), line))
            elif parsed.event is not None:
                fields = {"time_unix_s": self._job.submitted_unix_s, "rank": parsed.rank}
                document = {**fields, "kind": parsed.event.kind, **parsed.event.model_dump()}
                lines.append((str(self._num_read), json.dumps(document)))
        return lines


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
        return self._launcher.queries_a_server

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
        """Return a reader of the lines of ``events.jsonl`` after a position."""
        if self.has_local_files:
            return FileTail(self.folder / EVENTS_FILE, position, has_times=True)
        return OutputTail(self._launcher, self._job, position, as_events=True)

    def tail_of_log(self, position: str) -> Tail:
        """Return a reader of the lines of the output after a position."""
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
