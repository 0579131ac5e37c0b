"""One truth: all ranks hold the same weights, buffers and optimizer state, bit for bit."""

from __future__ import annotations

import hashlib
import json

from horovod_train.checkpoint.arrays import ReplicaState
from horovod_train.engine.base import World, gather_json
from horovod_train.errors import DesyncError, describe_ranks


def fingerprints(state: ReplicaState) -> dict[str, str]:
    """Return a hash for each array of a state: equal on two ranks if and only if all bytes are."""
    arrays = {
        **{f"model.{name}": blob for name, blob in state.model.items()},
        **{f"optimizer.{name}": blob for name, blob in state.optimizer.items()},
    }
    hashes = {n: hashlib.blake2b(blob.data, digest_size=16).hexdigest() for n, blob in arrays.items()}
    return {**hashes, "optimizer settings": json.dumps([state.optimizer_tree, dict(state.scaler)])}


def check_in_sync(world: World, state: ReplicaState, when: str) -> None:
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
    wholes = [data.decode() for data in world.gather(whole.encode())]
    if len(set(wholes)) == 1:
        return
    everyone = gather_json(world, mine)
    names = sorted(set().union(*everyone))
    differing = [name for name in names if len({ranks.get(name) for ranks in everyone}) > 1]
    majority = max(set(wholes), key=wholes.count)
    odd = [rank for rank, value in enumerate(wholes) if value != majority]
    raise DesyncError(
        f"ranks differ {when}: {describe_ranks(odd)} against the others, in {len(differing)} of "
        f"{len(names)} arrays, first {differing[0]}",
        hint="look for code that changes weights on some ranks only; resume from the last checkpoint",
    )
