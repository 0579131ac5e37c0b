"""JAX: a task, and a loop that sums one flat gradient between two compiled functions. usage: STEPS."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from vectors import LR, MOMENTUM, NUM_CLASSES, NUM_LAYERS, WIDTH, Vectors, batches


class Task:
    """The network for our loop."""

    def model(self, rng: Any) -> Any:
        """Return the parameters."""
        keys = jax.random.split(rng, NUM_LAYERS + 1)
        widths = [WIDTH] * NUM_LAYERS + [NUM_CLASSES]
        return [
            {"w": jax.random.normal(key, (WIDTH, width)) * WIDTH**-0.5, "b": jnp.zeros(width)}
            for key, width in zip(keys, widths, strict=True)
        ]

    def train_data(self) -> Vectors:
        """Return the vectors."""
        return Vectors()

    def loss(self, params: Any, batch: Any, rng: Any) -> jax.Array:
        """Return the mean loss."""
        x, y = batch
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        logits = x @ params[-1]["w"] + params[-1]["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def by_hand(num_steps: int) -> None:
    """Train with Horovod alone."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    task, optimizer = Task(), optax.sgd(LR * hvd.size(), MOMENTUM)
    params = task.model(jax.random.key(0))
    state = optimizer.init(params)
    _, unravel = ravel_pytree(params)

    @jax.jit
    def gradient(params: Any, x: Any, y: Any) -> tuple[jax.Array, jax.Array]:
        loss, found = jax.value_and_grad(task.loss)(params, (x, y), None)
        return loss, ravel_pytree(found)[0]

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def update(params: Any, state: Any, flat: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(unravel(flat), state, params)
        return optax.apply_updates(params, updates), state

    for x, y in batches(hvd.rank(), hvd.size(), num_steps):
        loss, flat = gradient(params, x, y)
        hvd.allreduce_(torch.from_dlpack(flat.block_until_ready()), name="gradient")  # where it lies
        params, state = update(params, state, flat)
        float(loss)


if __name__ == "__main__":
    by_hand(int(sys.argv[1]))
