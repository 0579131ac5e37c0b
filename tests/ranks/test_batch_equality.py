"""Ranks with batch b train like one process with the joint batch, and all hold one truth."""

from __future__ import annotations

import pytest
import torch
from programs.cases import CASES, Task
from support.launching import results
from support.reference import joint_batch_weights

WORLDS = [
    (2, "mpi"),
    pytest.param((2, "gloo"), marks=pytest.mark.campaign),
    pytest.param((3, "mpi"), marks=pytest.mark.campaign),
    (3, "gloo"),
    pytest.param((4, "mpi"), marks=pytest.mark.campaign),
    pytest.param((4, "gloo"), marks=pytest.mark.campaign),
]


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world[0]} ranks {world[1]}")
def trained(request, pools, tmp_path_factory):
    num_ranks, controller = request.param
    folder = tmp_path_factory.mktemp("trained")
    pools.get("torch", num_ranks, controller).run("batch_equality.py", str(folder), folder=folder)
    found = results(folder)
    assert len(found) == num_ranks
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestEveryWayToTrain:
    def test_gives_the_weights_of_one_process_with_the_joint_batch(self, trained, case):
        expected, _ = joint_batch_weights(case, len(trained))

        weights = torch.tensor(trained[0][case.name]["weights"], dtype=torch.float64)

        assert float((weights - expected).abs().max()) <= case.tolerance

    def test_moves_the_weights_much_further_than_that(self, trained, case):
        task = Task(**case.task_args)
        start = torch.cat([p.detach().double().flatten() for p in task.model().parameters()])

        weights = torch.tensor(trained[0][case.name]["weights"], dtype=torch.float64)

        assert float((weights - start).abs().max()) > 3 * case.tolerance

    def test_leaves_all_ranks_with_the_same_bits(self, trained, case):
        first = trained[0][case.name]["fingerprints"]

        assert all(rank[case.name]["fingerprints"] == first for rank in trained)

    def test_is_evaluated_exactly(self, trained, case):
        _, expected = joint_batch_weights(case, len(trained))

        for rank in trained:
            metrics = rank[case.name]["metrics"]
            assert metrics == trained[0][case.name]["metrics"]
            if case.tolerance <= 1e-6:
                assert metrics["accuracy"] == expected["accuracy"]
                assert metrics["loss"] == pytest.approx(expected["loss"], abs=2e-6)
