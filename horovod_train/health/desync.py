"""Replicas are identical: all ranks hold the same weights, buffers and optimizer state, bit for bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np

from horovod_train.checkpoint.arrays import ReplicaState
from horovod_train.collectives.base import Communicator, allgather_json
from horovod_train.errors import DesyncError, describe_ranks

MAX_GROUPS = 4
_WEIGHTS = np.random.RandomState(0).randint(0, 2**63, 4096, np.uint64) * np.uint64(2) + np.uint64(1)


def fingerprints(state: ReplicaState) -> dict[str, str]:
    """Return a hash for each array of a state: equal on two ranks if and only if all bytes are."""
    arrays = {
        **{f"model.{name}": blob for name, blob in state.model.items()},
        **{f"optimizer.{name}": blob for name, blob in state.optimizer.items()},
    }
    hashes = {n: hashlib.blake2b(blob.data, digest_size=16).hexdigest() for n, blob in arrays.items()}
    return {**hashes, "optimizer settings": json.dumps([state.optimizer_tree, dict(state.scaler)])}


def digest(state: ReplicaState) -> str:
    """Return a short digest of a whole state, at the speed of memory: for comparing, not for trusting.

    Each row of words is multiplied by the same odd random numbers and added up, modulo 2^64: states that
    differ by accident have the same digest with a chance of about 2^-64.
    """
    hasher = hashlib.blake2b(digest_size=16)
    for part in (state.model, state.optimizer):
        for name, blob in part.items():
            words = np.frombuffer(blob.data, np.uint64, count=len(blob.data) // 8)
            num_rows = len(words) // len(_WEIGHTS)
            rows = words[: num_rows * len(_WEIGHTS)].reshape(num_rows, len(_WEIGHTS)) @ _WEIGHTS
            hasher.update(f"{name} {blob.dtype} {blob.shape}\0".encode())
            hasher.update(rows.tobytes())
            hasher.update(bytes(blob.data[num_rows * len(_WEIGHTS) * 8 :]))
    hasher.update(json.dumps([state.optimizer_tree, dict(state.scaler)]).encode())
    return hasher.hexdigest()


def check_before_saving(world: Communicator, state: ReplicaState, step: int) -> None:
    """Compare this rank's state with all others' before rank 0's is saved for all.

    Raises:
        DesyncError: Ranks differ.
    """
    if len(set(world.allgather(digest(state).encode()))) > 1:
        check_replicas_identical(world, state, f"after step {step}, which is therefore not saved")


def check_replicas_identical(world: Communicator, state: ReplicaState, when: str) -> None:
    """Compare this rank's state with all others'.

    Two messages: one hash of everything, and only if those differ the hash of each array.

    Args:
        world: The ranks; all of them call this.
        state: This rank's state.
        when: Words for the message, such as "after step 100".

    Raises:
        DesyncError: Ranks differ; names them and the first array that differs.
    """
    mine = fingerprints(state)
    whole = hashlib.blake2b(repr(sorted(mine.items())).encode(), digest_size=16).hexdigest()
    wholes = [data.decode() for data in world.allgather(whole.encode())]
    if len(set(wholes)) == 1:
        return
    everyone = allgather_json(world, mine)
    names = sorted(set().union(*everyone))
    differing = [name for name in names if len({ranks.get(name) for ranks in everyone}) > 1]
    raise DesyncError(
        f"ranks differ {when}: {_who_differs(wholes)}, in {len(differing)} of "
        f"{len(names)} arrays, first {differing[0]}",
        hint="look for code that changes weights on some ranks only; resume from the last checkpoint",
    )


def _who_differs(values: Sequence[str]) -> str:
    """Name those that differ from most others; where there is no majority, nobody knows who is right.

    >>> _who_differs(["a", "a", "b"]), _who_differs(["a", "b"])
    ('rank 2 against the others', 'rank 0 against rank 1')
    """
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    largest = max(groups.values(), key=len)
    if 2 * len(largest) > len(values):
        odd = [rank for ranks in groups.values() if ranks is not largest for rank in ranks]
        return f"{describe_ranks(odd)} against the others"
    named = [describe_ranks(ranks) for ranks in list(groups.values())[:MAX_GROUPS]]
    return " against ".join([*named, *(["others"] if len(groups) > MAX_GROUPS else [])])
