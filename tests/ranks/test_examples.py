"""The examples of docs/examples train alone and on two ranks, and to the same weights."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support.launching import BIN, TIMEOUT_S, environment, name_of
from support.pools import CONTROLLERS

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


def in_a_fresh_process(script, batch_size, folder):
    """For a library that remembers for the life of a process how many there are."""
    return subprocess.run(
        [str(BIN / "python"), str(script), str(batch_size), str(folder / "checkpoints")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    ).stdout


def run(pools, framework, example, batch_size, folder, *, alone):
    script = EXAMPLES / f"{name_of(example)}.py"
    if framework == "transformers" and alone:
        output = in_a_fresh_process(script, batch_size, folder)
    else:
        pool = pools.get(framework, 2, CONTROLLERS[framework])
        arguments = [str(folder / "checkpoints")] if framework == "transformers" else []
        answers = pool.run(script, str(batch_size), *arguments, folder=folder, alone=alone)
        output = "".join(rank["output"] for rank in answers)
    accuracies = [float(found) for found in re.findall(r"rank \d of \d: accuracy ([\d.]+)", output)]
    weights = [float(found) for found in re.findall(r"weights ([\d.]+)", output)]
    return accuracies, weights


@pytest.mark.parametrize(
    ("framework", "example"), [(framework, example) for example, framework in FRAMEWORK_OF.items()]
)
def test_trains_the_same_alone_and_on_two_ranks(example, framework, tmp_path, pools, matrix):
    matrix("usable in a script, without a job", framework)
    [accuracy], [weights] = run(pools, framework, example, 64, tmp_path, alone=True)

    accuracies, of_ranks = run(pools, framework, example, 32, tmp_path, alone=False)

    assert min(accuracy, *accuracies) > 0.85
    assert len(set(of_ranks)) == 1
    assert len(of_ranks) == len(accuracies) == 2
    assert of_ranks[0] == pytest.approx(weights, rel=1e-5)
    # Weights that differ in the last bits put a sample or two of 360 on the other side.
    assert accuracies[0] == pytest.approx(accuracy, abs=0.01)


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_is_short(script):
    assert len(script.read_text().splitlines()) <= 40
