"""Records of jobs: the state of each run, next to its log, and the list of submitted jobs.

<run folder>/state.json                              written by the launcher
$XDG_STATE_HOME/horovod_train/jobs/<job id>.json     written before a job is started, and when it is
$XDG_STATE_HOME/horovod_train/jobs/ended/<job id>.json  final state, of launchers that do not keep it
$XDG_STATE_HOME/horovod_train/jobs/keys/<SHA-256>     job that was started with an idempotency key
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from threading import Event
from time import time
from typing import Any, get_args

import psutil

from horovod_train.errors import HorovodTrainError, LaunchError, PreemptedError, UserError, did_you_mean
from horovod_train.launch.base import JobStatus, LaunchRequest, State, Submitted
from horovod_train.system.files import create_atomic, open_regular, read_regular, state_dir, write_atomic
from horovod_train.system.processes import background_thread, boot_id, exit_code_of, is_alive, start_ticks

STATE_FILE = "state.json"
CANCELLED_FILE = "cancelled"
_RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4,8}")
LOG_FILE = "run.log"
# Each state is padded to this size, so that it can be overwritten in place on a full disk.
STATE_BYTES = 4095
FORMER_STATES = {"waiting": "queued", "leaving": "stopping"}
"""States in files that versions before 0.1.0 wrote."""
TOUCHED_EVERY_S = 30
SILENT_S = 300.0
"""If the file's mtime is older than this, the launcher's host counts as lost. Allows for clock skew."""

MAX_LOST_SHOWN = 100
BLOCK_BYTES = 512  # unit of st_blocks in stat(2), independent of the file system


def jobs_dir() -> Path:
    """Return the folder with the records of submitted jobs."""
    return state_dir() / "jobs"


def submitted_job(request: LaunchRequest, native_id: str) -> Submitted:
    """Return the record of a job that was submitted now."""
    return Submitted(
        request.job_id, request.job.launch.launcher, native_id, request.log_dir, submitted_unix_s=time()
    )


def save_record(request: LaunchRequest, native_id: str) -> Submitted:
    """Write the record of a submitted job, or replace it.

    Raises:
        OSError: The folder is not writable.
    """
    job = submitted_job(request, native_id)
    write_atomic(jobs_dir() / f"{job.job_id}.json", json.dumps({**asdict(job), "log_dir": str(job.log_dir)}))
    return job


def delete_record(job_id: str) -> None:
    """Delete the record of a job that was not started."""
    with suppress(OSError):
        (jobs_dir() / f"{job_id}.json").unlink()


def record_end(job_id: str, status: JobStatus) -> None:
    """Record the final status of a job, because Kubernetes deletes finished jobs."""
    with suppress(OSError):  # the caller has the status in any case
        write_atomic(_end_file(job_id), json.dumps(asdict(status)))


def recorded_end(job_id: str) -> JobStatus | None:
    """Return the recorded final status of a job; None if there is none."""
    try:
        fields = json.loads(_end_file(job_id).read_text(encoding="utf-8"))
        return JobStatus(**{**fields, "lost_ranks": tuple(fields.get("lost_ranks", ()))})
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _end_file(job_id: str) -> Path:
    return jobs_dir() / "ended" / f"{job_id}.json"


def known_jobs() -> Iterator[Submitted]:
    """Yield the submitted jobs, newest first."""
    found = []
    for path in jobs_dir().glob("*.json"):
        try:
            found.append(_record(path))
        except (OSError, ValueError, TypeError, KeyError):
            continue  # written by another version, or manually
    yield from sorted(found, key=lambda job: job.submitted_unix_s, reverse=True)


def _record(path: Path) -> Submitted:
    """Read the record of a job.

    Raises:
        ValueError: The file is not a record; also TypeError and KeyError.
        OSError: It cannot be read.
    """
    fields = json.loads(path.read_text(encoding="utf-8"))
    job = Submitted(**{**fields, "log_dir": Path(fields["log_dir"])})
    if not all(isinstance(each, str) for each in (job.job_id, job.launcher, job.native_id)):
        raise ValueError(f"{path} is not the record of a job")
    return replace(job, submitted_unix_s=float(job.submitted_unix_s))


def known_job(job_id: str) -> Submitted | None:
    """Return a submitted job by its whole ID; None: there is none."""
    if not job_id or "/" in job_id:
        return None
    try:
        return _record(jobs_dir() / f"{job_id}.json")
    except (OSError, ValueError, TypeError, KeyError):
        return None


def find_job(job_id: str) -> Submitted:
    """Return a submitted job by its ID, its name, or a unique prefix of its ID.

    A name selects the newest job with this name that has not ended, or else the newest.

    Raises:
        UserError: No job, or more than one, matches.
    """
    if _RUN_ID.search(job_id) and (whole := known_job(job_id)) is not None:  # no other record is read
        return whole
    jobs = list(known_jobs())
    exact = [job for job in jobs if job.job_id == job_id]
    of_name = [job for job in jobs if _RUN_ID.fullmatch(job.job_id.removeprefix(f"{job_id}-"))]
    unfinished = (job for job in of_name if not StateFile(job.log_dir).read().has_ended)
    found = (
        exact
        or list(islice(unfinished, 1))
        or of_name[:1]
        or [job for job in jobs if job.job_id.startswith(job_id)]
    )
    if len(found) == 1:
        return found[0]
    names = [job.job_id for job in found or jobs]
    if found:
        raise UserError(f"{job_id!r} is a prefix of several job IDs: {', '.join(names[:5])}")
    raise UserError(f"no job {job_id!r}", hint=did_you_mean(job_id, names) or "see `horovod-train list`")


@dataclass
class UsedKey:
    """Job of an idempotency key.

    Attributes:
        job_id: ID of the job; empty: the key was not used.
        fingerprint: Hash of the job description.
    """

    path: Path
    job_id: str = ""
    fingerprint: str = ""

    def write(self, job_id: str, fingerprint: str) -> None:
        """Store the job of this key before the job is started. An interrupted write is ignored later."""
        fields = {"job_id": job_id, "fingerprint": fingerprint}
        self.path.write_text(json.dumps(fields), encoding="utf-8")  # in place: the lock is on this file


@contextmanager
def locked_key(key: str) -> Iterator[UsedKey]:
    """Yield the job of an idempotency key; other processes that use the key wait until the block ends.

    Raises:
        LaunchError: The file of the key cannot be written or locked.
    """
    path = jobs_dir() / "keys" / sha256(key.encode()).hexdigest()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LaunchError(f"the key cannot be stored: {path}: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        used = UsedKey(path)
        with suppress(ValueError, TypeError):  # a new file, or a write that was interrupted
            used = UsedKey(path, **json.loads(path.read_bytes()))
        yield used
    finally:
        os.close(handle)


def mark_cancelled(log_dir: Path) -> None:
    """Mark a run as cancelled, so that its final state is ``cancelled`` instead of ``preempted``."""
    with suppress(OSError):
        (log_dir / CANCELLED_FILE).touch()


def was_cancelled(log_dir: Path) -> bool:
    """Return whether a run is marked as cancelled."""
    return (log_dir / CANCELLED_FILE).exists()


class StateFile:
    """State of one run, in a file. Write errors are reported, and do not end the run.

    Args:
        log_dir: Run folder.
        warn: Called once if the file cannot be written.
        on_change: Called with state and message when either changes.
    """

    def __init__(
        self,
        log_dir: Path,
        warn: Callable[[str], None] = lambda _: None,
        on_change: Callable[[State, str], None] = lambda *_: None,
    ) -> None:
        self._path = log_dir / STATE_FILE
        self._warn = warn
        self._on_change = on_change
        self._last_change: tuple[State, str] | None = None
        self._warnings: dict[str, str] = {}
        self._last: tuple[State, int | None, str, str, Sequence[int]] | None = None
        self._is_unwritable = False

    def write(
        self,
        state: State,
        exit_code: int | None = None,
        message: str = "",
        cause: str = "",
        lost_ranks: Sequence[int] = (),
    ) -> None:
        """Write the state, and record this process as the launcher."""
        self._last = (state, exit_code, message, cause, lost_ranks)
        message = "; ".join(filter(None, (message, *self._warnings.values())))
        if self._last_change != (state, message):
            self._last_change = (state, message)
            self._on_change(state, message)
        text = _as_text(state, exit_code, message, cause, lost_ranks)
        try:
            try:
                write_atomic(self._path, text)
            except OSError:  # disk full, or folder no longer writable
                _write_over(self._path, text)
            self._is_unwritable = False
        except OSError as error:
            if not self._is_unwritable:
                self._is_unwritable = True
                self._warn(f"warning: {self._path} could not be written: {error.strerror}")

    def claim(self, state: State = "starting", exit_code: int | None = None, message: str = "") -> bool:
        """Create the file, and return True; return False if it exists.

        Of several launchers that are started for one run, this selects one.

        Raises:
            OSError: The file cannot be written.
        """
        return create_atomic(self._path, _as_text(state, exit_code, message))

    def end(self, error: BaseException) -> None:
        """Write the final state for an error. A preempted run that was cancelled ends as ``cancelled``."""
        if not isinstance(error, HorovodTrainError):
            self.write("failed", 1, f"{type(error).__name__}: {error}", "other")
        elif isinstance(error, PreemptedError):
            if was_cancelled(self._path.parent):
                error.exit_code = exit_code_of(signal.SIGTERM)
            self.write("cancelled" if error.exit_code > 128 else "preempted", error.exit_code, error.message)
        else:
            state: State = "cancelled" if error.exit_code > 128 else "failed"
            cause = error.cause if state == "failed" else ""
            self.write(state, error.exit_code, str(error), cause, error.lost_ranks[:MAX_LOST_SHOWN])

    @property
    def state(self) -> State | None:
        """The last state that was written; None if there is none."""
        return None if self._last is None else self._last[0]

    def set_warning(self, subject: str, text: str) -> None:
        """Add a warning, by subject, to the messages of this and all later states."""
        if self._warnings.get(subject) != text:
            self._warnings[subject] = text
            self._warn(f"warning: {text}")
            if self._last is not None:
                self.write(*self._last)

    def read(self) -> JobStatus:
        """Return the status; ``failed``, if the launcher process no longer exists."""
        status = self.read_recorded()
        document = self._document()
        # A requeued job has no launcher process while it is in the queue.
        if document is None or status.has_ended or status.state == "queued":
            return status
        if document["host"] != socket.gethostname():
            silent_s = self._silent_s()
            if "touched_every_s" in document and silent_s > SILENT_S:
                text = f"the launcher on {document['host']} has not updated {STATE_FILE} for {silent_s:.0f} s"
                return JobStatus("failed", 137, text, "lost")
            where = f"on {document['host']}, process {document['pid']}"
            message = "; ".join(text for text in (status.message, f"launcher {where}") if text)
            return JobStatus(status.state, message=message)
        if _is_alive(document):
            return status
        return JobStatus("failed", 137, "the launcher process was killed, and all ranks have ended")

    def touched(self) -> AbstractContextManager[None]:
        """Update the file's mtime while the block runs, as a heartbeat of the launcher for other hosts."""

        def touch(over: Event) -> None:
            while not over.wait(TOUCHED_EVERY_S):
                with suppress(OSError):
                    os.utime(self._path)

        return background_thread(touch)

    def _silent_s(self) -> float:
        try:
            return time() - self._path.stat().st_mtime
        except OSError:
            return 0.0

    def read_recorded(self) -> JobStatus:
        """Return the status in the file, without checking the launcher process."""
        # If the file was created between the two readings, it is not damaged.
        document = self._document() or (self._document() if self._path.exists() else None)
        if document is not None:
            cause, lost = document.get("cause", ""), document.get("lost_ranks", [])
            return JobStatus(
                document["state"],
                document["exit_code"],
                document["message"],
                cause if isinstance(cause, str) else "",
                tuple(rank for rank in lost if isinstance(rank, int)) if isinstance(lost, list) else (),
            )
        try:
            if self._path.exists():
                open_regular(self._path).close()
                text = f"{self._path} is damaged; {LOG_FILE} in the same folder has the output"
                return JobStatus("unknown", 1, text)
            if not self._path.parent.is_dir():
                text = f"{self._path.parent} does not exist: removed, or not mounted here"
                return JobStatus("unknown", 1, text)
        except OSError as error:
            return JobStatus("unknown", 1, f"{self._path} cannot be read: {error.strerror}")
        return JobStatus("queued", message="not started yet")

    def recorded_pid(self) -> int | None:
        """Return the PID in the file, which may belong to another host; None: the job was not started."""
        document = self._document()
        return None if document is None else int(document["pid"])

    def pid(self) -> int | None:
        """Return the PID of the launcher; None if it does not run on this host."""
        document = self._document()
        if document is None:
            return None
        is_local = document["host"] == socket.gethostname()
        return int(document["pid"]) if is_local and _is_alive(document) else None

    def _document(self) -> dict[str, Any] | None:
        """Return the content of the file; None if it is missing or invalid."""
        try:
            document: dict[str, Any] = json.loads(read_regular(self._path))
            document["state"] = FORMER_STATES.get(document["state"], document["state"])
            fits = (
                document["state"] in get_args(State)
                and isinstance(document["exit_code"], int | None)
                and isinstance(document["message"], str)
                and isinstance(document["pid"], int)
                and isinstance(document["host"], str)
            )
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        return document if fits else None


