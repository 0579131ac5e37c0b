"""Check that replicas are identical: weights, buffers and optimizer state are bitwise equal on all ranks.

If the model is sharded, copies of the same shard are compared.
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
    """Return hashes of the arrays, by key, and the optimizer settings, for bitwise comparison of ranks."""
    return {**{key: _hash_of(blob) for key, blob in keyed(state)}, SETTINGS: _settings(state)}


def digest(arrays: Iterable[tuple[str, ArrayBlob]]) -> str:
    """Return a short, non-cryptographic digest of arrays, at memory bandwidth.

    Each row of 64-bit words is multiplied by the same odd random numbers and summed modulo 2^64. Arrays that
    differ by accident have equal digests with a probability of about 2^-64.
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
    """Raise ``DesyncError`` if copies of a state differ between ranks; return its holders. Collective."""
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
    """Raise ``DesyncError`` with the first array that differs and its ranks, if copies differ. Collective.

    Args:
        world: The communicator.
        state: This rank's state.
        when: Adverbial phrase for the error message, such as "after step 100".
    """
    _compare_each(world, state, find_holders(world, state), when)


def _compare_each(world: Communicator, state: ReplicaState, holders: Holders, when: str) -> None:
    """Compare one hash per group of ranks; if any differ, compare each array, and raise ``DesyncError``."""
    arrays = dict(keyed(state))
    groups = holders.groups(arrays)
    shared = {SETTINGS: _settings(state)}
    shared |= {key: _hash_of(arrays[key]) for keys in groups.values() for key in keys}
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
    """Return the state other than arrays as JSON, without the optimizer's state if that is sharded."""
    return json.dumps([None if state.is_sharded else state.optimizer_tree, dict(state.scaler)])


def _hash(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _hash_of(blob: ArrayBlob) -> str:
    return f"{blob.dtype} {list(blob.shape)} {_hash(blob.data)}"


def _differing(everyone: Sequence[Mapping[str, str]], *, is_sharded: bool) -> list[str]:
    """Return the keys whose values differ between ranks. If sharded, ranks without the key are ignored."""
    found: dict[str, set[str | None]] = {}
    for key in set().union(*everyone):
        found[key] = {of_rank.get(key) for of_rank in everyone} - ({None} if is_sharded else set())
    return sorted(key for key, values in found.items() if len(values) > 1)


def _who_differs(values: Sequence[str | None]) -> str:
    """Return a text with the ranks that differ from the majority; without a majority, with all groups.

    Args:
        values: Compared value of each rank; None: the rank has no value.

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
