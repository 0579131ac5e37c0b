"""A launcher whose jobs are records only: their status and output are those that a test sets."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock
from typing import Any

from horovod_train.errors import LaunchError
from horovod_train.events.file import EVENTS_FILE, EventsFile
from horovod_train.events.types import Event, Progress, Summary
from horovod_train.launch.base import JobStatus, LaunchPlan, LaunchRequest, PolledLauncher, Submitted


class FakeLauncher(PolledLauncher):
    """Launcher that notes its requests.

    Attributes:
        now: Status of all jobs.
        lines: Output of all jobs.
        asked: How jobs were ended, in order.
        requests: Jobs that were started.
        rejects: Message of the launcher's rejection; empty: none.
    """

    has_local_files = True
    queries_a_server = False
    poll_s = 0.01

    def __init__(self) -> None:
        self.now = JobStatus("running")
        self.lines: list[str] = []
        self.asked: list[str] = []
        self.requests: list[LaunchRequest] = []
        self.rejects = ""
        self._lock = Lock()

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        return LaunchPlan(("true",))

    def submit(self, request: LaunchRequest, plan: LaunchPlan) -> str:
        if self.rejects:
            raise LaunchError(self.rejects)
        with self._lock:
            if request.run_id not in {each.run_id for each in self.requests}:
                self.requests.append(request)
        request.log_dir.mkdir(parents=True, exist_ok=True)
        return "4711"

    def status(self, job: Submitted) -> JobStatus:
        return self.now

    def logs(self, job: Submitted, *, follow: bool) -> Iterator[str]:
        yield from self.lines

    def cancel(self, job: Submitted, how: str) -> None:
        if self.rejects:
            raise LaunchError(self.rejects)
        self.asked.append(how)
        self.now = JobStatus("cancelled", 143)


def progress(step: int, loss: float, **numbers: float) -> Progress:
    return Progress(
        step=step, num_steps=9, epoch=0, num_epochs=1, loss=loss, lr=0.1, samples_per_s=None, eta_s=None,
        numbers=numbers,
    )  # fmt: skip


def summary(**fields: Any) -> Summary:
    known = dict.fromkeys(("epochs", "seconds", "samples_per_s", "base_lr", "peak_lr"), 0.0)
    numbers = dict.fromkeys(("steps", "world_size", "global_batch_size", "reference_batch_size"), 1)
    rest = {"job": "j", "lr_scaling": "none", "metrics_addresses": (), "metrics": {}, "checkpoint": ""}
    return Summary(**{**known, **numbers, **rest, **fields})


def write_events(folder: Any, *events: Event) -> None:
    """Append events of rank 0 to the events file of a run."""
    writer = EventsFile(folder / EVENTS_FILE)
    for event in events:
        writer.write(event, 0)
    writer.close()
