"""Which ranks have which part of a state: what several have is the same on all, and the first writes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from horovod_train.checkpoint.arrays import ArrayBlob, ReplicaState
from horovod_train.checkpoint.tree import merge_trees
from horovod_train.collectives.base import Communicator, allgather_json

Key = str


def keyed(state: ReplicaState) -> Iterator[tuple[Key, ArrayBlob]]:
    """Yield what a rank has, each array or part of one with a key that says what it is."""
    for section, arrays in (("model", state.model), ("optimizer", state.optimizer)):
        for name, blob in arrays.items():
            yield key_of(section, name, blob), blob


def key_of(section: str, name: str, blob: ArrayBlob) -> Key:
    """Return what tells an array, or a part of one, from all others.

    >>> key_of("model", "weight", ArrayBlob("float32", (2,), bytes(8)))
    'model.weight'
    """
    if blob.part is None:
        return f"{section}.{name}"
    return f"{section}.{name} {list(blob.part.start)} {list(blob.shape)}"


@dataclass(frozen=True)
class Holders:
    """Who has what.

    Attributes:
        rank: This rank.
        of: The ranks that have it, in order, by the key of everything that any rank has.
        optimizer_tree: Shape of the optimizer's state, of all ranks together.
    """

    rank: int
    of: Mapping[Key, tuple[int, ...]]
    optimizer_tree: Any

    @cached_property
    def writers(self) -> tuple[int, ...]:
        """Ranks that write to a checkpoint: of those that have something, the first; rank 0 always."""
        return tuple(sorted({0, *(ranks[0] for ranks in self.of.values())}))

    def arrays_to_write(self, section: str, arrays: Mapping[str, ArrayBlob]) -> dict[str, ArrayBlob]:
        """Return what this rank writes of its arrays."""
        return {
            name: blob
            for name, blob in arrays.items()
            if self.of[key_of(section, name, blob)][0] == self.rank
        }

    def groups(self, keys: Iterable[Key]) -> dict[tuple[int, ...], list[Key]]:
        """Return keys by who has them, of those that several ranks have."""
        groups: dict[tuple[int, ...], list[Key]] = {}
        for key in keys:
            if len(self.of[key]) > 1:
                groups.setdefault(self.of[key], []).append(key)
        return groups


def find_holders(world: Communicator, state: ReplicaState) -> Holders:
    """Return who has what; every rank calls it. No message is needed where every rank has to have all.

    Raises:
        CheckpointError: Ranks have states of different optimizers.
    """
    mine = [key for key, _ in keyed(state)]
    if not state.is_sharded:
        everyone = tuple(range(world.size))
        return Holders(world.rank, dict.fromkeys(mine, everyone), state.optimizer_tree)
    of_ranks = allgather_json(world, [mine, state.optimizer_tree])
    found: dict[Key, list[int]] = {}
    for rank, (keys, _) in enumerate(of_ranks):
        for key in keys:
            found.setdefault(key, []).append(rank)
    tree = merge_trees([tree for _, tree in of_ranks])
    return Holders(world.rank, {key: tuple(ranks) for key, ranks in found.items()}, tree)
