"""State of optimizers of optax in checkpoints, and optimizers whose update needs more than gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from horovod_train.errors import CheckpointError
from horovod_train.plugins.jax.framework import blobs_of, filled

PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}


@pytest.mark.parametrize("key", [jax.random.key(7), jax.random.key(7, impl="rbg")])
def test_random_keys_of_an_optimizer_come_back(key):
    state = optax.chain(optax.add_noise(0.1, 0.5, key), optax.sgd(0.1)).init(PARAMS)
    fresh = optax.chain(optax.add_noise(0.1, 0.5, jax.random.split(key)[0]), optax.sgd(0.1)).init(PARAMS)

    found = filled(fresh, blobs_of(state), "optimizer")

    assert blobs_of(found) == blobs_of(state) != blobs_of(fresh)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert one.dtype == other.dtype


def test_a_key_of_another_kind_is_refused():
    blobs = blobs_of({"key": jax.random.key(1, impl="rbg")})

    with pytest.raises(CheckpointError):
        filled({"key": jax.random.key(1)}, blobs, "optimizer")


def test_arrays_come_back_as_they_were():
    found = filled({"w": jnp.zeros(3)}, blobs_of({"w": jnp.arange(3.0)}), "model")

    np.testing.assert_array_equal(found["w"], [0, 1, 2])
