"""Ranks agree on the order of the collectives in their forward and backward passes.

Where passes contain collectives (``fully_shard`` gathers a unit when it is called, DeepSpeed reduces
gradients when they are there), ranks that call other modules would exchange data that does not belong
together: wrong weights where the sizes are equal, a process that is aborted or waits where they are not.

Each rank notes an event before each collective of a pass, and compares it with the same pass before. As long
as the path is the same, that is all: a comparison of two names. A rank whose path changes asks the others,
through the store of the process group, whether theirs changes in the same way. If it does not, this rank ends
training before it takes part in the wrong collective.
"""

from __future__ import annotations

import json
from time import monotonic, sleep
from typing import Any

from horovod_train.errors import PeerError, UserError, describe_ranks

PREFIX = "horovod_train.path"
ALARM = f"{PREFIX}/alarm"
SPIN_S = 0.002
MAX_POLL_S = 0.1
SILENCE_S = 0.5
"""After so long a rank asks where the others are."""
END = "the end of the pass"
HINT = (
    "let all ranks use the same modules in each pass, name a module that holds the alternatives in "
    "strategy.args.units (fsdp), or use strategy: allreduce or zero"
)


class PathAgreement:
    """Compares the path of this rank's passes with that of all others.

    Args:
        store: Of the process group; used by this thread alone.
        rank: This rank.
        num_ranks: How many ranks take part in the collectives.
        timeout_s: For so long a rank waits for the others to reach the same event.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int, timeout_s: float) -> None:
        self._store, self._rank, self._num_ranks, self._timeout_s = store, rank, num_ranks, timeout_s
        self._known: dict[str, list[str]] = {}
        self._expected: list[str] = []
        self._seen: list[str] = []
        self._kind = ""
        self._num_passes = 0
        self._is_open = False

    @property
    def position(self) -> tuple[int, int, str]:
        """Number of the pass, number of the event in it, and its name: where this rank is."""
        return self._num_passes, len(self._seen), self._seen[-1] if self._seen else ""

    def begin_pass(self, kind: str) -> None:
        """Begin a pass, and end the one before.

        Args:
            kind: Passes of one kind are compared with each other, such as ``training``.
        """
        self.end_pass()
        self._is_open = True
        self._kind = kind
        self._num_passes += 1
        self._expected = self._known.get(kind, [])
        self._seen = []

    def end_pass(self) -> None:
        """End a pass: its path is what the next one of its kind is compared with. Safe to call twice."""
        if not self._is_open:
            return
        self.event(END)
        self._is_open = False
        self._known[self._kind] = self._seen

    def event(self, name: str) -> None:
        """Note that this rank is about to take part in a collective.

        Raises:
            UserError: Other ranks are about to take part in another one.
        """
        if not self._is_open:
            self.begin_pass("other")
        seen, expected = self._seen, self._expected
        seen.append(name)
        at = len(seen)
        if at > len(expected) or expected[at - 1] != name:
            self._agree(name, expected[at - 1] if at <= len(expected) else END)

    def _agree(self, name: str, expected: str) -> None:
        """Wait until all ranks have reached the same event."""
        if self._num_ranks == 1:
            return
        store, key = self._store, f"{PREFIX}/{self._num_passes}/{len(self._seen)}"
        store.set(f"{key}/{self._rank}", name)
        num_arrived = store.add(f"{key}/{name}", 1)
        begun = last_poll = monotonic()
        while num_arrived < self._num_ranks:
            now = monotonic()
            # Others come at about the same time; where they do not, a rank does not take a core from them.
            sleep(0 if now - begun < SPIN_S else min(now - begun, MAX_POLL_S))
            num_arrived = store.add(f"{key}/{name}", 0)
            if now - last_poll > SILENCE_S:
                last_poll = now
                self._look_at_others(key, name, expected)
            if now - begun > self._timeout_s:
                raise PeerError(f"another rank did not come to {name} within {self._timeout_s:g} s")

    def _look_at_others(self, key: str, name: str, expected: str) -> None:
        """Refuse if a rank is elsewhere: it has announced another event, or is in the expected collective."""
        store = self._store
        for rank in range(self._num_ranks):
            if rank == self._rank:
                continue
            if store.check([f"{key}/{rank}"]):
                other = store.get(f"{key}/{rank}").decode()
                if other != name:
                    raise differ(self._rank, name, rank, other)
        store.set(ALARM, "on")
        mine = [self._num_passes, len(self._seen)]
        for rank in range(self._num_ranks):
            if rank == self._rank or not store.check([place_of(rank)]) or store.check([f"{key}/{rank}"]):
                continue
            *place, _ = json.loads(store.get(place_of(rank)))
            if place >= mine and not store.check([f"{key}/{rank}"]):
                raise differ(self._rank, name, rank, expected)


def place_of(rank: int) -> str:
    """Return the store's key of a rank's position."""
    return f"{PREFIX}/position/{rank}"


def publish_position(store: Any, rank: int, position: tuple[int, int, str]) -> None:
    """Write where this rank is, if another one asks; called now and then by another thread."""
    if store.check([ALARM]):
        store.set(place_of(rank), json.dumps(position))


def differ(rank: int, name: str, other_rank: int, other: str) -> UserError:
    """Return the error of ranks that take different paths.

    >>> print(differ(0, "the gradient of a", 1, "the gradient of b").message)
    ranks take different paths: rank 0 reaches the gradient of a, and rank 1 the gradient of b
    """
    return UserError(
        f"ranks take different paths: {describe_ranks([rank])} reaches {name}, and "
        f"{describe_ranks([other_rank])} {other}",
        hint=HINT,
    )