def _as_text(
    state: State,
    exit_code: int | None = None,
    message: str = "",
    cause: str = "",
    lost_ranks: Sequence[int] = (),
) -> str:
    """Return the content of a state file that this process writes."""
    document = {
        "state": state,
        "exit_code": exit_code,
        "message": message,
        "cause": cause,
        "lost_ranks": list(lost_ranks),
        "pid": os.getpid(),
        "boot_id": boot_id(),
        "pid_start_ticks": start_ticks(os.getpid()),
        "host": socket.gethostname(),
        "unix_time_s": time(),
        "touched_every_s": TOUCHED_EVERY_S,
    }
    return json.dumps(document, indent=2).ljust(STATE_BYTES) + "\n"


def _write_over(path: Path, text: str) -> None:
    """Replace the content of a file in place, in one write.

    Raises:
        OSError: The allocated blocks are too few; the old content is unchanged.
    """
    data = text.encode()
    handle = os.open(path, os.O_WRONLY)
    try:
        if len(data) > os.fstat(handle).st_blocks * BLOCK_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.pwrite(handle, data, 0)
        os.ftruncate(handle, len(data))
    finally:
        os.close(handle)


def _is_alive(document: Mapping[str, Any]) -> bool:
    """Return whether the process that wrote a state still exists; its PID alone may have been reused."""
    pid = document["pid"]
    if "boot_id" in document:
        is_same = document["boot_id"] == boot_id() and document["pid_start_ticks"] == start_ticks(pid)
        return is_same and is_alive(pid)
    # Format of older versions, without boot ID. Start times are wrong after a clock change.
    started_s = document.get("pid_started_unix_s")
    try:
        is_near = isinstance(started_s, float) and abs(psutil.Process(pid).create_time() - started_s) < 1
    except (psutil.NoSuchProcess, ValueError):
        return False
    return is_near and is_alive(pid)
