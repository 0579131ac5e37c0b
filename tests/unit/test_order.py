"""Order of samples in files: a permutation, known at each place, in which hosts read files of their own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_train.data.order import OrderOfFiles, lanes_of
from horovod_train.data.shard import share_of_step

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
