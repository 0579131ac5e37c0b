"""Replicas are identical: all ranks hold the same weights, buffers and optimizer state, bit for bit.

Where ranks share a model, what several of them have is the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from horovod_train.checkpoint.arrays import ArrayBlob, ReplicaState
from horovod_train.checkpoint.holders import Holders, find_holders, keyed
from horovod_train.collectives.base import Communicator, allgather_json
from horovod_train.errors import DesyncError, describe_ranks

MAX_GROUPS = 4
SETTINGS = "optimizer settings"
_WEIGHTS = np.random.RandomState(0).randint(0, 2**63, 4096, np.uint64) * np.uint64(2) + np.uint64(1)


def fingerprints(state: ReplicaState) -> dict[str, str]:
    """Return a hash for each array of a state: equal on two ranks if and only if all bytes are."""
    return {**{key: _hash(blob.data) for key, blob in keyed(state)}, SETTINGS: _settings(state)}


def digest(arrays: Iterable[tuple[str, ArrayBlob]]) -> str:
    """Return a short digest of arrays, at the speed of memory: for comparing, not for trusting.

    Each row of words is multiplied by the same odd random numbers and added up, modulo 2^64: arrays that
    differ by accident have the same digest with a chance of about 2^-64.
    """
    hasher = hashlib.blake2b(digest_size=16)
    for key, blob in arrays:
        words = np.frombuffer(blob.data, np.uint64, count=len(blob.data) // 8)
        num_rows = len(words) // len(_WEIGHTS)
        rows = words[: num_rows * len(_WEIGHTS)].reshape(num_rows, len(_WEIGHTS)) @ _WEIGHTS
        hasher.update(f"{key} {blob.dtype} {blob.shape}\0".encode())
        hasher.update(rows.tobytes())
        hasher.update(bytes(blob.data[num_rows * len(_WEIGHTS) * 8 :]))
    return hasher.hexdigest()


def check_before_saving(world: Communicator, state: ReplicaState, step: int) -> Holders:
    """Compare what this rank has with all others that have it, too; return who has what.

    Raises:
        DesyncError: Ranks differ.
    """
    holders = find_holders(world, state)
    arrays = dict(keyed(state))
    groups = holders.groups(arrays)
    mine = {
        describe_ranks(ranks): digest((key, arrays[key]) for key in keys) for ranks, keys in groups.items()
    }
    if _differing(allgather_json(world, {**mine, SETTINGS: _settings(state)}), is_sharded=True):
        _compare_each(world, state, holders, f"after step {step}, which is therefore not saved")
    return holders


def check_replicas_identical(world: Communicator, state: ReplicaState, when: str) -> None:
    """Compare this rank's state with all others' that hold the same.

    Args:
        world: The ranks; all of them call this.
        state: This rank's state.
        when: Words for the message, such as "after step 100".

    Raises:
        DesyncError: Ranks differ; names them and the first array that differs.
    """
    _compare_each(world, state, find_holders(world, state), when)


def _compare_each(world: Communicator, state: ReplicaState, holders: Holders, when: str) -> None:
    """Compare in two messages: one hash of everything, and only if those differ the hash of each array.

    Raises:
        DesyncError: Ranks differ.
    """
    arrays = dict(keyed(state))
    groups = holders.groups(arrays)
    shared = {SETTINGS: _settings(state)}
    shared |= {key: _hash(arrays[key].data) for keys in groups.values() for key in keys}
    of_groups = {
        describe_ranks(ranks): [(key, shared[key]) for key in sorted(keys)] for ranks, keys in groups.items()
    }
    whole = {SETTINGS: shared[SETTINGS], **{name: repr(found) for name, found in of_groups.items()}}
    wholes = allgather_json(world, {name: _hash(text.encode()) for name, text in whole.items()})
    wrong = _differing(wholes, is_sharded=True)
    if not wrong:
        return
    everyone = allgather_json(world, shared)
    differing = _differing(everyone, is_sharded=state.is_sharded)
    raise DesyncError(
        f"ranks differ {when}: {_who_differs([found.get(wrong[0]) for found in wholes])}, in "
        f"{len(differing)} of {len(set().union(*everyone))} arrays, first {differing[0]}",
        hint="look for code that changes weights on some ranks only; resume from the last checkpoint",
    )


def _settings(state: ReplicaState) -> str:
    """Return state other than arrays; under model parallelism, each rank has its part of the optimizer's."""
    return json.dumps([None if state.is_sharded else state.optimizer_tree, dict(state.scaler)])


def _hash(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _differing(everyone: Sequence[Mapping[str, str]], *, is_sharded: bool) -> list[str]:
    """Return the keys under which ranks have different values; sharded: ranks that have it at all."""
    found: dict[str, set[str | None]] = {}
    for key in set().union(*everyone):
        found[key] = {of_rank.get(key) for of_rank in everyone} - ({None} if is_sharded else set())
    return sorted(key for key, values in found.items() if len(values) > 1)


def _who_differs(values: Sequence[str | None]) -> str:
    """Name those that differ from most others; without a majority, no rank is known to be right.

    Args:
        values: By rank; None: this rank has nothing to compare.

    >>> _who_differs(["a", "a", "b"]), _who_differs(["a", None, "b"])
    ('rank 2 against the others', 'rank 0 against rank 2')
    """
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        if value is not None:
            groups.setdefault(value, []).append(rank)
    largest = max(groups.values(), key=len)
    if 2 * len(largest) > sum(map(len, groups.values())):
        outliers = [rank for ranks in groups.values() if ranks is not largest for rank in ranks]
        return f"{describe_ranks(outliers)} against the others"
    named = [describe_ranks(ranks) for ranks in list(groups.values())[:MAX_GROUPS]]
    return " against ".join([*named, *(["others"] if len(groups) > MAX_GROUPS else [])])
