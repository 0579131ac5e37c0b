"""Comparison of the state in Python between ranks, and reports of state that checkpoints do not contain."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from hashlib import blake2b

from horovod_train.frameworks.base import HasPythonState, PythonStateOfRank
from horovod_train.training.exchange import PeriodicExchange
from horovod_train.training.hooks.base import Hook, HookParts
from horovod_train.training.run import Run

log = logging.getLogger(__name__)

MAX_BETWEEN = 64
"""Largest number of periodic exchanges between two comparisons; they are half a minute."""


class WatchPythonState(Hook):
    """Compares the state in Python of all ranks in the exchanges 1, 2, 4, ..., and then in every 64th."""

    def __init__(self, exchange: PeriodicExchange) -> None:
        self._state: PythonStateOfRank | None = None
        self._num_exchanges = 0
        self._is_due = self._is_different = False
        self._reported: set[str] = set()
        exchange.contributions.append(self)

    @classmethod
    def of(cls, parts: HookParts) -> WatchPythonState:
        """Return the hook."""
        return cls(parts.exchange)

    def on_start(self, run: Run) -> None:
        """Report the state that the checkpoint of a resumed job does not contain."""
        if isinstance(run.replica, HasPythonState):
            self._state = run.replica.python_state
        if self._state is not None and self._state.not_restored and run.world.rank == 0:
            log.warning(
                "state that the checkpoint does not contain, and that begins anew: %s",
                ", ".join(self._state.not_restored),
            )

    def payload(self) -> bytes:
        """Return a digest of this rank's state in Python; empty: no comparison is due."""
        self._num_exchanges += 1
        number = self._num_exchanges
        self._is_due = self._state is not None and (
            number % MAX_BETWEEN == 0 if number > MAX_BETWEEN else number & (number - 1) == 0
        )
        if self._state is None or not self._is_due:
            return b""
        return blake2b(repr(sorted(self._state.digests().items())).encode(), digest_size=16).digest()

    def on_gathered(self, of_ranks: Sequence[bytes]) -> None:
        """Record whether the state differs between ranks."""
        self._is_different = len(set(of_ranks)) > 1

    def on_step(self, run: Run) -> None:
        """Report what differs between ranks, and what is not saved, once for each value."""
        if self._state is None:
            return
        if self._is_different:
            self._is_different = False
            self._report_differences(run, self._state)
        if self._is_due:
            self._is_due = False
            self._report_unsaved(run, self._state)

    def _report_differences(self, run: Run, state: PythonStateOfRank) -> None:
        for name, values in state.differences().items():
            if run.world.rank == 0 and name not in self._reported:
                log.warning(
                    "step %d: %s differs between ranks (%s): if the loss depends on it, ranks train other "
                    "weights than one process; compute it from the samples of all ranks, or keep it in a "
                    "buffer of the model and name that in train.average_buffers",
                    run.progress.step,
                    name,
                    values,
                )
            self._reported.add(name)

    def _report_unsaved(self, run: Run, state: PythonStateOfRank) -> None:
        found = {
            name: reason
            for name, reason in state.unsaved().items()
            if f"unsaved {name}" not in self._reported
        }
        self._reported.update(f"unsaved {name}" for name in found)
        if found and run.world.rank == 0:
            log.warning(
                "state that checkpoints do not contain, and that a resume begins anew: %s",
                ", ".join(f"{name} ({reason})" for name, reason in found.items()),
            )
