"""Who reads which sample: every sample once, for any world and any interruption."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_train.data.shard import (
    EvalMicroBatches,
    InOrder,
    PlannedSteps,
    StepsOfEpoch,
    epoch_order,
    num_steps,
    share_of_step,
    split_evenly,
)
from horovod_train.frameworks.reader import Shards

worlds = st.integers(1, 64)
sizes = st.integers(1, 3000)
batches = st.integers(1, 64)
accumulations = st.integers(1, 5)


def world_steps(num_samples, cursor, batch, accumulation, size):
    """The steps of every rank, as a list of tuples: one tuple per step, one entry per rank."""
    ranks = [
        list(
            StepsOfEpoch(
                num_samples=num_samples,
                cursor=cursor,
                batch_size_per_rank=batch,
                accumulation_steps=accumulation,
                rank=rank,
                size=size,
            )
        )
        for rank in range(size)
    ]
    return list(zip(*ranks, strict=True))


def places(step):
    """The places of a step's samples, over all ranks."""
    return [p for share in step for micro in share.micro_batches for p in range(micro.start, micro.stop)]


@given(sizes, batches, accumulations, worlds)
def test_an_epoch_visits_every_sample_exactly_once(num_samples, batch, accumulation, size):
    steps = world_steps(num_samples, 0, batch, accumulation, size)

    assert sorted(p for step in steps for p in places(step)) == list(range(num_samples))


@given(sizes, batches, batches, accumulations, worlds, worlds, st.data())
@settings(max_examples=200)
def test_an_epoch_interrupted_and_resumed_in_another_world_visits_every_sample_exactly_once(
    num_samples, batch, other_batch, accumulation, size, other_size, data
):
    before = world_steps(num_samples, 0, batch, accumulation, size)
    made = data.draw(st.integers(0, len(before)))
    cursor = sum(step[0].num_samples for step in before[:made])

    after = world_steps(num_samples, cursor, other_batch, accumulation, other_size)

    visited = Counter(p for step in [*before[:made], *after] for p in places(step))
    assert visited == Counter(range(num_samples))


@given(sizes, batches, accumulations, worlds)
def test_ranks_make_the_same_steps_as_one_rank_with_the_joint_batch(num_samples, batch, accumulation, size):
    steps = world_steps(num_samples, 0, batch, accumulation, size)
    alone = world_steps(num_samples, 0, batch * accumulation * size, 1, 1)

    assert [sorted(places(step)) for step in steps] == [places(step) for step in alone]


@given(sizes, batches, accumulations, worlds)
def test_the_shares_of_a_step_add_up_to_one(num_samples, batch, accumulation, size):
    for step in world_steps(num_samples, 0, batch, accumulation, size):
        assert abs(sum(micro.share for share in step for micro in share.micro_batches) - 1) < 1e-9


@given(sizes, batches, accumulations, worlds)
def test_no_micro_batch_is_empty_or_larger_than_asked_for(num_samples, batch, accumulation, size):
    for step in world_steps(num_samples, 0, batch, accumulation, size):
        for share in step:
            assert all(1 <= len(micro) <= batch for micro in share.micro_batches)
            assert len(share.micro_batches) <= accumulation


@given(sizes, st.integers(2, 64), accumulations, worlds)
def test_a_lone_sample_is_trained_on_only_where_a_step_has_no_other(num_samples, batch, accumulation, size):
    for step in world_steps(num_samples, 0, batch, accumulation, size):
        lone = [micro for share in step for micro in share.micro_batches if len(micro) == 1]
        assert not lone or batch == 2 or step[0].num_samples == 1


@given(sizes, st.integers(1, 500), st.data())
def test_the_number_of_steps_is_known_before(num_samples, global_batch, data):
    cursor = data.draw(st.integers(0, num_samples))

    assert num_steps(num_samples, cursor, global_batch) == len(
        world_steps(num_samples, cursor, global_batch, 1, 1)
    )


@given(st.integers(0, 10_000), worlds)
def test_pieces_of_a_split_differ_by_at_most_one(num_samples, size):
    lengths = [stop - start for start, stop in (split_evenly(num_samples, r, size) for r in range(size))]

    assert sum(lengths) == num_samples
    assert max(lengths) - min(lengths) <= 1


def test_the_order_is_a_permutation_that_changes_with_epoch_and_seed():
    orders = [epoch_order(100, seed, epoch, shuffle=True) for seed in (0, 1) for epoch in (0, 1)]

    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


@given(sizes, st.data())
def test_the_order_without_shuffling_is_natural(num_samples, data):
    order = epoch_order(num_samples, 1, 1, shuffle=False)
    start, stop = (data.draw(st.integers(0, num_samples + 9)) for _ in range(2))

    assert len(order) == num_samples
    assert order[start:stop].tolist() == list(range(num_samples))[start:stop]


