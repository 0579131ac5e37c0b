"""The network in JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from frameworks.net import NumpyTask, start_weights


class Task(NumpyTask):
    def model(self, rng: jax.Array) -> Any:
        return start_weights()

    def logits(self, params: Any, x: jax.Array, rng: jax.Array | None = None) -> jax.Array:
        hidden = jnp.tanh(x.astype(params["w1"].dtype) @ params["w1"] + params["b1"])
        if rng is not None and self.dropout:
            hidden *= jax.random.bernoulli(rng, 1 - self.dropout, hidden.shape) / (1 - self.dropout)
        return (hidden @ params["w2"] + params["b2"]).astype(jnp.float32)

    def loss(self, params: Any, batch: Any, rng: jax.Array | None) -> jax.Array:
        x, y = batch
        return optax.softmax_cross_entropy_with_integer_labels(self.logits(params, x, rng), y).mean()

    def metrics(self, params: Any, batch: Any) -> dict[str, jax.Array]:
        x, y = batch
        logits = self.logits(params, x)
        return {
            "loss": optax.softmax_cross_entropy_with_integer_labels(logits, y),
            "accuracy": logits.argmax(1) == y,
        }


def weights(replica: Any) -> list[Any]:
    return [np.asarray(replica.params[name]) for name in ("w1", "b1", "w2", "b2")]
