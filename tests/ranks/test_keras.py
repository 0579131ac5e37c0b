"""A Keras model outlives its back end, its ranks and this product."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
from frameworks.cases import CASES, EPOCHS
from support.joint import train_jointly
from support.launching import BIN, PROGRAMS, cli, environment, on_horovod, write_job

from horovod_train.checkpoint.store import list_checkpoints, read_checkpoint
from horovod_train.frameworks.arrays import from_blob

ADAM = CASES[1]
# In an environment without this product, and on another back end than it was trained on.
LOAD = """
import sys
sys.modules["horovod_train"] = sys.modules["horovod"] = None
import keras, numpy as np
from frameworks.net import Samples, NUM_SAMPLES
model = keras.models.load_model("model.keras")
samples = Samples(NUM_SAMPLES, 1)
difference = np.abs(model.predict(samples.x, verbose=0) - np.load("expected.npy")).max()
assert difference < 1e-5, difference
assert isinstance(model.optimizer, keras.optimizers.Adam)
assert int(model.optimizer.iterations) == 10
model.fit(samples.x, samples.y, verbose=0)  # alone
"""
pytestmark = pytest.mark.ranks


def train(folder, *, epochs, back_end, controller):
    fields = ADAM.job("keras")
    job = write_job(
        folder / "job.yaml",
        **{**fields, "train": {**fields["train"], "epochs": epochs}},
        run_dir=str(folder / "runs"),
        launch={"num_ranks": 2, "controller": controller},
    )
    return cli("run", str(job), cwd=folder, PYTHONPATH=str(PROGRAMS), KERAS_BACKEND=back_end)


def test_trained_on_tensorflow_then_on_torch_then_on_jax_is_the_same_training(tmp_path):
    train(tmp_path, epochs=1, back_end="tensorflow", controller="mpi")
    second = train(tmp_path, epochs=2, back_end="torch", controller="gloo")
    third = train(tmp_path, epochs=EPOCHS, back_end="jax", controller="mpi")

    assert "resumed from" in second.stdout
    assert "resumed from" in third.stdout
    expected, _ = train_jointly(ADAM, 2, framework="keras")
    last = read_checkpoint(list_checkpoints(tmp_path / "runs" / "case" / "checkpoints")[0].path)
    found = {blob.shape: from_blob(blob) for blob in last.arrays["model"].values()}
    for array in expected.values():
        assert np.abs(found[array.shape] - array).max() <= ADAM.tolerance


def test_a_saved_model_loads_where_this_product_is_not_installed(tmp_path):
    on_horovod(2, "gloo", "keras_saved.py", str(tmp_path), env={"KERAS_BACKEND": "tensorflow"})

    loaded = subprocess.run(
        [str(BIN / "python"), "-c", LOAD],
        cwd=tmp_path,
        env=environment(KERAS_BACKEND="jax", PYTHONPATH=str(PROGRAMS)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert loaded.returncode == 0, loaded.stderr[-3000:]
