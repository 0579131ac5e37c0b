"""Periodic exchange of data between ranks, about twice a second, in one all-gather.

A collective takes about a millisecond. Therefore, it is not called in each step, and one collective transfers
the data of all hooks, such as the preemption flag and step times.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

from horovod_train.collectives.base import Communicator

INTERVAL_S = 0.5
# Limit of steps between two exchanges, because steps may become slower.
MAX_STEPS_BETWEEN = 64

_HEAD = struct.Struct("<d")
_LENGTH = struct.Struct("<q")


class Contribution(Protocol):
    """A participant of the exchange. Every rank must register the same participants in the same order."""

    def payload(self) -> bytes:
        """Return the data that this rank sends."""
        ...

    def on_gathered(self, of_ranks: Sequence[bytes]) -> None:
        """Process the data of all ranks, in rank order."""
        ...


class PeriodicExchange:
    """An all-gather after some of the steps, which are the same on all ranks. ``clock`` must be monotonic.

    Attributes:
        contributions: The participants, in the same order on all ranks.
        interval_s: Time between the last two exchanges, in seconds.
    """

    def __init__(self, world: Communicator, clock: Callable[[], float] = monotonic) -> None:
        self._world = world
        self._clock = clock
        self._last_s = clock()
        self._num_steps = 0
        self._next_after = 1
        self.contributions: list[Contribution] = []
        self.interval_s = 0.0

    def after_step(self) -> bool:
        """Count a step; return whether there was an exchange. Every rank must call it after each step.

        Raises:
            PeerError: Another rank was lost.
        """
        self._num_steps += 1
        if self._world.size == 1:
            if self._clock() - self._last_s < INTERVAL_S:
                return False
        elif self._num_steps < self._next_after:
            return False
        now = self._clock()
        self.interval_s = now - self._last_s
        messages = self._world.allgather(self._message())
        # These numbers are equal on all ranks, so all ranks have the next exchange after the same step.
        seconds = sum(_HEAD.unpack_from(message)[0] for message in messages)
        step_s = seconds / self._world.size / self._num_steps
        wanted = min(MAX_STEPS_BETWEEN, int(INTERVAL_S / max(step_s, 1e-9)))
        # At most double: some steps are fast because their batches were prefetched, later ones are not.
        self._next_after = max(1, min(wanted, 2 * self._next_after))
        self._num_steps = 0
        self._last_s = now
        self._dispatch(messages)
        return True

    def _message(self) -> bytes:
        payloads = [contribution.payload() for contribution in self.contributions]
        return b"".join([_HEAD.pack(self.interval_s), *(_LENGTH.pack(len(each)) + each for each in payloads)])

    def _dispatch(self, messages: Sequence[bytes]) -> None:
        places = [_HEAD.size] * len(messages)
        for contribution in self.contributions:
            of_ranks = []
            for rank, message in enumerate(messages):
                begin = places[rank] + _LENGTH.size
                places[rank] = begin + _LENGTH.unpack_from(message, places[rank])[0]
                of_ranks.append(message[begin : places[rank]])
            contribution.on_gathered(of_ranks)
