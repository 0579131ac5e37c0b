"""Under each strategy ranks train like one process with the joint batch: in 64 bits, in 32 and in 16."""

from __future__ import annotations

import pytest
import torch
from programs.strategy_cases import CASES
from programs.strategy_references import expected
from support.launching import results
from support.once import once

WORLDS = [(2, "mpi"), (2, "gloo"), (4, "mpi"), (4, "gloo")]
TRAINED = [
    pytest.param(world, way, id=f"{way.name}-{world[0]} ranks {world[1]}", marks=marks)
    for world in WORLDS
    for way in CASES
    for marks in [[] if world == WORLDS[0] and not way.is_long else [pytest.mark.campaign]]
    if way.runs_on(*world)
]


GROUP_SIZE = 10
"""Ways that ranks train in one after the other: what takes longer than a time limit tells nothing."""


def group_of(way):
    """The names of the ways that ranks train in together with one, which is among them."""
    alike = [each.name for each in CASES if each.is_long == way.is_long]
    start = alike.index(way.name) // GROUP_SIZE * GROUP_SIZE
    return tuple(alike[start : start + GROUP_SIZE])


@pytest.fixture(scope="module")
def trained_on(pools, tmp_path_factory):
    """What ranks of a world have written, who have trained in a way; each group of ways is trained once."""

    @once
    def trained(world, names):
        num_ranks, controller = world
        folder = tmp_path_factory.mktemp("trained")
        pools.get("torch", num_ranks, controller).run("strategies.py", str(folder), *names, folder=folder)
        found = results(folder)
        assert len(found) == num_ranks
        return found

    return lambda world, way: trained(world, group_of(way))


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "way"), TRAINED)
class TestEveryStrategy:
    def test_gives_the_weights_of_one_process_with_the_joint_batch(self, trained_on, world, way, matrix):
        for strategy in [way.strategy, *([way.then] if way.then else [])] if world == WORLDS[0] else ():
            for feature in way.features:
                matrix(feature, strategy["name"])
        weights_expected, _ = expected(way, world[0])
        start = torch.cat([p.detach().flatten() for p in way.make_task().model().parameters()])

        for rank in trained_on(world, way):
            weights = torch.tensor(rank[way.name]["weights"], dtype=torch.float64)
            assert float((weights - weights_expected).abs().max()) <= way.tolerance
        assert float((weights_expected - start).abs().max()) > max(1e-3, 15 * way.tolerance)

    def test_sees_a_weight_that_is_not_finite(self, trained_on, world, way):
        ranks = [rank[way.name] for rank in trained_on(world, way)]

        assert all(rank["finite"] for rank in ranks)
        assert not ranks[-1]["finite_when_spoiled"]

    def test_is_evaluated_exactly(self, trained_on, world, way, matrix):
        if world == WORLDS[0]:
            matrix("evaluated exactly", way.strategy["name"])
        _, loss_expected = expected(way, world[0])

        for rank in trained_on(world, way):
            assert rank[way.name]["metrics"]["loss"] == pytest.approx(loss_expected, abs=2 * way.tolerance)
