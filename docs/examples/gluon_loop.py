"""A gluon loop on any number of ranks.  usage: gluon_loop.py [BATCH_SIZE_PER_RANK]."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

from horovod_train.frameworks.reader import Shards
from horovod_train.plugins.mxnet import DistributedTrainer, broadcast, init

batch_size = int(sys.argv[1]) if len(sys.argv) > 1 else 32
ranks = init()
make = np.random.default_rng(0)
x = make.normal(size=(2000, 20)).astype("float32")
y = (x[:, :10].sum(1) > x[:, 10:].sum(1)).astype("float32")
mx.random.seed(0)
net = gluon.nn.Sequential()
net.add(gluon.nn.Dense(32, activation="relu", in_units=20), gluon.nn.Dense(2, in_units=32))
net.initialize()
broadcast(ranks, net.collect_params())
settings = {"learning_rate": 0.002 * batch_size * ranks.size, "momentum": 0.9}
trainer = DistributedTrainer(net.collect_params(), "sgd", ranks, settings)
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

for epoch in range(5):
    for weight, (inputs, labels) in Shards(ranks, x[:1600], y[:1600], batch_size=batch_size).epoch(epoch):
        with autograd.record():
            loss = loss_of(net(mx.nd.array(inputs)), mx.nd.array(labels)).mean() * weight
        loss.backward()
        trainer.step(1)  # the loss is a mean already

accuracy = float((net(mx.nd.array(x[1600:])).asnumpy().argmax(1) == y[1600:]).mean())
print(f"rank {ranks.rank} of {ranks.size}: accuracy {accuracy:.3f}", flush=True)
total = sum(float(abs(p.data().asnumpy()).sum()) for p in net.collect_params().values())
print(f"weights {total:.4f}", flush=True)
