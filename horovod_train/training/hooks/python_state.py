"""Comparison of the state in Python between ranks, and reports of state that checkpoints do not contain."""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from time import perf_counter

from horovod_train.frameworks.base import HasPythonState, PythonStateOfRank
from horovod_train.training.exchange import INTERVAL_S, PeriodicExchange
from horovod_train.training.hooks.base import Hook, HookParts
from horovod_train.training.run import Run

log = logging.getLogger(__name__)

MAX_SHOWN = 6
MAX_BETWEEN = 64
"""Largest number of periodic exchanges between two comparisons, if these are fast; they are half a minute."""
MAX_PART = 0.002
"""Largest part of the time that comparisons take."""
_HEAD = struct.Struct("<dI")
"""Duration of an examination, and number of the part of the model."""


class WatchPythonState(Hook):
    """Compares the state in Python of all ranks in the exchanges 1, 2, 4, ..., 64, and then in every 64th."""

    def __init__(self, exchange: PeriodicExchange) -> None:
        self._state: PythonStateOfRank | None = None
        self._num_exchanges, self._next = 0, 1
        self._is_due = self._is_different = False
        self._unsaved: Mapping[str, str] = {}
        self._reported: set[str] = set()
        self._reported_unsaved: set[str] = set()
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
                _joined(dict.fromkeys(self._state.not_restored, "")),
            )

    def payload(self) -> bytes:
        """Return duration of an examination, part, and digest of the state; empty: no comparison is due."""
        self._num_exchanges += 1
        self._is_due = self._state is not None and self._num_exchanges >= self._next
        if self._state is None or not self._is_due:
            return b""
        begun_s = perf_counter()
        digests, self._unsaved = self._state.examined()
        digest = blake2b(repr(sorted(digests.items())).encode(), digest_size=16).digest()
        return _HEAD.pack(perf_counter() - begun_s, self._state.part) + digest

    def on_gathered(self, of_ranks: Sequence[bytes]) -> None:
        """Record whether the state differs between ranks, and when all ranks compare it again."""
        if not self._is_due:
            return
        heads = [_HEAD.unpack_from(message) for message in of_ranks]
        digests = {(part, message[_HEAD.size :]) for (_, part), message in zip(heads, of_ranks, strict=True)}
        self._is_different = len(digests) > len({part for _, part in heads})
        longest_s = max(duration_s for duration_s, _ in heads)
        rest = int(longest_s / (INTERVAL_S * MAX_PART))
        self._next = self._num_exchanges + max(min(self._num_exchanges, MAX_BETWEEN), rest)

    def on_step(self, run: Run) -> None:
        """Report what differs between ranks, and what is not saved, once for each value."""
        if self._state is None or not self._is_due:
            return
        self._is_due = False
        if self._is_different:
            self._report_differences(run, self._state.differences())
        found = {
            name: f" ({why})" for name, why in self._unsaved.items() if name not in self._reported_unsaved
        }
        self._reported_unsaved.update(found)
        if found and run.world.rank == 0:
            log.warning(
                "state that checkpoints do not contain, and that a resume begins anew: %s", _joined(found)
            )

    def _report_differences(self, run: Run, differences: Mapping[str, str]) -> None:
        found = {name: f": {text}" for name, text in differences.items() if name not in self._reported}
        self._reported.update(found)
        if found and run.world.rank == 0:
            log.warning(
                "step %d: state in Python differs between ranks: %s. If the loss depends on it, ranks train "
                "other weights than one process: compute it from the samples of all ranks "
                "(horovod_train.gather, for PyTorch), or keep it in a buffer of the model and name that in "
                "train.average_buffers",
                run.progress.step,
                _joined(found),
            )


def _joined(found: Mapping[str, str]) -> str:
    """Return names with their texts, at most ``MAX_SHOWN``."""
    shown = [f"{name}{text}" for name, text in list(found.items())[:MAX_SHOWN]]
    return "; ".join(shown) + (f"; and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else "")
