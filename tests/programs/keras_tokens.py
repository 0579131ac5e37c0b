"""A Keras model with a label and a weight for each token, and its training by ``model.fit``.

usage: keras_tokens.py FILE     train without a job; write the weights to FILE
"""

from __future__ import annotations

import sys

import keras
import numpy as np

EPOCHS, BATCH_SIZE, LR = 2, 4, 0.5


class Texts:
    def __init__(self):
        numbers = np.random.RandomState(5)
        self.x = numbers.randn(22, 5, 3).astype(np.float32)
        self.y = numbers.randint(0, 4, (22, 5))
        self.weights = numbers.rand(22, 5).astype(np.float32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index], self.weights[index]


class Tokens:
    def model(self):
        weights = keras.initializers.RandomNormal(seed=1)
        layer = keras.layers.Dense(4, "softmax", kernel_initializer=weights, name="out")
        return keras.Sequential([keras.Input((5, 3)), layer])

    def compile(self):
        return {"loss": "sparse_categorical_crossentropy"}

    def train_data(self):
        return Texts()


if __name__ == "__main__":
    task, data = Tokens(), Texts()
    model = task.model()
    model.compile(optimizer=keras.optimizers.SGD(LR), **task.compile())
    model.fit(data.x, data.y, BATCH_SIZE, epochs=EPOCHS, shuffle=False, verbose=0, sample_weight=data.weights)
    np.savez(sys.argv[1], *[variable.numpy() for variable in model.trainable_variables])
