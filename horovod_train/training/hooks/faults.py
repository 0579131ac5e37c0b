"""Faults that a job injects into itself, to test its recovery: ``health.inject``."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from horovod_train.config.schema import Fault
from horovod_train.errors import UserError
from horovod_train.events.types import Notice
from horovod_train.events.wire import Reporter
from horovod_train.training.hooks.base import Hook, HookParts
from horovod_train.training.run import Run


class InjectedError(RuntimeError):
    """The exception that the fault ``raise`` raises."""


def _raise() -> None:
    raise InjectedError("a fault was injected")


def _hang() -> None:
    threading.Event().wait()


ACTIONS: Mapping[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "exit": lambda: os._exit(1),
    "raise": _raise,
    "hang": _hang,
}


class Inject(Hook):
    """Injects the faults of this rank, each once in a run, also if the ranks start again."""

    def __init__(self, faults: Sequence[Fault], rank: int, folder: Path, reporter: Reporter) -> None:
        self._faults = {place: each for place, each in enumerate(faults) if each.rank == rank}
        self._folder, self._reporter = folder, reporter

    @classmethod
    def of(cls, parts: HookParts) -> Inject | None:
        """Return the hook; None: the job has no faults.

        Raises:
            UserError: A fault names a rank that does not exist.
        """
        faults, size = parts.job.health.inject, parts.world.size
        if not faults:
            return None
        if wrong := [each for each in faults if each.rank >= size]:
            raise UserError(
                f"health.inject: there is no rank {wrong[0].rank}, but ranks 0 to {size - 1}",
                hint="name one of them",
            )
        folder = Path(parts.job.run_dir).expanduser() / parts.job.name / parts.run_id
        return cls(faults, parts.world.rank, folder, parts.reporter)

    def on_step(self, run: Run) -> None:
        """Inject what is due after this step."""
        step = run.progress.step
        for place, fault in self._faults.items():
            if fault.kind == "slow":
                time.sleep(fault.seconds if step >= fault.step else 0.0)
            elif fault.step == step and self._is_first(place):
                self._reporter.report(Notice(text=f"injected after step {step}: {fault.kind}"))
                ACTIONS[fault.kind]()

    def _is_first(self, place: int) -> bool:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            (self._folder / f"injected-{place}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
