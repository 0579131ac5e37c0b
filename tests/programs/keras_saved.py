"""On every rank: train a Keras model with a distributed optimizer; rank 0 saves it. usage: OUT_FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import numpy as np
from frameworks.keras_task import Task

from horovod_train.plugins.keras import distribute, init

folder = Path(sys.argv[1])
ranks = init()
task = Task()
model = task.model()
model.compile(optimizer=distribute(keras.optimizers.Adam(0.01), ranks), **task.compile())
data = task.train_data()
mine = slice(ranks.rank, None, ranks.size)
model.fit(data.x[mine], data.y[mine], batch_size=5, epochs=2, shuffle=False, verbose=0)
if ranks.rank == 0:
    model.save(folder / "model.keras")
    np.save(folder / "expected.npy", model.predict(data.x, verbose=0))
ranks.close()
