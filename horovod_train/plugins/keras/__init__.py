"""Keras 3 on Horovod, with the back ends TensorFlow, PyTorch and JAX.

back_ends/     differences between TensorFlow, PyTorch and JAX: exchange, devices, random generators
data.py        batches with sample weights for model.fit, and arrays that are split over ranks
framework.py   jobs: the replica, the task, and the check that ranks can average a loss
optimizer.py   optimizers that average gradients, and callbacks: initial state, exact metrics, learning rate

In a script:

    import keras
    from horovod_train.plugins.keras import BroadcastState, ExactMetrics, ShardedDataset, distribute, init

    ranks = init()
    model.compile(optimizer=distribute(keras.optimizers.SGD(0.01 * ranks.size), ranks), loss=...)
    data = ShardedDataset(ranks, x, y, batch_size=32)
    model.fit(data, epochs=10, callbacks=[BroadcastState(ranks), ExactMetrics(ranks)])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from horovod_train.config.support import FrameworkSupport, RefusedCallback
from horovod_train.plugins.frameworks import (
    SAVES_CHECKPOINTS,
    SETS_THE_RATE,
    attributes_in,
    compiles_itself,
    lacks_bfloat16,
    updates_at_once,
)

if TYPE_CHECKING:
    from horovod_train.plugins.keras.data import ShardedDataset
    from horovod_train.plugins.keras.optimizer import (
        BroadcastState,
        ExactMetrics,
        ScaledLearningRate,
        distribute,
        init,
    )


__all__ = ["BroadcastState", "ExactMetrics", "ScaledLearningRate", "ShardedDataset", "distribute", "init"]
__getattr__ = attributes_in(
    __name__,
    {
        "BroadcastState": "optimizer",
        "ExactMetrics": "optimizer",
        "ScaledLearningRate": "optimizer",
        "ShardedDataset": "data",
        "distribute": "optimizer",
        "init": "optimizer",
    },
)

CALLBACKS = {
    "ModelCheckpoint": SAVES_CHECKPOINTS,
    "OrbaxCheckpoint": SAVES_CHECKPOINTS,
    "BackupAndRestore": SAVES_CHECKPOINTS,
    "EarlyStopping": RefusedCallback(
        "restores the best weights at the end (restore_best_weights), without the optimizer state "
        "that belongs to them",
        "leave restore_best_weights out, and set checkpoint.best, which keeps the best checkpoint",
        lambda callback: callback.restore_best_weights,
    ),
    "LearningRateScheduler": SETS_THE_RATE,
    "ReduceLROnPlateau": SETS_THE_RATE,
    "SwapEMAWeights": RefusedCallback(
        "swaps averaged weights in for evaluations, so that checkpoints would contain these",
        "leave it out; the optimizer's use_ema saves the averages with its state",
    ),
}

SUPPORT = FrameworkSupport(
    f"{__name__}.framework:KerasFramework",
    ("keras",),
    "3.15.1",
    "model.fit",
    (*compiles_itself("Keras"), updates_at_once("Keras"), lacks_bfloat16("Keras")),
    note="on the tensorflow, torch and jax back ends (KERAS_BACKEND); no gradient norm",
    modules=frozenset({"keras"}),
    callbacks=CALLBACKS,
)
