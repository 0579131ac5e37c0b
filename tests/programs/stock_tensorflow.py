"""A script in the style of Horovod's documentation for TensorFlow 2, with variables of Keras 3.

usage: OUT_FOLDER. Each rank writes the weights it has in the end.
"""

import json
import sys
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from frameworks.net import BATCH_SIZE, Samples, start_weights

hvd.init()
samples = Samples(48, 1)
model = keras.Sequential(
    [keras.Input((6,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)]
)
keras.utils.set_random_seed(hvd.rank())
model.set_weights([w + 0.5 * hvd.rank() for w in start_weights().values()])
optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def step(inputs, labels):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(inputs, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


hvd.broadcast_variables(model.variables, root_rank=0)
optimizer.build(model.trainable_variables)
hvd.broadcast_variables(optimizer.variables, root_rank=0)
for start in range(0, 48, BATCH_SIZE * hvd.size()):
    mine = slice(start + BATCH_SIZE * hvd.rank(), start + BATCH_SIZE * (hvd.rank() + 1))
    step(samples.x[mine], samples.y[mine])
out = [w.astype("float64").ravel().tolist() for w in model.get_weights()]
(Path(sys.argv[1]) / f"rank-{hvd.rank()}.json").write_text(json.dumps(out))
