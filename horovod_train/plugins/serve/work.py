"""What the HTTP API works with: files of tasks, statuses of jobs, and threads.

    job_with_files   files of a task that are uploaded with a job
    Statuses         cache of job statuses
    Threads          threads of the HTTP API, by kind of work, so that slow work of one kind does not block
                     the others

Statuses are cached because queries of Slurm and Kubernetes are slow.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path, PurePosixPath
from threading import Lock
from time import monotonic
from typing import TypeVar

from anyio import CapacityLimiter, to_thread

from horovod_train.client import LocalJob, described
from horovod_train.config.schema import Job
from horovod_train.errors import LaunchError, UserError
from horovod_train.launch.base import JobStatus
from horovod_train.system.files import make_folder

MAX_FILES_BYTES = 8 * 1024 * 1024
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
HASH_CHARS = 16


def job_with_files(
    job: Mapping[str, object], overrides: Mapping[str, object], files: Mapping[str, str]
) -> Job:
    """Store files below ``run_dir/<name>``, and return the job, whose task may be one of them.

    The name of the folder of the files is a hash of their names and contents. They are text; nothing in
    them is executed by the server.

    Args:
        job: Job description; relative paths of tasks refer to the files.
        overrides: Values by dotted path; they override the job.
        files: Contents by relative path.

    Raises:
        ConfigError: The job description is not valid; the error lists all problems.
        UserError: The files are too large, or the name of one is not a relative path.
    """
    if not files:
        return described(job, overrides)
    _check(files)
    with tempfile.TemporaryDirectory(prefix="horovod_train-") as temporary:
        _write(Path(temporary), files)
        checked = described(job, overrides, Path(temporary))
        digest = sha256(json.dumps(dict(sorted(files.items()))).encode()).hexdigest()[:HASH_CHARS]
        folder = Path(checked.run_dir).expanduser().resolve() / checked.name / f"code-{digest}"
        if not folder.exists():
            make_folder(folder.parent, checked.run_dir_access)
            _place(files, folder)
        if any(_text_in(folder / name) != text for name, text in files.items()):
            raise UserError(
                f"files: {folder} contains other files than were uploaded", hint="delete this folder"
            )
    return described(job, overrides, folder)


def _text_in(path: Path) -> str | None:
    try:
        return path.read_bytes().decode()
    except (OSError, ValueError):
        return None


def _check(files: Mapping[str, str]) -> None:
    for name in files:
        parts = PurePosixPath(name).parts
        if "/".join(parts) != name or not all(_PART.fullmatch(part) for part in parts):
            raise UserError(
                f"files: {name!r} must be a relative path whose parts contain only letters, digits, '.', '_' "
                "and '-', and start with a letter, a digit or '_'",
                hint="such as `train.py` or `models/net.py`",
            )
    size_bytes = sum(len(text.encode(errors="replace")) for text in files.values())
    if size_bytes > MAX_FILES_BYTES:
        raise UserError(
            f"files: the total size is {size_bytes} bytes; the limit is {MAX_FILES_BYTES}",
            hint="put data where the ranks can read it, and upload code only",
        )


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())  # without a translation of line ends
        except (OSError, ValueError) as error:  # `a` and `a/b`, or a lone surrogate
            raise UserError(f"files: {name} cannot be written: {error}") from error


def _place(files: Mapping[str, str], folder: Path) -> None:
    """Create a folder with its files atomically, because the server may be killed at any time."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write(temporary, files)
        temporary.chmod(0o755)
        with suppress(OSError):  # another request has created it
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


LOCAL_AGE_S = 0.5
AGE_S = 2.0
MAX_JOBS = 10_000


@dataclass
class _Entry:
    lock: Lock = field(default_factory=Lock)
    status: JobStatus | None = None
    error: LaunchError | None = None
    """Error of the last query; it is raised again until the next query."""
    time_s: float = 0.0

    @property
    def is_known(self) -> bool:
        """Whether a query has ended."""
        return self.status is not None or self.error is not None

    def result(self) -> JobStatus:
        """Return the result of the last query, or raise its error."""
        if self.error is not None:
            raise self.error
        assert self.status is not None
        return self.status


class Statuses:
    """Cache of statuses. At most one thread at a time queries the status of a job."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = Lock()

    def get(self, job: LocalJob) -> JobStatus:
        """Return the status of a job, at most two seconds old; while another thread queries it, the last one.

        Raises:
            LaunchError: The system of the launcher does not respond.
        """
        with self._lock:
            entry = self._entries.setdefault(job.id, _Entry())
            self._entries.move_to_end(job.id)
            if len(self._entries) > MAX_JOBS:
                self._entries.popitem(last=False)
        age_s = AGE_S if job.queries_a_server else LOCAL_AGE_S
        # Threads must not wait for a launcher that does not respond: there are few of them.
        if entry.is_known and not entry.lock.acquire(blocking=False):
            return entry.result()
        if not entry.is_known:
            entry.lock.acquire()
        try:
            if not entry.is_known or monotonic() - entry.time_s > age_s:
                try:
                    entry.status, entry.error = job.status(), None
                except LaunchError as error:
                    entry.error = error
                entry.time_s = monotonic()
            return entry.result()
        finally:
            entry.lock.release()

    def forget(self, job: LocalJob) -> None:
        """Query the status of a job again at the next call."""
        with self._lock:
            self._entries.pop(job.id, None)


Result = TypeVar("Result")


class Threads:
    """Limits of the number of threads. Calls above a limit wait."""

    def __init__(self) -> None:
        self._files = CapacityLimiter(16)
        self._launchers = CapacityLimiter(24)
        self._submissions = CapacityLimiter(8)
        self._whole_runs = CapacityLimiter(2)

    async def read(self, call: Callable[[], Result]) -> Result:
        """Call a function that reads a small file, or a part of a file."""
        return await to_thread.run_sync(call, limiter=self._files)

    async def query(self, call: Callable[[], Result]) -> Result:
        """Call a function that queries, or ends, a job through its launcher."""
        return await to_thread.run_sync(call, limiter=self._launchers)

    async def submit(self, call: Callable[[], Result]) -> Result:
        """Call a function that starts a job."""
        return await to_thread.run_sync(call, limiter=self._submissions)

    async def read_run(self, call: Callable[[], Result]) -> Result:
        """Call a function that reads all events of a run, which need hundreds of megabytes."""
        return await to_thread.run_sync(call, limiter=self._whole_runs)
