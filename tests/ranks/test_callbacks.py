"""Callbacks that a user brings along are carried over a resume, reported, or refused."""

from __future__ import annotations

import json
import subprocess

import pytest
from support.launching import BIN, PROGRAMS, TIMEOUT_S, environment
from support.once import once

FRAMEWORKS = ["keras", "lightning", "transformers"]
pytestmark = pytest.mark.ranks
in_frameworks = pytest.mark.parametrize("framework", FRAMEWORKS)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What one process of each framework has found."""

    @once
    def run(framework):
        folder = tmp_path_factory.mktemp(framework)
        command = [str(BIN / "python"), str(PROGRAMS / "user_callbacks.py"), framework, str(folder)]
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads((folder / "found.json").read_text())

    return run


@in_frameworks
def test_a_resumed_job_ends_with_the_callbacks_and_weights_of_an_undisturbed_one(found, framework):
    undisturbed, resumed = found(framework)["undisturbed"], found(framework)["resumed"]

    assert resumed["state"] == undisturbed["state"]
    assert resumed["weights"] == undisturbed["weights"]
    assert resumed["metrics"] == undisturbed["metrics"]


@in_frameworks
def test_what_is_not_carried_over_is_named_before_training_starts(found, framework):
    unsaved = "state of callbacks that is not saved, and is reset on resume: Keeps.numbers (a count)"
    expected = {
        "keras": unsaved,
        "lightning": "methods of Module that a job does not call: configure_optimizers()",
        "transformers": unsaved,
    }[framework]

    (message,) = found(framework)["undisturbed"]["messages"]

    assert message.startswith(expected)


@in_frameworks
def test_state_of_callbacks_that_are_not_there_any_more_is_named(found, framework):
    message = found(framework)["without"]["messages"][-1]

    assert message.startswith(
        "the checkpoint has state of callbacks that the task does not return any more: Keeps 1"
    )


@in_frameworks
def test_weights_that_change_at_the_end_are_evaluated_and_reported(found, framework):
    ended = found(framework)["at the end"]

    assert not any(map(any, ended["weights"]))
    assert ended["metrics"]["loss"] == pytest.approx(1.0986123, abs=1e-6)  # ln 3: all classes are alike
    assert ended["messages"][-1].startswith("callbacks have changed the weights at the end of training")


@in_frameworks
def test_callbacks_that_do_what_a_job_does_are_refused(found, framework):
    refused = found(framework)["refused"]

    assert len(refused) == {"keras": 6, "lightning": 13, "transformers": 2}[framework]
    for name, message in refused.items():
        assert message.startswith(f"the callback {name} ")
        assert "hint: " in message


@in_frameworks
def test_a_learning_rate_that_a_callback_sets_ends_the_job(found, framework):
    message = found(framework)["rate"]

    assert message.startswith(
        "a callback or the model has set the learning rate to 0.5; the job had set it to 0.05"
    )
