"""The network in Keras, for every back end."""

from __future__ import annotations

from typing import Any

import keras
from frameworks.net import NumpyTask, start_weights


class Task(NumpyTask):
    def __init__(self, penalty: float = 0.0, **settings: Any) -> None:
        super().__init__(**settings)
        self.penalty = keras.regularizers.L2(penalty) if penalty else None

    def model(self) -> keras.Model:
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(16, activation="tanh", kernel_regularizer=self.penalty),
                keras.layers.Dropout(self.dropout),
                keras.layers.Dense(3, dtype="float32", kernel_regularizer=self.penalty),
            ]
        )
        model.set_weights(list(start_weights().values()))
        return model

    def compile(self) -> dict[str, Any]:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return {"loss": loss, "metrics": ["accuracy"]}


def weights(replica: Any) -> list[Any]:
    return list(replica.model.get_weights())
