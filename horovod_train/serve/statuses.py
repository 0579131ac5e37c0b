"""Cache of job statuses, because queries of Slurm and Kubernetes are slow."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from threading import Lock
from time import monotonic

from horovod_train.client.local import LocalJob
from horovod_train.errors import LaunchError
from horovod_train.launch.base import JobStatus

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
        """Query the status of a job anew at the next call."""
        with self._lock:
            self._entries.pop(job.id, None)
