"""Steps as loops make them: every sample once, whoever's loop it is."""

from __future__ import annotations

import pytest

from horovod_train.data.shard import PlannedSteps, StepsOfEpoch


def plan(num_samples, *, batch=4, accumulation=2, rank=0, size=2, cursor=0):
    shares = StepsOfEpoch(
        num_samples=num_samples,
        cursor=cursor,
        batch_size_per_rank=batch,
        accumulation_steps=accumulation,
        rank=rank,
        size=size,
    )
    return PlannedSteps(shares, lambda pieces: (list(range(p.start, p.stop)) for p in pieces))


@pytest.mark.parametrize("num_samples", [1, 16, 33, 47])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_together_read_every_sample_once(num_samples, size):
    steps = [plan(num_samples, rank=rank, size=size) for rank in range(size)]

    read = [sample for mine in steps for step in mine for _, batch in step for sample in batch]

    assert sorted(read) == list(range(num_samples))
    assert len({len(mine) for mine in steps}) == 1


def test_the_last_one_says_so():
    assert [step.is_last for step in plan(47)] == [False, False, True]


def test_shares_of_a_step_are_one():
    for steps in zip(*(plan(47, rank=rank) for rank in range(2)), strict=True):
        total = sum(micro_batch.share for step in steps for micro_batch, _ in step)

        assert total == pytest.approx(1.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_padded_every_rank_has_as_many_batches_and_spare_ones_weigh_nothing(rank):
    plain, padded = plan(33, rank=rank), plan(33, rank=rank)

    for one, other in zip(plain, padded, strict=True):
        read = list(other.padded(2, lambda: "spare"))
        assert len(read) == 2
        real = [(micro_batch.share, batch) for micro_batch, batch in one]
        assert read == real + [(0.0, "spare")] * (2 - len(real))
        assert [other.share_at(place) for place in range(2)] == [share for share, _ in read]


def test_a_stream_that_ends_too_early_is_no_end_of_the_step():
    (step,) = PlannedSteps(
        StepsOfEpoch(num_samples=8, cursor=0, batch_size_per_rank=4, accumulation_steps=2, rank=0, size=1),
        lambda _: iter(["the only batch"]),
    )

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(step)
