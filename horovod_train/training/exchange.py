"""What ranks tell each other about twice a second, in one collective.

A separate collective costs about a millisecond, so it is not called in each step, and hooks that have
something to tell shares it: the preemption flag, the times of steps.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

from horovod_train.collectives.base import Communicator

INTERVAL_S = 0.5
# Steps may become slower: so many of the fast ones are made at most before the next exchange.
MAX_STEPS_BETWEEN = 64

_HEAD = struct.Struct("<d")
_LENGTH = struct.Struct("<q")


class Contribution(Protocol):
    """A participant of the exchange, the same on all ranks."""

    def payload(self) -> bytes:
        """Return what this rank has to tell."""
        ...

    def on_gathered(self, of_ranks: Sequence[bytes]) -> None:
        """Take what each rank has told, by rank."""
        ...


class PeriodicExchange:
    """An all-gather after some of the steps, the same ones on all ranks.

    Args:
        world: The ranks.
        clock: Seconds that only grow.

    Attributes:
        speakers: Who takes part, in the same order on all ranks.
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
        """Note a step, and return whether there was an exchange; every rank calls it after each step.

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
        # Every rank sees the same numbers, and so has the next exchange after the same number of steps.
        seconds = sum(_HEAD.unpack_from(message)[0] for message in messages)
        step_s = seconds / self._world.size / self._num_steps
        wanted = min(MAX_STEPS_BETWEEN, int(INTERVAL_S / max(step_s, 1e-9)))
        # A few steps in a row may be quick, those whose batches were read ahead; the next are not.
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
