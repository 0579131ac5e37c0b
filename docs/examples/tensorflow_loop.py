"""A tf.function loop on any number of ranks.  usage: tensorflow_loop.py [BATCH_SIZE_PER_RANK]."""

import sys

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

from horovod_train.frameworks.reader import Shards
from horovod_train.plugins.tensorflow import DistributedGradientTape, broadcast, init

batch_size = int(sys.argv[1]) if len(sys.argv) > 1 else 32
ranks = init()
x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
optimizer = keras.optimizers.SGD(0.002 * batch_size * ranks.size, momentum=0.9)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
broadcast(ranks, model.variables)


@tf.function(reduce_retracing=True)
def step(inputs, labels, weight):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(inputs, training=True)) * weight
    gradients = DistributedGradientTape(tape, ranks).gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)


shards = Shards(ranks, x[:1500], y[:1500], batch_size=batch_size)
for epoch in range(5):
    for weight, (inputs, labels) in shards.epoch(epoch):
        step(inputs, labels, tf.constant(weight, tf.float32))

accuracy = float((model(x[1500:]).numpy().argmax(1) == y[1500:]).mean())
print(f"rank {ranks.rank} of {ranks.size}: accuracy {accuracy:.3f}", flush=True)
print(f"weights {sum(float(abs(w).sum()) for w in model.get_weights()):.4f}", flush=True)
