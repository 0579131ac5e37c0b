"""TensorFlow: a task, and a loop of Horovod's own tape. usage: STEPS."""

from __future__ import annotations

import sys
from typing import Any

import keras
import tensorflow as tf
from keras_net import network
from vectors import LR, MOMENTUM, Vectors, batches


class Task:
    """The network for our loop."""

    def model(self) -> Any:
        """Return the network."""
        return network()

    def train_data(self) -> Vectors:
        """Return the vectors."""
        return Vectors()

    def loss(self, model: Any, batch: Any, training: bool) -> tf.Tensor:  # noqa: FBT001
        """Return the mean loss."""
        x, y = batch
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=model(x, training=training))
        )


def by_hand(num_steps: int) -> None:
    """Train with Horovod alone."""
    import horovod.tensorflow as hvd

    hvd.init()
    task = Task()
    model = task.model()
    optimizer = keras.optimizers.SGD(LR * hvd.size(), MOMENTUM)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x: Any, y: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = task.loss(model, (x, y), training=True)
        tape = hvd.DistributedGradientTape(tape)
        values = [variable.value for variable in model.trainable_variables]
        optimizer.apply(tape.gradient(loss, values), model.trainable_variables)
        return loss

    for number, (x, y) in enumerate(batches(hvd.rank(), hvd.size(), num_steps)):
        loss = step(tf.constant(x), tf.constant(y))
        if number == 0:
            hvd.broadcast_variables([v.value for v in model.variables], root_rank=0)
        float(loss)


if __name__ == "__main__":
    by_hand(int(sys.argv[1]))
