"""model.fit on any number of ranks, on any back end.  usage: keras_fit.py [BATCH_SIZE_PER_RANK]."""

import sys

import keras
from sklearn.datasets import load_digits

from horovod_train.plugins.keras import (
    BroadcastState,
    ExactMetrics,
    ScaledLearningRate,
    ShardedDataset,
    distribute,
    init,
)

batch_size = int(sys.argv[1]) if len(sys.argv) > 1 else 32
ranks = init()
x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
model.compile(
    optimizer=distribute(keras.optimizers.SGD(momentum=0.9), ranks),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
rate = ScaledLearningRate(ranks, batch_size_per_rank=batch_size, epochs=5, base_lr=0.064, warmup=1)
model.fit(
    ShardedDataset(ranks, x[:1500], y[:1500], batch_size=batch_size),
    validation_data=ShardedDataset(ranks, x[1500:], y[1500:], batch_size=64, shuffle=False),
    epochs=5,
    callbacks=[BroadcastState(ranks), ExactMetrics(ranks), rate],
    verbose=2 if ranks.rank == 0 else 0,
)
accuracy = float((model.predict(x[1500:], verbose=0).argmax(1) == y[1500:]).mean())
print(f"rank {ranks.rank} of {ranks.size}: accuracy {accuracy:.3f}", flush=True)
print(f"weights {sum(float(abs(w).sum()) for w in model.get_weights()):.4f}", flush=True)
