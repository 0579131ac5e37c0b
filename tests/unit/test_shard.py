"""Who reads which sample: every sample once, for any world and any interruption."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_train.data.shard import epoch_order, num_steps, split_evenly, steps_of_epoch

worlds = st.integers(1, 64)
sizes = st.integers(1, 3000)
batches = st.integers(1, 64)
accumulations = st.integers(1, 5)


def world_steps(num_samples, cursor, batch, accumulation, size):
    """The steps of every rank, as a list of tuples: one tuple per step, one entry per rank."""
    ranks = [
        list(
            steps_of_epoch(
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


def test_the_order_without_shuffling_is_natural():
    assert np.array_equal(epoch_order(5, 1, 1, shuffle=False), [0, 1, 2, 3, 4])


def test_the_order_never_changes_between_releases():
    """A half-used epoch of an old checkpoint has to go on in its order. The literal is MT19937's."""
    expected = np.random.RandomState(np.array([3, 2])).permutation(8)

    assert np.array_equal(epoch_order(8, 3, 2, shuffle=True), expected)
    assert epoch_order(8, 3, 2, shuffle=True).tolist() == [3, 7, 4, 0, 1, 6, 2, 5]
