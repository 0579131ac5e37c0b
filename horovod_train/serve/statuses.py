"""Cache of job statuses, because queries of Slurm and Kubernetes are slow."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from threading import Lock
from time import monotonic

from horovod_train.client.local import LocalJob
from horovod_train.launch.base import JobStatus

LOCAL_AGE_S = 0.5
AGE_S = 2.0
MAX_JOBS = 10_000


@dataclass
class _Entry:
    lock: Lock = field(default_factory=Lock)
    status: JobStatus | None = None
    time_s: float = 0.0


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
        age_s = LOCAL_AGE_S if job.has_local_files and job.launcher != "slurm" else AGE_S
        known = entry.status
        # Threads must not wait for a launcher that does not respond: there are few of them.
        if not entry.lock.acquire(blocking=known is None) and known is not None:
            return known
        try:
            if entry.status is None or monotonic() - entry.time_s > age_s:
                entry.status = job.status()
                entry.time_s = monotonic()
            return entry.status
        finally:
            entry.lock.release()

    def forget(self, job: LocalJob) -> None:
        """Query the status of a job anew at the next call."""
        with self._lock:
            self._entries.pop(job.id, None)
