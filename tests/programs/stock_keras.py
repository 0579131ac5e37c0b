"""A script in the style of Horovod's documentation for Keras: under Keras 3, ranks would train apart."""

import sys
from importlib import import_module

import keras
import numpy as np

hvd = import_module(sys.argv[1])  # horovod.keras or horovod.tensorflow.keras
hvd.init()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size()))
model.compile(loss="mse", optimizer=optimizer)
x = np.random.default_rng(hvd.rank()).normal(size=(32, 4)).astype("float32")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
model.fit(x, x[:, :2], epochs=1, verbose=0, callbacks=callbacks)
print("trained", model.get_weights()[0].sum())
