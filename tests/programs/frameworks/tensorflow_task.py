"""The network in TensorFlow."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from frameworks.net import NumpyTask, start_weights


class Task(NumpyTask):
    def model(self) -> Any:
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(16, activation="tanh"),
                keras.layers.Dropout(self.dropout),
                keras.layers.Dense(3, dtype="float32"),
            ]
        )
        model.set_weights(list(start_weights().values()))
        return model

    def loss(self, model: Any, batch: Any, training: bool) -> tf.Tensor:
        x, y = batch
        logits = model(x, training=training)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))

    def metrics(self, model: Any, batch: Any) -> dict[str, tf.Tensor]:
        x, y = batch
        logits = model(x, training=False)
        return {
            "loss": tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits),
            "accuracy": tf.equal(tf.argmax(logits, 1), y),
        }


def weights(replica: Any) -> list[Any]:
    return list(replica.model.get_weights())
