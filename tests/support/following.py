"""The output of a run and everybody who follows it, without the run."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from horovod_train.events.types import KINDS
from horovod_train.events.wire import to_line
from horovod_train.launch.base import LaunchPlan, LaunchRequest
from horovod_train.launch.console import JobConsole
from horovod_train.launch.hosts.staging import Mask
from horovod_train.launch.supervise.attempt import AttemptOutput
from horovod_train.launch.supervise.follow import Follower
from horovod_train.launch.supervise.outcome import Ended

PROGRESS: dict[str, Any] = {
    "step": 5,
    "num_steps": 10,
    "epoch": 0,
    "num_epochs": 2,
    "loss": 0.5,
    "lr": 0.1,
    "samples_per_s": 100.0,
    "eta_s": 3.0,
}
STARTED: dict[str, Any] = {
    "job": "j",
    "num_parameters": 7,
    "world_size": 2,
    "global_batch_size": 8,
    "precision": "fp32",
    "device": "cpu",
}
SUMMARY: dict[str, Any] = {
    "job": "j",
    "epochs": 1.0,
    "steps": 2,
    "seconds": 3.0,
    "metrics": {},
    "samples_per_s": 4.0,
    "world_size": 2,
    "global_batch_size": 8,
    "lr_scaling": "linear",
    "base_lr": 0.1,
    "reference_batch_size": 4,
    "peak_lr": 0.2,
    "metrics_addresses": [],
    "checkpoint": "",
}


def event(kind: str, rank: int = 0, **fields: Any) -> str:
    """An event as a rank writes it; what is not given is as in the constants above."""
    usual = {"progress": PROGRESS, "started": STARTED, "summary": SUMMARY}.get(kind, {})
    made = KINDS[kind].model_validate({**usual, **fields}, strict=False)
    return to_line(made, rank)


class Noted:
    """In place of the file of a run's state: what was to be noted there."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.remarks: list[str] = []
        self.state: str | None = None

    def write(self, state: str, _exit_code: int | None = None, message: str = "") -> None:
        self.state = state
        self.messages.append(message.partition("; ")[2])  # the number of ranks comes first

    def set_warning(self, _subject: str, text: str) -> None:
        self.remarks.append(text)


class Followed:
    """A run whose output a test makes up.

    Attributes:
        noted: What was noted about its state.
        log: Its log.
    """

    def __init__(
        self, request: LaunchRequest, secrets: Sequence[str] = (), others: Sequence[Follower] = ()
    ) -> None:
        request.log_dir.mkdir(parents=True, exist_ok=True)
        self.request = request
        self.state = Noted()
        self.noted = self.state.messages
        self.log = request.log_dir / "run.log"
        self._output = io.StringIO()
        console = JobConsole(Console(file=self._output, force_terminal=False, width=200))
        argv = (request.rank_command,) if request.job.launch.launcher == "local" else ("mpirun",)
        self.following = AttemptOutput(
            request,
            LaunchPlan(argv),
            console,
            self.state,  # type: ignore[arg-type]
            Mask(secrets),
            others,
        )
        self.handle = self.following.output.handle
        self.close = self.following.close

    @property
    def shown(self) -> str:
        """What a person has seen."""
        return self._output.getvalue()

    def say(self, rank: int, *lines: str) -> None:
        """Let a rank write lines."""
        for line in lines:
            self.handle(f"[1,{rank}]<stderr>:{line}")

    def end(self, code: int, **how: Any) -> None:
        """Let it end; raises what explains the end."""
        self.following.outcome.check(Ended(code, **how))
