"""A script in the style of Horovod's documentation: DistributedGradientTape, compiled or not."""

import sys

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

hvd.init()
keras.utils.set_random_seed(1)
layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(4)]
model = keras.Sequential([keras.Input((16,)), *layers])
optimizer = keras.optimizers.SGD(0.01 * hvd.size())
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
inputs = np.random.default_rng(hvd.rank()).normal(size=(8, 16)).astype("float32")
labels = np.zeros(8, "int64")


def step(inputs, labels):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(inputs, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


if sys.argv[1] == "compiled":
    step = tf.function(step)
for _ in range(30):
    loss = step(inputs, labels)
hvd.broadcast_variables(model.variables, root_rank=0)
print("trained to", float(loss))
