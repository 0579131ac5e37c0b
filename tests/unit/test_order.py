"""Order of samples in files: a permutation, known at each place, in which hosts read files of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from horovod_train.data.order import (
    DataOrder,
    Draws,
    Mixture,
    OrderOfFiles,
    Passes,
    SimilarLengths,
    lanes_of,
    resumed,
    settings_of,
    without_replacement,
)
from horovod_train.data.order import order_of as order_of_epoch
from horovod_train.data.shard import StepsOfEpoch, epoch_order, share_of_step

file_sizes = st.lists(st.sampled_from([0, 1, 2, 7, 13, 101, 331]), min_size=1, max_size=12)
row_sizes = st.integers(1, 200)
block_sizes = st.sampled_from([1, 5, 64, 4096])


def order_of(sizes, row_size, block_size=64, seed=5, epoch=0):
    return OrderOfFiles(np.array(sizes, np.int64), seed, epoch, row_size, block_size)


@given(file_sizes, row_sizes, block_sizes)
def test_each_sample_has_one_place(sizes, row_size, block_size):
    order = order_of(sizes, row_size, block_size)

    assert sorted(order[:].tolist()) == list(range(sum(sizes)))
    assert len(order) == sum(sizes)


@given(file_sizes, row_sizes, block_sizes, st.data())
def test_a_place_is_known_without_those_before(sizes, row_size, block_size, data):
    whole = order_of(sizes, row_size, block_size)[:].tolist()
    start, stop = (data.draw(st.integers(0, sum(sizes) + 3)) for _ in range(2))

    assert order_of(sizes, row_size, block_size)[start:stop].tolist() == whole[start:stop]


@given(file_sizes, row_sizes)
def test_the_file_of_a_place_is_that_of_its_sample(sizes, row_size):
    order = order_of(sizes, row_size)
    ends = np.cumsum(sizes)

    assert order.files_at(np.arange(len(order))).tolist() == [
        int(np.searchsorted(ends, number, "right")) for number in order[:]
    ]


def test_it_differs_between_epochs_and_seeds():
    found = {tuple(order_of([50, 50], 8, seed=s, epoch=e)[:].tolist()) for s in (0, 1) for e in (0, 1)}

    assert len(found) == 4


def test_it_never_changes_between_releases():
    """A checkpoint in the middle of an epoch continues with this order."""
    assert order_of([5, 0, 3, 4], 4, block_size=2, seed=3, epoch=2)[:].tolist() == EXPECTED


EXPECTED = [9, 11, 2, 6, 8, 0, 3, 5, 10, 1, 4, 7]


def files_read(num_hosts, row_size, batch_size):
    """The number of files that hosts read together, divided by the number of files."""
    num_files = 256
    order = order_of([100] * num_files, row_size, block_size=2**10)
    read = [set() for _ in range(num_hosts)]
    for cursor in range(0, len(order), batch_size):
        for host, files in enumerate(read):
            share = share_of_step(
                cursor, min(batch_size, len(order) - cursor),
                batch_size=batch_size, accumulation_steps=1, rank=host, size=num_hosts,
            )  # fmt: skip
            for each in share.micro_batches:
                files.update(order.files_at(np.arange(each.start, each.stop)).tolist())
    return sum(map(len, read)) / num_files


@pytest.mark.parametrize("num_hosts", [1, 2, 4, 8, 16])
def test_hosts_that_divide_the_lanes_read_files_of_their_own(num_hosts):
    assert files_read(num_hosts, 256, 256) < 1.15


def test_hosts_that_do_not_divide_the_lanes_share_few_files():
    assert files_read(5, 256, 256) < 1.3


def test_consecutive_slices_of_one_lane_would_be_in_all_files():
    assert files_read(8, 257, 257) > 4, "257 is a prime number: there is one lane"


def test_many_files_need_little_memory():
    order = OrderOfFiles(np.full(10**5, 10**4, np.int64), 1, 0, 256)

    found = order[len(order) - 100 :]
    assert len(set(found.tolist())) == 100
    held = sum(each.nbytes for each in vars(order).values() if isinstance(each, np.ndarray))
    assert held <= 29 * 10**5
    assert sum(each.nbytes for each in order._blocks.values()) <= 64 * 2 * 2**16


def test_lanes_divide_the_global_batch():
    assert all(size % lanes_of(size) == 0 and lanes_of(size) <= 64 for size in range(1, 600))


class TestEpochs:
    """An epoch is a part of a sequence without an end."""

    @given(file_sizes, st.integers(1, 60), st.booleans())
    def test_passes_follow_each_other_whatever_an_epoch_is(self, sizes, length, shuffle):
        assume(sum(sizes))
        settings = DataOrder(
            length, 7, shuffle, "files", sum(sizes) if length != sum(sizes) else 0, row_size=8
        )
        dataset = Files(sizes)
        used = np.concatenate([order_of_epoch(settings, dataset, epoch)[:] for epoch in range(7)])
        passes = np.split(used, range(sum(sizes), len(used), sum(sizes)))

        assert all(len(order_of_epoch(settings, dataset, epoch)) == length for epoch in range(7))
        for each in passes:
            assert len(set(each.tolist())) == len(each)

    def test_an_epoch_that_is_a_pass_has_today_s_order(self):
        settings = DataOrder(40, 3, shuffle=True)

        assert (
            order_of_epoch(settings, object(), 2)[:].tolist() == epoch_order(40, 3, 2, shuffle=True).tolist()
        )

    def test_a_pass_over_plain_data_may_have_several_epochs(self):
        settings = DataOrder(10, 3, shuffle=True, num_in_pass=25)
        used = np.concatenate([order_of_epoch(settings, object(), epoch)[:] for epoch in range(5)])

        assert used[:25].tolist() == epoch_order(25, 3, 0, shuffle=True).tolist()
        assert used[25:].tolist() == epoch_order(25, 3, 1, shuffle=True).tolist()

    def test_a_dataset_with_very_many_samples_has_no_array_of_them(self):
        settings = settings_of(object(), 10**10, seed=0, shuffle=True, samples_per_epoch=None, row_size=256)
        order = order_of_epoch(settings, object(), 3)

        assert settings.kind == "files"
        assert len({*order[10**10 - 300 :].tolist(), *order[:300].tolist()}) == 600

    def test_a_resumed_job_retains_the_kind_and_the_rows_of_its_checkpoint(self):
        old = DataOrder(9, 0, shuffle=True)
        large = DataOrder(9, 0, shuffle=True, kind="files", row_size=64)
        now = replace(large, digest="d")

        assert resumed(old, large) == old, "data of the task, which had an array of all samples"
        assert resumed(old, now) == now, "data of the task is replaced by files"
        assert resumed(now, replace(now, row_size=8)) == now
        assert resumed(now, old) == old, "the data cannot have this order any more: it is refused in an epoch"


class Files:
    """A dataset of files, of which only the sizes matter."""

    def __init__(self, sizes, whole=None):
        self.sizes = np.array(sizes, np.int64)
        self.whole = whole

    def endless(self, order):
        return self.whole or Passes.over(order, self.sizes)

    def digest(self):
        return "d"


class TestDraws:
    def test_samples_are_drawn_in_proportion_to_their_weights(self):
        weights = np.array([0.0, 1, 2, 0, 5, 0])
        found = np.bincount(Draws(np.cumsum(weights), seed=4).at(np.arange(80_000)), minlength=6)

        np.testing.assert_allclose(found / 10_000, weights, atol=0.15)
        assert not found[[0, 3, 5]].any()

    def test_a_draw_depends_on_its_place_alone(self):
        draws = Draws(np.cumsum(np.ones(50)), seed=1)

        assert draws.at(np.arange(90, 100)).tolist() == draws.at(np.arange(100))[90:].tolist()
        assert (
            draws.at(np.arange(99)).tolist()
            != Draws(np.cumsum(np.ones(50)), seed=2).at(np.arange(99)).tolist()
        )

    def test_without_replacement_a_sample_is_drawn_once(self):
        weights = np.array([0, 1, 1, 1, 10_000, 1.0])
        of_epochs = [without_replacement(weights, 3, 5)(epoch) for epoch in range(20)]

        assert all(sorted(each.tolist()) == [1, 2, 3, 4, 5] for each in of_epochs)
        assert sum(each[0] == 4 for each in of_epochs) > 15
        assert len({tuple(each.tolist()) for each in of_epochs}) > 5

    @pytest.mark.parametrize("weight", [[1, 1], [1e-300, 1e300]])
    def test_numbers_do_not_leave_the_data(self, weight):
        found = Draws(np.cumsum(weight), seed=0).at(np.arange(10_000))

        assert set(found.tolist()) <= {0, 1}


class TestMixture:
    def test_each_block_has_the_proportions_exactly(self):
        mixture = Mixture([In(10), In(20), In(30)], [0, 100, 200], [0.5, 0.3, 0.2], block_size=10)
        parts = mixture.at(np.arange(400)) // 100

        for start in range(0, 400, 10):
            assert np.bincount(parts[start : start + 10]).tolist() == [5, 3, 2]

    def test_each_part_is_read_in_its_own_order_without_gaps(self):
        mixture = Mixture([In(7), In(50)], [0, 100], [0.9, 0.1], block_size=10)
        found = mixture.at(np.arange(500))

        assert found[found < 100].tolist() == [n % 7 for n in range(450)]
        assert (found[found >= 100] - 100).tolist() == list(range(50))

    def test_proportions_that_do_not_divide_are_as_close_as_possible(self):
        mixture = Mixture([In(9)] * 3, [0, 10, 20], [1 / 3] * 3, block_size=2**16)

        assert sorted(mixture.counts.tolist()) == [21845, 21845, 21846]


class In:
    """The samples in order, again and again."""

    def __init__(self, length):
        self.length = length

    def at(self, places):
        return places % self.length


class TestSimilarLengths:
    lengths = np.random.RandomState(0).randint(1, 500, 1000)

    def order(self, whole=None):
        whole = whole or Passes(1000, lambda number: epoch_order(1000, 1, number, shuffle=True))
        return SimilarLengths(whole, self.lengths, batch_size=16, seed=1, end=1000, num_batches=10)

    def test_each_sample_is_used_once_in_each_pass(self):
        found = self.order().at(np.arange(2000))

        assert sorted(found[:1000].tolist()) == sorted(found[1000:].tolist()) == list(range(1000))
        assert found[:1000].tolist() != found[1000:].tolist()

    def test_samples_of_a_batch_have_similar_lengths(self):
        found = self.lengths[self.order().at(np.arange(960))].reshape(-1, 16)
        others = self.lengths[np.random.RandomState(1).permutation(1000)[:960]].reshape(-1, 16)

        assert np.ptp(found, axis=1).mean() < 0.2 * np.ptp(others, axis=1).mean()

    def test_batches_come_in_no_order_of_length(self):
        found = self.lengths[self.order().at(np.arange(960))].reshape(-1, 16).mean(axis=1)

        assert (np.diff(found) < 0).mean() > 0.2

    def test_any_place_is_known_without_those_before(self):
        assert (
            self.order().at(np.arange(1500, 1520)).tolist()
            == self.order().at(np.arange(1520))[1500:].tolist()
        )


class TestWorlds:
    """Ranks that change after any step use the samples of one process, in its order."""

    @given(
        file_sizes,
        st.integers(1, 64),
        st.lists(st.tuples(st.integers(1, 64), st.integers(1, 30)), min_size=1, max_size=4),
        st.integers(1, 40),
    )
    def test_each_sample_is_used_once_in_the_order_of_one_process(self, sizes, batch_size, worlds, row_size):
        assume(sum(sizes))
        settings = DataOrder(sum(sizes), 3, shuffle=True, kind="files", row_size=row_size)
        order = order_of_epoch(settings, Files(sizes), 1)
        used, cursor = [], 0
        for num_ranks, num_steps in [*worlds, (1, sum(sizes))]:
            ranks = [
                StepsOfEpoch(
                    num_samples=sum(sizes), cursor=cursor, batch_size_per_rank=-(-batch_size // num_ranks),
                    accumulation_steps=1, rank=rank, size=num_ranks, global_batch_size=batch_size,
                    max_steps=num_steps,
                )
                for rank in range(num_ranks)
            ]  # fmt: skip
            for shares in zip(*ranks, strict=True):
                for share in shares:
                    for piece in share.micro_batches:
                        used += order[piece.start : piece.stop].tolist()
                cursor += shares[0].num_samples

        assert used == order[:].tolist()
        assert sorted(used) == list(range(sum(sizes)))
