"""Preemption without losing work: a signal to any rank, and all ranks stop after the same step.

    signal on one rank -> flag -> all-reduced at a step boundary -> all save -> all end with 75

The all-reduce costs about a millisecond, so it is done about twice a second, not after every step.
"""

from __future__ import annotations

import atexit
import signal
from collections.abc import Callable
from time import monotonic
from types import FrameType

from horovod_train.collectives.base import Communicator

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
ASK_INTERVAL_S = 0.5
# Steps may become slower: so many of the fast ones are made at most before asking again.
MAX_STEPS_BETWEEN = 64


class PreemptionRequest:
    """Notes that this process was asked to leave.

    Signals are noted from ``listen`` on; nothing else happens by itself.
    """

    def __init__(self) -> None:
        self.is_made = False

    def listen(self) -> None:
        """Take SIGTERM and SIGUSR1 for the wish that this process leaves; main thread only."""
        for number in SIGNALS:
            signal.signal(number, self._note)
        atexit.register(self._ignore)

    def _ignore(self) -> None:
        """Keep a late signal from killing a process that ends: Python restores default handlers then."""
        for number in SIGNALS:
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_IGN)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.is_made = True


class PreemptionAgreement:
    """All-reduces the preemption flag: once it is set on any rank, all stop after the same step.

    Args:
        world: The ranks.
        request: What this rank was asked.
        clock: Seconds that only grow.
    """

    def __init__(
        self, world: Communicator, request: PreemptionRequest, clock: Callable[[], float] = monotonic
    ) -> None:
        self._world = world
        self._request = request
        self._clock = clock
        self._asked_s = clock()
        self._num_steps = 0
        self._ask_after = 1
        self.interval_s = 0.0
        """Time between the last two questions: so long a request may have to wait, in seconds."""

    def reached(self) -> bool:
        """Return whether the ranks leave now; every rank calls it after each of its steps.

        Raises:
            PeerError: Another rank was lost.
        """
        if self._world.size == 1:
            return self._request.is_made
        self._num_steps += 1
        if self._num_steps < self._ask_after:
            return False
        now = self._clock()
        self.interval_s = now - self._asked_s
        # Every rank sees the same sums, and so asks again after the same number of steps.
        wishes, seconds = self._world.allreduce_sum([float(self._request.is_made), self.interval_s])
        step_s = seconds / self._world.size / self._num_steps
        wanted = min(MAX_STEPS_BETWEEN, int(ASK_INTERVAL_S / max(step_s, 1e-9)))
        # A few steps in a row may be quick, those whose batches were read ahead; the next are not.
        self._ask_after = max(1, min(wanted, 2 * self._ask_after))
        self._num_steps = 0
        self._asked_s = now
        return wishes > 0
