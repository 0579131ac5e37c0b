"""Every framework, on ranks with batch b, trains like one process with the joint batch."""

from __future__ import annotations

import numpy as np
import pytest
from frameworks.cases import CAN_FP16_ON_CPU, NOT_A_NUMBER, OVERFLOW, OVERFLOWING, cases_of
from frameworks.net import start_weights
from support.joint import train_jointly
from support.launching import bin_of, on_horovod, results

WORLDS = [
    (2, "mpi"),
    (3, "gloo"),
    pytest.param((2, "gloo"), marks=pytest.mark.campaign),
    pytest.param((3, "mpi"), marks=pytest.mark.campaign),
]
FRAMEWORKS = {
    "tensorflow": {},
    "keras on tensorflow": {"KERAS_BACKEND": "tensorflow"},
    "keras on torch": {"KERAS_BACKEND": "torch"},
    "keras on jax": {"KERAS_BACKEND": "jax"},
    "jax": {},
    "torch": {},
    "lightning": {},
    "transformers": {},
    "mxnet": {},
}
pytestmark = pytest.mark.ranks


def largest_difference(found, expected):
    flat = [np.asarray(array) for array in found]
    return max(float(np.abs(a - e.ravel()).max()) for a, e in zip(flat, expected.values(), strict=True))


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world[0]} ranks {world[1]}")
def world(request):
    return request.param


@pytest.fixture(scope="module", params=FRAMEWORKS)
def framework(request):
    return request.param


@pytest.fixture(scope="module")
def name(framework):
    return framework.partition(" ")[0]


@pytest.fixture(scope="module")
def trained(world, framework, name, tmp_path_factory):
    num_ranks, controller = world
    folder = tmp_path_factory.mktemp("trained")
    on_horovod(
        num_ranks,
        controller,
        "train_cases.py",
        name,
        str(folder),
        env=FRAMEWORKS[framework],
        programs=bin_of(name),
    )
    found = results(folder)
    assert len(found) == num_ranks
    return found


def test_weights_are_those_of_one_process_with_the_joint_batch(trained, name):
    for case in cases_of(name):
        expected, _ = train_jointly(case, len(trained), framework=name)

        found = trained[0][case.name]

        assert not found["error"]
        assert largest_difference(found["weights"], expected) <= case.tolerance, case.name
        assert largest_difference(found["weights"], start_weights()) > 10 * case.tolerance, case.name


def test_all_ranks_hold_the_same_bits(trained):
    for case in trained[0]:
        first = trained[0][case]["fingerprints"]

        assert all(rank[case]["fingerprints"] == first for rank in trained), case


def test_evaluation_is_exact(trained, name):
    for case in cases_of(name):
        _, expected = train_jointly(case, len(trained), framework=name)

        for rank in trained:
            found = rank[case.name]["metrics"]
            assert found == trained[0][case.name]["metrics"]
            if case.precision == "fp32":
                assert found["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-7)
                assert found["loss"] == pytest.approx(expected["loss"], abs=2e-6)


def test_an_overflow_on_one_rank_skips_that_step_on_all(trained, name):
    if name not in CAN_FP16_ON_CPU:
        reason = trained[0][OVERFLOW.name]["refused"]
        assert "has no fp16 on a CPU" in reason or "train.precision cannot be had" in reason
        return
    expected, _ = train_jointly(OVERFLOW, len(trained), framework=name, huge=OVERFLOWING, skipped=[0])

    for rank in trained:
        assert not rank[OVERFLOW.name]["error"]
        assert largest_difference(rank[OVERFLOW.name]["weights"], expected) <= OVERFLOW.tolerance


def test_a_loss_that_is_not_a_number_on_one_rank_ends_all_with_its_name(trained):
    for rank in trained:
        assert "step 1: the loss is nan because of rank 1" in rank[NOT_A_NUMBER.name]["error"]
