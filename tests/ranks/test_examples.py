"""The examples of docs/examples train alone and on two ranks, and to the same weights."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support.launching import bin_of, environment, name_of, variables_of

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
FRAMEWORK_OF = {
    "tensorflow_loop": "tensorflow",
    "keras_fit on tensorflow": "keras on tensorflow",
    "keras_fit on torch": "keras on torch",
    "keras_fit on jax": "keras on jax",
    "jax_step": "jax",
    "lightning_module": "lightning",
    "transformers_trainer": "transformers",
    "gluon_loop": "mxnet",
}
pytestmark = pytest.mark.ranks


def run(launcher, example, batch_size, folder, env):
    framework = FRAMEWORK_OF[example]
    script = EXAMPLES / f"{name_of(example)}.py"
    command = [*launcher, "python", str(script), str(batch_size)]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(programs=bin_of(framework), **variables_of(framework), **env),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    accuracies = [float(found) for found in re.findall(r"rank \d of \d: accuracy ([\d.]+)", done.stdout)]
    weights = [float(found) for found in re.findall(r"weights ([\d.]+)", done.stdout)]
    return accuracies, weights


@pytest.mark.parametrize("example", FRAMEWORK_OF)
def test_trains_the_same_alone_and_on_two_ranks(example, tmp_path, matrix):
    matrix("in a script of your own, without a job", FRAMEWORK_OF[example])
    controller = "--mpi" if len(example) % 2 else "--gloo"
    [accuracy], [weights] = run([], example, 64, tmp_path, {})

    accuracies, of_ranks = run(["horovodrun", controller, "-np", "2"], example, 32, tmp_path, {})

    assert min(accuracy, *accuracies) > 0.85
    assert len(set(of_ranks)) == 1
    assert len(of_ranks) == len(accuracies) == 2
    assert of_ranks[0] == pytest.approx(weights, rel=1e-5)
    assert accuracies[0] == pytest.approx(accuracy, abs=0.004)


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_is_short(script):
    assert len(script.read_text().splitlines()) <= 40
