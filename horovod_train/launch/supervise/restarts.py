"""Whether, and when, a job starts again after a failure: ``launch.restarts``."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from horovod_train.config.launch import Restarts
from horovod_train.errors import LaunchError, LostError
from horovod_train.events.types import Restart
from horovod_train.system.files import write_atomic

NEVER = {
    "configuration": "an error of the configuration remains",
    "out_of_memory": "a rank would need as much memory again",
    "data": "the files are what they are",
    "engine": "the engine of this environment remains",
    "world": "the environments of the hosts remain",
}
"""Causes after which no job starts again, and why not."""
FOR_USERS = {2, 3, 130}
"""Exit codes for errors of configuration, numbers that are not finite, and Ctrl-C."""
MAX_HOST_FAILURES = 2


@dataclass(frozen=True)
class Past:
    """A failure of this run.

    Attributes:
        time_unix_s: Its time.
        message: First line of the error.
        key: Equal for equal failures: the message of a rank, without numbers.
        step: Number of steps that were done; None: unknown.
        hosts: Hosts that have failed.
        is_loss: A host or a rank was lost while ranks ran: the task is not the cause.
    """

    time_unix_s: float
    message: str
    key: str
    step: int | None
    hosts: Sequence[str]
    is_loss: bool


@dataclass
class RestartPolicy:
    """Decides about each failure of a run.

    Args:
        settings: ``launch.restarts``.
        file: File of the failures of this run, also of earlier launchers: on Kubernetes or Slurm, a launcher
            that has ended with an error may be started again.
        now_s: Clock (Unix time).
    """

    settings: Restarts
    file: Path
    now_s: Callable[[], float] = time.time
    failures: list[Past] = field(default_factory=list)
    _num_without_checkpoint: int = 0

    def __post_init__(self) -> None:
        with suppress(OSError, ValueError, TypeError):
            self.failures = [Past(**each) for each in json.loads(self.file.read_text())]

    def after(self, error: LaunchError, hosts: Sequence[str]) -> Restart:
        """Return the restart after a failure.

        Args:
            error: The failure.
            hosts: Hosts that are its cause.

        Raises:
            LaunchError: The error, with the reason why the job does not start again.
        """
        first_line = error.message.partition("\n")[0]
        is_loss = isinstance(error, LostError) and not error.was_before_start
        past = Past(self.now_s(), first_line, _key(error), error.step, tuple(hosts), is_loss)
        why_not = self._why_not(error, past)
        self.failures.append(past)
        with suppress(OSError):  # a full disk: this launcher still knows
            write_atomic(self.file, json.dumps([asdict(each) for each in self.failures]))
        if why_not:
            error.hint = "; ".join(filter(None, [f"not started again: {why_not}", error.hint]))
            raise error
        self._num_without_checkpoint = 0 if error.has_saved else self._num_without_checkpoint + 1
        shortest_s, longest_s = self.settings.backoff_s
        pause_s = min(longest_s, shortest_s * 2.0 ** min(60, max(0, self._num_without_checkpoint - 1)))
        return Restart(number=len(self._recent()), most=self.settings.max, pause_s=pause_s, reason=first_line)

    def failed_hosts(self) -> dict[str, list[str]]:
        """Return the hosts that have failed too often, with the reasons."""
        reasons: dict[str, list[str]] = {}
        for past in self._recent():
            for host in past.hosts:
                reasons.setdefault(host, []).append(past.message)
        return {host: found for host, found in reasons.items() if len(found) >= MAX_HOST_FAILURES}

    def _recent(self) -> list[Past]:
        since_s = self.now_s() - self.settings.window_h * 3600
        return [past for past in self.failures if past.time_unix_s >= since_s]

    def _why_not(self, error: LaunchError, past: Past) -> str:
        if reason := NEVER.get(error.cause):
            return reason
        if error.exit_code in FOR_USERS:
            return f"exit code {error.exit_code} does not mean a failure of a machine"
        same = Counter((each.key, each.step) for each in self.failures if not each.is_loss)
        if not past.is_loss and same[past.key, past.step]:
            where = "before the first step" if not past.step else f"after step {past.step}"
            return f"the same error was raised twice {where}"
        if len(self._recent()) >= self.settings.max:
            return f"{self.settings.max} restarts within {self.settings.window_h:g} h (launch.restarts.max)"
        return ""


def _key(error: LaunchError) -> str:
    """Return a text that is equal for equal failures, whichever ranks report it first."""
    text = error.failure or error.message
    return re.sub(r"0x[0-9a-f]+|\d+", "#", text.partition("\n")[0])
