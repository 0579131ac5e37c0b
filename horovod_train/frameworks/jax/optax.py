"""Gradients averaged over ranks, for JAX training loops with optax; with or without ``jax.jit``.

Example::

    import optax
    from horovod_train.frameworks.jax.optax import average_over_ranks, init

    ranks = init()
    optimizer = optax.chain(average_over_ranks(ranks), optax.clip_by_global_norm(1.0), optax.adam(1e-3))

Put ``average_over_ranks`` first in the chain: then all ranks clip and update with the gradient of the global
batch.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import optax

from horovod_train.collectives.base import Communicator
from horovod_train.frameworks.arrays import check_same_layout, from_rank_0
from horovod_train.frameworks.jax.exchange import Exchange
from horovod_train.frameworks.join import join
from horovod_train.frameworks.torch.comm.collectives import TorchCommunicator

Tree = TypeVar("Tree")
"""A pytree of arrays."""


def init() -> Communicator:
    """Initialize Horovod, and return the communicator; of one rank, if this process was started alone.

    Raises:
        EngineError: The process is one of several ranks, and Horovod is missing or cannot start.
    """
    return join(TorchCommunicator)


def average_over_ranks(
    world: Communicator, *, bucket_size_mib: float = 8.0, wire_dtype: Any = "float32"
) -> optax.GradientTransformation:
    """Return a transformation that averages gradients over ranks.

    Args:
        world: The communicator.
        bucket_size_mib: Approximate size of a bucket of gradients.
        wire_dtype: Data type in which float32 gradients are sent: float32 or float16.
    """
    exchange = Exchange(world, int(bucket_size_mib * 2**20), wire_dtype)

    def update(
        updates: optax.Updates, state: optax.EmptyState, _params: optax.Params = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        leaves, tree = jax.tree.flatten(updates)
        return jax.tree.unflatten(tree, exchange.mean(leaves)), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def broadcast(world: Communicator, tree: Tree) -> Tree:
    """Return rank 0's arrays. Call this with the parameters before the first step. Collective.

    Raises:
        UserError: Ranks have different pytrees.
    """
    if world.size == 1:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    arrays = {str(number): jax.device_get(leaf) for number, leaf in enumerate(leaves)}
    check_same_layout(world, arrays)
    return jax.tree.unflatten(
        structure, [jax.numpy.asarray(from_rank_0(world, array)) for array in arrays.values()]
    )
