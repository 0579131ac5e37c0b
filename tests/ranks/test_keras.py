"""A Keras model outlives its back end, its ranks and this product."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
from frameworks.cases import CASES, EPOCHS
from safetensors.numpy import load_file
from support.joint import largest_difference, train_jointly
from support.launching import BIN, PROGRAMS, TIMEOUT_S, cli, environment, write_job
from support.pools import CONTROLLERS

from horovod_train.checkpoint.store import list_checkpoints, read_checkpoint
from horovod_train.frameworks.plain_data import from_blob

ADAM = CASES[1]
BACK_ENDS = ("keras on tensorflow", "keras on torch", "keras on jax")
assert len(BACK_ENDS) == EPOCHS
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


class Relay:
    """One training, each epoch on the ranks of another back end.

    Args:
        folder: Where it is.
        pools: Ranks of all back ends.
    """

    def __init__(self, folder, pools):
        self.folder, self.pools, self.said = folder, pools, []

    def train(self, epochs):
        """Train up to so many epochs; those that were trained already are not trained again."""
        while len(self.said) < epochs:
            framework, fields = BACK_ENDS[len(self.said)], ADAM.job("keras")
            job = write_job(
                self.folder / "job.yaml",
                **{**fields, "train": {**fields["train"], "epochs": len(self.said) + 1}},
                run_dir=str(self.folder / "runs"),
                launch={"num_ranks": 2, "controller": CONTROLLERS[framework]},
            )
            pool = self.pools.get(framework, 2, CONTROLLERS[framework])
            self.said.append(pool.run("run_job.py", str(job), folder=self.folder)[0]["output"])


@pytest.fixture(scope="session")
def relay(tmp_path_factory, pools):
    return Relay(tmp_path_factory.mktemp("relay"), pools)


@pytest.mark.parametrize("framework", BACK_ENDS)
def test_trained_on_tensorflow_then_on_torch_then_on_jax_is_the_same_training(framework, relay, pools):
    del pools  # named so that this test comes among those of the back end's pool
    epochs = BACK_ENDS.index(framework) + 1
    relay.train(epochs)

    assert ["resumed from" in said for said in relay.said] == [number > 0 for number in range(epochs)]
    if epochs == EPOCHS:
        expected, _ = train_jointly(ADAM, 2, framework="keras")
        last = read_checkpoint(list_checkpoints(relay.folder / "runs" / "case" / "checkpoints")[0].path)
        found = {blob.shape: from_blob(blob) for blob in last.arrays["model"].values()}
        for array in expected.values():
            assert np.abs(found[array.shape] - array).max() <= ADAM.tolerance


@pytest.mark.parametrize("framework", ["keras on tensorflow"])
def test_a_saved_model_loads_where_this_product_is_not_installed(framework, pools, tmp_path):
    pool = pools.get(framework, 2, CONTROLLERS[framework])
    pool.run("keras_saved.py", str(tmp_path), folder=tmp_path)

    loaded = subprocess.run(
        [str(BIN / "python"), "-c", LOAD],
        cwd=tmp_path,
        env=environment(KERAS_BACKEND="jax", PYTHONPATH=str(PROGRAMS)),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    assert loaded.returncode == 0, loaded.stderr[-3000:]


def difference_of_weights(folder):
    """The largest difference of kernel and bias between a program without a job and the job ``test``."""
    path = list_checkpoints(folder / "runs" / "test" / "checkpoints")[0].path
    with np.load(folder / "plain.npz") as found:
        expected = [found[name] for name in found.files]
    weights = {
        name.rpartition("/")[2]: value for name, value in load_file(path / "model.safetensors").items()
    }
    return largest_difference([weights["kernel"], weights["bias"]], expected)


@pytest.mark.parametrize("length", [{"epochs": 3}, {"max_steps": 18}])
def test_averages_of_the_optimizer_replace_the_weights_once_at_the_end(tmp_path, length):
    """A job calls ``fit`` in each epoch, and Keras replaces them at the end of each ``fit``."""
    program = PROGRAMS / "keras_averaged.py"
    subprocess.run(
        [BIN / "python", program, tmp_path / "plain.npz"], env=environment(), check=True, timeout=TIMEOUT_S
    )
    job = write_job(
        tmp_path / "job.yaml",
        framework="keras",
        task=f"{program}:Averaged",
        run_dir=str(tmp_path / "runs"),
        train={**length, "batch_size_per_rank": 2},
        optimizer={"args": {"use_ema": True, "ema_momentum": 0.8}},
        data={"shuffle": False},
        lr={"base_lr": 0.1, "scaling": "none"},
        launch={"num_ranks": 2, "threads_per_rank": 1},
    )
    assert "epoch 2 of 3" in cli("run", str(job), cwd=tmp_path).stdout
    assert difference_of_weights(tmp_path) <= 1e-6


@pytest.mark.parametrize(
    "back_end", ["tensorflow", *[pytest.param(e, marks=pytest.mark.campaign) for e in ("torch", "jax")]]
)
def test_weights_of_tokens_train_as_in_one_process(tmp_path, back_end):
    """The last of six steps has fewer samples than the others."""
    program, variables = PROGRAMS / "keras_tokens.py", environment(KERAS_BACKEND=back_end)
    subprocess.run(
        [BIN / "python", program, tmp_path / "plain.npz"], env=variables, check=True, timeout=TIMEOUT_S
    )
    job = write_job(
        tmp_path / "job.yaml",
        framework="keras",
        task=f"{program}:Tokens",
        run_dir=str(tmp_path / "runs"),
        train={"epochs": 2, "batch_size_per_rank": 2},
        optimizer={"name": "sgd"},
        data={"shuffle": False},
        lr={"base_lr": 0.5, "scaling": "none"},
        launch={"num_ranks": 2, "threads_per_rank": 1},
    )
    cli("run", str(job), cwd=tmp_path, KERAS_BACKEND=back_end)
    assert difference_of_weights(tmp_path) <= 1e-6
