"""MXNet: a task, and a loop with Horovod's own trainer. usage: STEPS."""

from __future__ import annotations

import sys
from typing import Any

import mxnet as mx
from mxnet import autograd, gluon
from vectors import LR, MOMENTUM, NUM_CLASSES, NUM_LAYERS, WIDTH, Vectors, batches

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


class Task:
    """The network for our loop."""

    def model(self) -> Any:
        """Return the network."""
        mx.random.seed(0)
        net = gluon.nn.HybridSequential()
        for _ in range(NUM_LAYERS):
            net.add(gluon.nn.Dense(WIDTH, activation="relu", in_units=WIDTH))
        net.add(gluon.nn.Dense(NUM_CLASSES, in_units=WIDTH))
        net.initialize()
        net.hybridize()
        return net

    def train_data(self) -> Vectors:
        """Return the vectors."""
        return Vectors()

    def loss(self, model: Any, batch: Any) -> Any:
        """Return the mean loss."""
        x, y = batch
        return LOSS(model(x), y).mean()


def by_hand(num_steps: int) -> None:
    """Train with Horovod alone."""
    import horovod.mxnet as hvd

    hvd.init()
    task = Task()
    net = task.model()
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    settings = {"learning_rate": LR * hvd.size(), "momentum": MOMENTUM}
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", settings)
    for x, y in batches(hvd.rank(), hvd.size(), num_steps):
        with autograd.record():
            loss = task.loss(net, (mx.nd.array(x), mx.nd.array(y)))
        loss.backward()
        trainer.step(1)
        loss.asscalar()


if __name__ == "__main__":
    by_hand(int(sys.argv[1]))
