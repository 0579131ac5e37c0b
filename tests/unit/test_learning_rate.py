"""The learning rate follows its formula at every point of a job."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_train.config.optimization import LearningRate
from horovod_train.lr.policy import LearningRatePolicy


def rates(global_batch=256, total=10.0, at=(), **fields):
    policy = LearningRatePolicy(LearningRate(**fields), global_batch, total)
    return [policy.at(epochs) for epochs in at]


BASE = {"base_lr": 0.1, "reference_batch_size": 32}


@pytest.mark.parametrize(("scaling", "peak"), [("linear", 0.8), ("sqrt", 0.1 * math.sqrt(8)), ("none", 0.1)])
def test_the_peak_follows_the_global_batch(scaling, peak):
    assert rates(at=[0.0], scaling=scaling, **BASE) == [pytest.approx(peak)]


def test_the_published_recipe_for_imagenet_in_one_hour_comes_out():
    """0.1 at batch 256 becomes 3.2 at batch 8192, reached after 5 epochs (arXiv:1706.02677)."""
    found = rates(
        8192,
        90,
        [0, 2.5, 5, 29.99, 30, 60, 80],
        base_lr=0.1,
        reference_batch_size=256,
        warmup=5,
        decay="step",
        decay_args={"milestones": [30, 60, 80], "gamma": 0.1},
    )

    assert found == pytest.approx([0.1, 1.65, 3.2, 3.2, 0.32, 0.032, 0.0032])


def test_warm_up_is_a_straight_line_from_the_base_rate():
    assert rates(at=[0, 1, 2, 3, 4], warmup=4, **BASE) == pytest.approx([0.1, 0.275, 0.45, 0.625, 0.8])


def test_warm_up_can_start_elsewhere():
    assert rates(at=[0, 2], warmup=4, warmup_start_lr=0.0, **BASE) == pytest.approx([0.0, 0.4])


def test_a_batch_below_the_reference_never_exceeds_its_peak():
    assert max(rates(8, at=[0, 1, 2, 3], warmup=2, **BASE)) == pytest.approx(0.025)


def test_cosine_falls_along_half_a_wave():
    found = rates(32, 10, [0, 5, 10, 12], decay="cosine", decay_args={"end_factor": 0.1}, **BASE)

    assert found == pytest.approx([0.1, 0.055, 0.01, 0.01])


def test_polynomial_falls_with_its_power_from_the_end_of_warm_up():
    found = rates(32, 12, [2, 7, 12], decay="polynomial", decay_args={"power": 2.0}, warmup=2, **BASE)

    assert found == pytest.approx([0.1, 0.025, 0.0])


@pytest.mark.parametrize("decay", ["constant", "cosine", "polynomial"])
def test_a_job_of_warm_up_only_has_no_division_by_zero(decay):
    assert all(math.isfinite(rate) for rate in rates(at=[0, 5, 10], warmup=10, decay=decay, **BASE))


@given(
    st.sampled_from(["constant", "cosine", "polynomial"]),
    st.floats(0, 10),
    st.integers(1, 100_000),
    st.floats(0, 10),
)
def test_the_rate_stays_between_zero_and_peak_and_base(decay, warmup, batch, epochs):
    section = LearningRate(decay=decay, warmup=warmup, **BASE)
    policy = LearningRatePolicy(section, batch, 10)

    assert 0 <= policy.at(epochs) <= max(policy.peak_lr, section.base_lr) * (1 + 1e-12)
