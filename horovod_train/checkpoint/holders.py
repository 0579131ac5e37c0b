"""Mapping from arrays of a state to the ranks that have them. The first of these ranks writes the array."""

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
    """Yield the arrays of a rank, or parts of arrays, with keys that identify them across ranks."""
    for section, arrays in (("model", state.model), ("optimizer", state.optimizer)):
        for name, blob in arrays.items():
            yield key_of(section, name, blob), blob


def key_of(section: str, name: str, blob: ArrayBlob) -> Key:
    """Return a key that identifies an array, or a part of one.

    >>> key_of("model", "weight", ArrayBlob("float32", (2,), bytes(8)))
    'model.weight'
    """
    if blob.part is None:
        return f"{section}.{name}"
    return f"{section}.{name} {list(blob.part.start)} {list(blob.shape)}"


@dataclass(frozen=True)
class Holders:
    """The ranks that have each array.

    Attributes:
        rank: This rank.
        of: Ranks that have an array or part, in ascending order, by its key; for the arrays of all ranks.
        optimizer_tree: Structure of the optimizer's state, merged over all ranks.
    """

    rank: int
    of: Mapping[Key, tuple[int, ...]]
    optimizer_tree: Any

    @cached_property
    def writers(self) -> tuple[int, ...]:
        """Ranks that write to a checkpoint: rank 0, and the first rank that has each array."""
        return tuple(sorted({0, *(ranks[0] for ranks in self.of.values())}))

    def arrays_to_write(self, section: str, arrays: Mapping[str, ArrayBlob]) -> dict[str, ArrayBlob]:
        """Return the arrays that this rank must write: those of which it is the first holder."""
        return {
            name: blob
            for name, blob in arrays.items()
            if self.of[key_of(section, name, blob)][0] == self.rank
        }

    def groups(self, keys: Iterable[Key]) -> dict[tuple[int, ...], list[Key]]:
        """Return the keys that several ranks have, grouped by these ranks."""
        groups: dict[tuple[int, ...], list[Key]] = {}
        for key in keys:
            if len(self.of[key]) > 1:
                groups.setdefault(self.of[key], []).append(key)
        return groups


def find_holders(world: Communicator, state: ReplicaState) -> Holders:
    """Return the holders of each array. Every rank must call it: it communicates if the state is sharded.

    Raises:
        CheckpointError: Ranks have optimizer states that contradict each other.
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
