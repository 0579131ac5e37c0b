"""What is remembered about jobs: how a run stands, beside its log; and which jobs were submitted.

<run>/state.json                                     written by whoever carries out the run
$XDG_STATE_HOME/horovod_train/jobs/<job id>.json     written when a job is started
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from time import time
from typing import Any

import psutil

from horovod_train.errors import UserError, did_you_mean
from horovod_train.launch.base import JobStatus, LaunchRequest, State, Submitted
from horovod_train.launch.files import state_dir, write_whole

STATE_FILE = "state.json"
LOG_FILE = "run.log"


def jobs_dir() -> Path:
    """Return the folder in which submitted jobs are remembered."""
    return state_dir() / "jobs"


def remember(request: LaunchRequest, native_id: str) -> Submitted:
    """Note that a job was submitted."""
    job = Submitted(
        request.job_id, request.job.launch.launcher, native_id, request.log_dir, submitted_unix_s=time()
    )
    write_whole(jobs_dir() / f"{job.job_id}.json", json.dumps({**asdict(job), "log_dir": str(job.log_dir)}))
    return job


def note_end(job_id: str, status: JobStatus) -> None:
    """Remember how a job ended, for when the system that carried it out has forgotten it."""
    write_whole(_end_file(job_id), json.dumps(asdict(status)))


def end_of(job_id: str) -> JobStatus | None:
    """Return how a job ended, if that was noted."""
    try:
        return JobStatus(**json.loads(_end_file(job_id).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _end_file(job_id: str) -> Path:
    return jobs_dir() / "ended" / f"{job_id}.json"


def known_jobs() -> Iterator[Submitted]:
    """Yield the submitted jobs, newest first."""
    found = []
    for path in jobs_dir().glob("*.json"):
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            found.append(Submitted(**{**fields, "log_dir": Path(fields["log_dir"])}))
        except (OSError, ValueError, TypeError, KeyError):
            continue  # written by another version, or by hand
    yield from sorted(found, key=lambda job: job.submitted_unix_s, reverse=True)


def find_job(job_id: str) -> Submitted:
    """Return a submitted job by its id, or by the beginning of it if there is only one such.

    Raises:
        UserError: There is none, or more than one.
    """
    jobs = list(known_jobs())
    exact = [job for job in jobs if job.job_id == job_id]
    found = exact or [job for job in jobs if job.job_id.startswith(job_id)]
    if len(found) == 1:
        return found[0]
    names = [job.job_id for job in found or jobs]
    if found:
        raise UserError(f"{job_id!r} begins the names of several jobs: {', '.join(names[:5])}")
    raise UserError(f"no job {job_id!r}", hint=did_you_mean(job_id, names) or "see `horovod-train list`")


class StateFile:
    """How one run stands, for whoever asks.

    Args:
        log_dir: Folder of the run.
    """

    def __init__(self, log_dir: Path) -> None:
        self._path = log_dir / STATE_FILE

    def write(self, state: State, exit_code: int | None = None, message: str = "") -> None:
        """Note how it stands; this process is the one that carries it out."""
        document = {
            "state": state,
            "exit_code": exit_code,
            "message": message,
            "pid": os.getpid(),
            "pid_started_unix_s": psutil.Process().create_time(),
            "host": socket.gethostname(),
            "unix_time_s": time(),
        }
        write_whole(self._path, json.dumps(document, indent=2) + "\n")

    def read(self) -> JobStatus:
        """Return how it stands; a run whose process is gone without a word has failed."""
        status = self.read_elsewhere()
        document = self._document()
        if document is None or status.has_ended:
            return status
        if document["host"] != socket.gethostname():
            where = f"on {document['host']}, by process {document['pid']}"
            message = "; ".join(text for text in (status.message, f"carried out {where}") if text)
            return JobStatus(status.state, message=message)
        if _is_alive(document):
            return status
        return JobStatus("failed", 137, "the process that carried it out was killed; nothing of it is left")

    def read_elsewhere(self) -> JobStatus:
        """Return how it stands by its own word, whichever host carries it out."""
        document = self._document()
        if document is not None:
            return JobStatus(document["state"], document["exit_code"], document["message"])
        if not self._path.parent.is_dir():
            return JobStatus("unknown", 1, f"{self._path.parent} is not there: removed, or not mounted here")
        return JobStatus("waiting", message="not started yet")

    def pid(self) -> int | None:
        """Return the process that carries it out; None: there is none on this host."""
        document = self._document()
        if document is None:
            return None
        is_here = document["host"] == socket.gethostname()
        return int(document["pid"]) if is_here and _is_alive(document) else None

    def _document(self) -> dict[str, Any] | None:
        try:
            text = self._path.read_text(encoding="utf-8")
        except OSError:
            return None
        document: dict[str, Any] = json.loads(text)
        return document


def _is_alive(document: Mapping[str, Any]) -> bool:
    try:
        process = psutil.Process(int(document["pid"]))
        started_s = process.create_time()
    except psutil.NoSuchProcess:
        return False
    # Numbers of processes are used again.
    return abs(started_s - document["pid_started_unix_s"]) < 1 and process.status() != psutil.STATUS_ZOMBIE
