"""Keras 3 on Horovod, with the back ends TensorFlow, PyTorch and JAX.

back_ends/     differences between TensorFlow, PyTorch and JAX: exchange, devices, random generators
optimizer.py   optimizers that average gradients over ranks
losses.py      check that ranks can average a loss
dataset.py     arrays, split over ranks
feed.py        batches with sample weights, for model.fit
stream.py      batches as a dataset of TensorFlow
callbacks.py   broadcast of the initial state, exact metrics, learning rate

In a script:

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