def one_after_the_other(num_samples, cursor, batch_size_at, **more):
    """The steps of an epoch, each from the cursor that the step before has left."""
    steps = []
    while cursor < num_samples:
        taken = min(batch_size_at(cursor), num_samples - cursor)
        steps.append(share_of_step(cursor, taken, **more))
        cursor += taken
    return steps


@given(sizes, batches, accumulations, worlds, st.booleans(), st.data())
def test_each_step_of_an_epoch_is_known_without_those_before(
    num_samples, batch, accumulation, size, equal, data
):
    cursor, rank = data.draw(st.integers(0, num_samples)), data.draw(st.integers(0, size - 1))
    full = data.draw(st.integers(1, batch * accumulation * size))
    most = data.draw(st.none() | st.integers(0, 9))
    growth = data.draw(st.none() | st.integers(1, 2 * num_samples))

    def batch_size_at(at):
        return full if growth is None else min(full, 1 + at * full // growth)

    ways = {"accumulation_steps": accumulation, "rank": rank, "size": size, "equal_micro_batches": equal}
    steps = StepsOfEpoch(
        num_samples=num_samples, cursor=cursor, batch_size_per_rank=batch, max_steps=most,
        global_batch_size=full,
        batch_size_at=None if growth is None else batch_size_at, **ways,
    )  # fmt: skip

    expected = one_after_the_other(num_samples, cursor, batch_size_at, batch_size=batch, **ways)[:most]
    assert len(steps) == len(expected)
    assert list(steps) == expected
    assert list(reversed(steps)) == expected[::-1]
    assert steps[1:3] == expected[1:3]
    if expected:
        assert steps[-1] == expected[-1]


@given(sizes, batches, worlds)
def test_an_evaluation_reads_each_sample_on_one_rank(num_samples, batch, size):
    parts = [EvalMicroBatches(num_samples, batch, rank, size) for rank in range(size)]

    read = [p for mine in parts for micro in mine for p in range(micro.start, micro.stop)]
    assert read == list(range(num_samples))
    assert all(1 <= len(micro) <= batch for mine in parts for micro in mine)
    assert all(len(mine) == len(list(mine)) for mine in parts)


def test_an_epoch_of_any_length_costs_nothing_until_it_is_read():
    """A list of its steps would take gigabytes."""
    tracemalloc.start()
    try:
        steps = StepsOfEpoch(
            num_samples=10**12, cursor=10**11, batch_size_per_rank=32, accumulation_steps=1, rank=3, size=8
        )
        planned = PlannedSteps(steps, lambda pieces: (InOrder(10**12)[p.start : p.stop] for p in pieces))
        evaluated = EvalMicroBatches(10**12, 32, 3, 8)
        (_, batch), *_ = planned[0]
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(planned) == 9 * 10**11 // 256
    assert len(evaluated) == 10**12 // 8 // 32
    assert batch.tolist() == list(range(10**11 + 96, 10**11 + 128))
    assert most_bytes < 10**5


def test_the_order_never_changes_between_releases():
    """A half-used epoch of an old checkpoint has to go on in its order. The literal is MT19937's."""
    expected = np.random.RandomState(np.array([3, 2])).permutation(8)

    assert np.array_equal(epoch_order(8, 3, 2, shuffle=True), expected)
    assert epoch_order(8, 3, 2, shuffle=True).tolist() == [3, 7, 4, 0, 1, 6, 2, 5]


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "accumulation", "size"), [(50, 4, 3, 2), (7, 2, 1, 3), (1, 8, 2, 2)]
)
def test_batches_of_a_trainer_have_the_lengths_of_its_steps(num_samples, batch_size, accumulation, size):
    transformers = pytest.importorskip("horovod_train.plugins.transformers.trainer")
    for rank in range(size):
        world = SimpleNamespace(rank=rank, size=size)
        batches = transformers.ShardedBatches(num_samples, world, batch_size, accumulation, seed=0)
        found = list(batches)
        steps = len(batches) // accumulation

        assert len(found) == len(batches)
        for step in range(2 * steps):  # counted over epochs
            micro_batches = found[step % steps * accumulation :][:accumulation]
            for length, indices in zip(batches.lengths(step), micro_batches, strict=True):
                assert length == len(indices) or (length == 0 and len(indices) == 1)


def test_a_batch_of_a_step_is_that_of_the_epoch():

    numbers = np.arange(23)
    worlds = [SimpleNamespace(rank=rank, size=3, allgather=lambda data: [data] * 3) for rank in range(3)]
    shards = [Shards(world, numbers, batch_size=2) for world in worlds]

    for epoch in (1, 0):
        of_ranks = [list(each.epoch(epoch)) for each in shards]
        assert sorted(n for ranks in of_ranks for weight, (rows,) in ranks if weight for n in rows) == [
            *numbers
        ]
        weight, (rows,) = shards[1].batch(epoch, 2)
        assert weight == of_ranks[1][2][0]
        assert [*rows] == [*of_ranks[1][2][1][0]]
