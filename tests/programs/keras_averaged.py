"""A Keras model whose optimizer averages weights, and its training by ``model.fit``.

usage: keras_averaged.py FILE     train without a job; write the weights to FILE
"""

from __future__ import annotations

import sys

import keras
import numpy as np

EPOCHS, BATCH_SIZE, LR = 3, 4, 0.1
AVERAGED = {"use_ema": True, "ema_momentum": 0.8}


class Numbers:
    def __init__(self):
        numbers = np.random.RandomState(5)
        self.x, self.y = numbers.randn(24, 3).astype(np.float32), numbers.randn(24, 1).astype(np.float32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class TellsEpochs(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        print(f"epoch {epoch} of {self.params['epochs']}", flush=True)


class Averaged:
    def model(self):
        weights = keras.initializers.RandomNormal(seed=1)
        return keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(1, kernel_initializer=weights, name="out")]
        )

    def compile(self):
        return {"loss": "mse"}

    def callbacks(self):
        return [TellsEpochs()]

    def train_data(self):
        return Numbers()


if __name__ == "__main__":
    task, data = Averaged(), Numbers()
    model = task.model()
    model.compile(optimizer=keras.optimizers.SGD(LR, **AVERAGED), **task.compile())
    model.fit(data.x, data.y, batch_size=BATCH_SIZE, epochs=EPOCHS, shuffle=False, verbose=0)
    np.savez(sys.argv[1], *[variable.numpy() for variable in model.trainable_variables])
