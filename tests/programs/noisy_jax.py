"""A JAX task with dropout by sample and random crops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class Crops:
    """50 sequences, of which a random part is read."""

    def __init__(self) -> None:
        random = np.random.RandomState(1)
        self.values, self.labels = random.randn(50, 8).astype(np.float32), random.randint(0, 3, 50)

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Any:
        start = np.random.randint(0, 3)
        return self.values[index, start : start + 6], self.labels[index]


class Noisy:
    def model(self, rng: Any) -> Any:
        first, second = jax.random.split(rng)
        return {"a": jax.random.normal(first, (6, 16)) * 0.4, "b": jax.random.normal(second, (16, 3)) * 0.2}

    def train_data(self) -> Crops:
        return Crops()

    def loss(self, params: Any, batch: Any, rng: Any) -> Any:
        values, labels = batch

        def of_sample(key: Any, x: Any, label: Any) -> Any:
            kept = jax.random.bernoulli(key, 0.9, (16,))
            logits = (jnp.tanh(x @ params["a"]) * kept / 0.9) @ params["b"]
            return -jax.nn.log_softmax(logits)[label]

        return jax.vmap(of_sample)(rng, values, labels).mean()
