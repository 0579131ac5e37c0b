"""Losses of JAX and TensorFlow are compared with those of one process on the joint batch."""

from __future__ import annotations

import pytest
from support.launching import PROGRAMS, cli, job_of_kind

pytestmark = pytest.mark.ranks
TOKENS = "It is a mean over something else than samples, such as tokens"
NEGATIVES = "It is not a mean over samples: it may compare samples with each other"


@pytest.mark.parametrize(
    ("task", "kind", "told"),
    [
        ("Jax", "tokens", TOKENS),
        pytest.param("Jax", "negatives", NEGATIVES, marks=pytest.mark.campaign),
        pytest.param("Jax", "samples", "", marks=pytest.mark.campaign),
        pytest.param("Jax", "dropout", "", marks=pytest.mark.campaign),
        ("TensorFlow", "tokens", TOKENS),
        pytest.param(
            "TensorFlow",
            "batch_norm",
            "normalizes over the samples of each rank: norm",
            marks=pytest.mark.campaign,
        ),
        pytest.param("TensorFlow", "samples", "", marks=pytest.mark.campaign),
        pytest.param("TensorFlow", "dropout", "", marks=pytest.mark.campaign),
    ],
)
def test_a_loss_that_is_not_a_mean_over_samples_is_told_once(tmp_path, task, kind, told):
    job = job_of_kind(tmp_path, task.lower(), f"{PROGRAMS / 'means.py'}:{task}", kind)
    output = " ".join(cli("run", str(job), cwd=tmp_path).stdout.split())

    assert told in output
    assert output.count("one process on the joint batch would train other weights") == bool(told)
