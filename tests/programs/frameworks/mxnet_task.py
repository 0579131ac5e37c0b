"""The network in MXNet's gluon."""

from __future__ import annotations

from typing import Any

import mxnet as mx
from frameworks.net import NumpyTask, start_weights
from mxnet.gluon import nn


class Task(NumpyTask):
    def model(self) -> Any:
        net = nn.Sequential()
        net.add(nn.Dense(16, in_units=6, activation="tanh"))
        net.add(nn.Dropout(self.dropout))
        net.add(nn.Dense(3, in_units=16))
        net.initialize()
        start = start_weights()
        for layer, kernel, bias in ((net[0], "w1", "b1"), (net[2], "w2", "b2")):
            layer.weight.set_data(mx.nd.array(start[kernel].T))
            layer.bias.set_data(mx.nd.array(start[bias]))
        return net

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return cross_entropy(model(x), y).mean()

    def metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        x, y = batch
        logits = model(x)
        return {
            "loss": cross_entropy(logits, y),
            "accuracy": logits.asnumpy().argmax(1) == y.asnumpy(),
        }


def cross_entropy(logits: Any, labels: Any) -> Any:
    """One value per sample. MXNet's own log_softmax is off by 3e-6, more than the tests allow."""
    return mx.nd.log(mx.nd.exp(logits).sum(axis=1)) - mx.nd.pick(logits, labels, axis=1)


def weights(replica: Any) -> list[Any]:
    w1, b1, w2, b2 = (p.data().asnumpy() for p in replica.model.collect_params().values())
    return [w1.T, b1, w2.T, b2]
