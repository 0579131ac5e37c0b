"""Keras 3 on Horovod, on its TensorFlow, PyTorch and JAX back ends.

collectives.py the ranks, for the back end that Keras uses
back_ends/     what differs between TensorFlow, PyTorch and JAX: the sum over ranks, devices, generators
optimizer.py   an optimizer that applies the mean gradient of all ranks
dataset.py     arrays, shared out among the ranks
feed.py        the shard rule as a stream of batches
stream.py      the stream as a dataset of TensorFlow's
callbacks.py   equal weights at the start, exact metrics, the learning rate
framework.py   makes everything for a job
replica.py     a model as the rest of the product sees it
task.py        what a user brings

For a script of your own:

    import keras
    from horovod_train.frameworks.keras import BroadcastState, ExactMetrics, ShardedDataset, distribute, init

    ranks = init()
    model.compile(optimizer=distribute(keras.optimizers.SGD(0.01 * ranks.size), ranks), loss=...)
    data = ShardedDataset(ranks, x, y, batch_size=32)
    model.fit(data, epochs=10, callbacks=[BroadcastState(ranks), ExactMetrics(ranks)])
"""

from horovod_train.frameworks.keras.callbacks import BroadcastState, ExactMetrics, ScaledLearningRate
from horovod_train.frameworks.keras.collectives import init
from horovod_train.frameworks.keras.dataset import ShardedDataset
from horovod_train.frameworks.keras.optimizer import distribute

__all__ = ["BroadcastState", "ExactMetrics", "ScaledLearningRate", "ShardedDataset", "distribute", "init"]
