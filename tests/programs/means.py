"""Tasks of JAX and TensorFlow whose loss is a mean over samples, over tokens, or over a batch."""

from __future__ import annotations

import numpy as np


class Sentences:
    """Sentences x [40, 5, 3] with lengths and targets."""

    def __init__(self):
        numbers = np.random.RandomState(3)
        self.x = numbers.randn(40, 5, 3).astype(np.float32)
        self.lengths = numbers.randint(1, 6, 40)
        self.y = numbers.randn(40, 5).astype(np.float32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.lengths[index], self.y[index]


class Jax:
    def __init__(self, kind):
        self.kind = kind

    def train_data(self):
        return Sentences()

    def model(self, rng):
        import jax.numpy as jnp

        del rng
        return {"w": jnp.full((3,), 0.3), "b": jnp.zeros(())}

    def loss(self, params, batch, rng):
        import jax
        import jax.numpy as jnp

        x, lengths, y = batch
        scores = x @ params["w"] + params["b"]
        if self.kind == "dropout":
            scores = scores * jax.random.bernoulli(rng, 0.5, scores.shape)
        if self.kind == "negatives":
            return -jnp.diag(jax.nn.log_softmax(scores @ y.T)).mean()
        is_token = jnp.arange(5)[None] < lengths[:, None]
        errors = (scores - y) ** 2 * is_token
        return errors.sum() / (is_token.sum() if self.kind == "tokens" else 5 * len(lengths))


class TensorFlow:
    def __init__(self, kind):
        self.kind = kind

    def train_data(self):
        return Sentences()

    def model(self):
        import keras

        of_kind = {
            "batch_norm": [keras.layers.BatchNormalization(name="norm")],
            "dropout": [keras.layers.Dropout(0.5)],
        }
        hidden = keras.layers.Dense(4, kernel_initializer="ones")
        return keras.Sequential([hidden, *of_kind.get(self.kind, []), keras.layers.Dense(1)])

    def loss(self, model, batch, training):
        import tensorflow as tf

        x, lengths, y = batch
        scores = model(x, training=training)[..., 0]
        is_token = tf.cast(tf.range(5)[None] < tf.cast(lengths, tf.int32)[:, None], tf.float32)
        errors = (scores - y) ** 2 * is_token
        count = (
            tf.reduce_sum(is_token) if self.kind == "tokens" else 5.0 * tf.cast(tf.shape(y)[0], tf.float32)
        )
        return tf.reduce_sum(errors) / count
