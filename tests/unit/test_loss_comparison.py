"""The comparison of losses, with replicas that compute them as they are told."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from support.worlds import on_ranks

from horovod_train.collectives.base import SingleRank
from horovod_train.config.schema import Job
from horovod_train.plugins.frameworks.variables import LossComparison

PARTS = [[3, 1, 8, 5, 4], [9, 2, 30, 17]]


class Reader:
    def batches_of(self, numbers, parts):
        return [numbers[part] for part in parts]


class Replica:
    batch_norm = ""

    def __init__(self, loss, is_random=False):
        self.loss, self.is_random, self.num_restored = loss, is_random, 0
        self.python_state = SimpleNamespace(restored=lambda **_: nullcontext(), read=set())

    def losses_of(self, batches):
        return [self.loss(batch) for batch in batches], "they are random" if self.is_random else ""


def compared(replica, batch_size=8, precision="fp32", world=None):
    job = Job.model_validate(
        {"name": "j", "task": "digits", "train": {"batch_size_per_rank": batch_size, "precision": precision}}
    )
    return LossComparison(world or SingleRank(), Reader(), replica, job)


def mean(batch):
    return sum(batch) / len(batch)


def over_tokens(batch):
    return sum(each * each for each in batch) / sum(batch)


@pytest.mark.parametrize("batch_size", [1, 2, 8, 100])
def test_a_mean_over_samples_is_equal(batch_size, caplog):
    assert compared(Replica(mean), batch_size).compare(1, PARTS) is None
    assert not caplog.text


@pytest.mark.parametrize(
    ("loss", "batch_norm", "text"),
    [
        (over_tokens, "", "a mean over something else than samples"),
        (len, "", "It is not a mean over samples"),
        (sum, "", "It is not a mean over samples"),
        (over_tokens, "norm", "normalizes over the samples of each rank: norm"),
    ],
)
def test_another_loss_is_told_once(loss, batch_norm, text, caplog):
    replica = Replica(lambda batch: float(loss(batch)))
    replica.batch_norm = batch_norm
    comparison = compared(replica)

    found = [comparison.compare(step, PARTS) for step in (1, 2)]

    assert found[0] == found[1]
    assert found[0].startswith("step 1: the loss of 8 samples is ")
    assert text in found[0]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("precision", "is_told"), [("fp32", True), ("bf16", False)])
def test_rounding_is_that_of_the_precision(precision, is_told):
    comparison = compared(Replica(lambda batch: 1.0 + 1e-3 * (len(batch) > 4)), precision=precision)

    assert (comparison.compare(1, PARTS) is not None) == is_told


def test_a_random_loss_is_not_compared_and_nobody_is_told(caplog):
    assert "they are random" in compared(Replica(over_tokens, is_random=True)).compare(1, PARTS)
    assert not caplog.text


def test_a_loss_that_is_not_finite_is_no_result():
    assert compared(Replica(lambda _: float("nan"))).compare(1, PARTS) == ""


def test_a_loss_that_fails_with_few_samples_ends_the_comparison_and_not_the_job(caplog):
    def loss(batch):
        raise ValueError("8 samples, please")

    assert "ValueError: 8 samples, please" in compared(Replica(loss)).compare(1, PARTS)
    assert "ValueError" in caplog.text


@pytest.mark.parametrize("differs", [0, 1])
def test_ranks_whose_numbers_differ_decide_alike(differs):
    """One of them would go on alone into the next comparison, and wait for the others."""

    def act(world):
        other = 0.5 * (world.rank == differs)
        comparison = compared(Replica(lambda batch: 1.0 + other * (len(batch) > 4)), world=world)
        return [(comparison.compare(step, PARTS) is not None) for step in (1, 2)]

    assert on_ranks(2, act) == [[differs == 0] * 2] * 2
