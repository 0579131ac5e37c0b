"""Agreement of ranks on the order of the collectives in their forward and backward passes.

Passes may contain collectives: ``fully_shard`` gathers a unit when it is called, and DeepSpeed reduces
gradients when they are complete. If ranks call different modules, their collectives do not match: weights
are wrong if sizes are equal; otherwise, a process is aborted or hangs.

Each rank records an event before each collective of a pass, and compares it with the previous pass of the
same kind. If the path is unchanged, this costs one comparison of names. A rank whose path changes checks,
through the store of the process group, that the paths of all ranks change identically. If they do not, the
rank ends training before it enters the wrong collective.
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
PEER_CHECK_INTERVAL_S = 0.5
"""Interval at which a waiting rank checks the positions of other ranks."""
END = "the end of the pass"
HINT = (
    "let all ranks use the same modules in each pass, name a module that holds the alternatives in "
    "strategy.args.units (fsdp), or use strategy: allreduce or zero"
)


class PathAgreement:
    """Comparison of the path of this rank's passes with the paths of all other ranks.

    Args:
        store: Store of the process group; no other thread may use this object.
        rank: This rank.
        num_ranks: Number of ranks in the collectives.
        timeout_s: Longest wait for other ranks to reach the same event.
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
        """Number of this rank's current pass, number of the last event in it, and name of the event."""
        return self._num_passes, len(self._seen), self._seen[-1] if self._seen else ""

    def begin_pass(self, kind: str) -> None:
        """End the previous pass and begin a pass, which is compared with the last pass of the same kind."""
        self.end_pass()
        self._is_open = True
        self._kind = kind
        self._num_passes += 1
        self._expected = self._known.get(kind, [])
        self._seen = []

    def end_pass(self) -> None:
        """End a pass; the next pass of its kind is compared with it. Safe to call twice."""
        if not self._is_open:
            return
        self.event(END)
        self._is_open = False
        self._known[self._kind] = self._seen

    def event(self, name: str) -> None:
        """Record that this rank is about to enter a collective.

        Raises:
            UserError: Another rank enters a different collective.
            PeerError: Another rank does not reach this event in time.
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
            # Other ranks arrive at about the same time. If they do not, sleep: they may need this core.
            sleep(0 if now - begun < SPIN_S else min(now - begun, MAX_POLL_S))
            num_arrived = store.add(f"{key}/{name}", 0)
            if now - last_poll > PEER_CHECK_INTERVAL_S:
                last_poll = now
                self._check_peers(key, name, expected)
            if now - begun > self._timeout_s:
                raise PeerError(f"timeout after {self._timeout_s:g} s: another rank has not reached {name}")

    def _check_peers(self, key: str, name: str, expected: str) -> None:
        """Raise an error if a rank has announced another event, or has entered the expected collective."""
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
    """Return the store key of a rank's position."""
    return f"{PREFIX}/position/{rank}"


def publish_position(store: Any, rank: int, position: tuple[int, int, str]) -> None:
    """Store this rank's position if another rank requests it; called periodically by a background thread."""
    if store.check([ALARM]):
        store.set(place_of(rank), json.dumps(position))


def differ(rank: int, name: str, other_rank: int, other: str) -> UserError:
    """Return the error for ranks that take different paths.

    >>> print(differ(0, "the gradient of a", 1, "the gradient of b").message)
    ranks take different paths: rank 0 reaches the gradient of a, and rank 1 the gradient of b
    """
    return UserError(
        f"ranks take different paths: {describe_ranks([rank])} reaches {name}, and "
        f"{describe_ranks([other_rank])} {other}",
        hint=HINT,
    )
