"""Ranks compare their data before the first step."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support.torch_threads import on_torch_ranks, run_of
from support.worlds import on_ranks

from horovod_train.collectives.base import SingleRank
from horovod_train.errors import UserError
from horovod_train.frameworks.reader import Shards
from horovod_train.health.comparisons import check_same_data, compared_samples
from horovod_train.rank import check_data

FILES = [f"file-{number}" for number in range(40)]


def checked(of_rank, size=2):
    """Let each rank compare the data that a function returns for its number; return errors as values."""

    def act(world):
        data = of_rank(world.rank)
        return check_same_data(world, "the data", len(data), lambda numbers: [data[n] for n in numbers])

    return on_ranks(size, act)


def test_equal_data_pass_and_are_read_once():
    reads = []

    def act(world):
        return check_same_data(world, "the data", 5, lambda numbers: reads.append(numbers) or numbers)

    assert on_ranks(3, act) == [None] * 3
    assert reads == [[0, 1, 2, 3, 4]] * 3


def test_a_list_in_another_order_is_refused_on_all_ranks_with_the_rank():
    for error in checked(lambda rank: list(range(40))[:: -1 if rank == 2 else 1], 3):
        assert isinstance(error, UserError)
        assert error.message == (
            "the data differ between ranks: a batch of samples [0, 6, 11, 17, 22, 28, 33, 39] on rank 2 is "
            "not that of rank 0, and the lengths are equal"
        )
        assert "sort the result of os.listdir and glob" in error.hint


def test_texts_that_differ_may_be_paths_of_a_host(caplog):
    with caplog.at_level(logging.WARNING):
        assert checked(lambda rank: [f"/scratch/{rank}/{name}" for name in FILES]) == [None, None]

    (record,) = caplog.records
    assert "only texts differ, such as paths" in record.message
    assert "sort the result of os.listdir and glob" in record.message


def test_another_length_is_refused():
    for error in checked(lambda rank: FILES[: 40 - rank]):
        assert isinstance(error, UserError)
        assert error.message == "the data differ between ranks: 39 samples on rank 1, 40 on rank 0"


def test_the_first_sample_that_differs_is_named():
    def act(world):
        rows = np.arange(20.0).reshape(10, 2)
        rows[9] += world.rank
        return check_same_data(world, "the data", 10, lambda numbers: {"x": rows[numbers], "y": "same"})

    assert all("sample 9 on rank 1 is not that of rank 0" in error.message for error in on_ranks(2, act))


@pytest.mark.parametrize("chance", [0.5, 0.2])
def test_rare_random_changes_are_not_taken_for_other_data(chance):
    def act(world):
        def read(numbers):
            flips = np.random.default_rng().random(len(numbers)) < chance
            return np.arange(8.0)[numbers] * np.where(flips, -1, 1), np.arange(8)[numbers]

        return check_same_data(world, "the data", 8, read)

    for _ in range(20):
        assert on_ranks(4, act) == [None] * 4


def test_samples_that_cannot_be_read_are_left_to_the_job(caplog):
    def act(world):
        def read(numbers):
            if world.rank:
                raise OSError("sample 7 is damaged")
            return numbers

        return check_same_data(world, "the data", 8, read)

    with caplog.at_level(logging.WARNING):
        assert on_ranks(2, act) == [None, None]

    assert [record.message for record in caplog.records] == [
        "the data are not compared between ranks: OSError: sample 7 is damaged"
    ]


class Graph:
    def detach(self):
        return self


LOOP: dict[str, object] = {}
LOOP["self"] = LOOP


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.array([{"a": 1}, "text", [1.0]], dtype=object),
        lambda: [Graph(), object(), "\udc80", {1: None}],
        lambda: LOOP,
        lambda: torch.eye(3).to_sparse(),
    ],
)
def test_equal_batches_of_any_kind_pass(make):
    assert on_ranks(2, lambda world: check_same_data(world, "the data", 3, lambda _: make())) == [None, None]


def test_random_parts_that_are_not_seeded_are_not_compared():
    def act(world, labels):
        return check_same_data(
            world, "the data", 4, lambda numbers: (np.random.default_rng().random(4), labels[numbers])
        )

    same = on_ranks(2, lambda world: act(world, np.arange(4)))
    different = on_ranks(2, lambda world: act(world, np.arange(4) + world.rank))

    assert same == [None, None]
    assert all("sample 0 on rank 1" in error.message for error in different)


@dataclass
class Part:
    text: str
    image: Any


KINDS = {
    "tensors": (torch.arange(3), torch.tensor([0, 1, 3])),
    "bfloat16": (torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)),
    "data types": (np.zeros(3, np.int32), np.zeros(3, np.int64)),
    "shapes": (np.zeros((3, 1)), np.zeros((3, 2))),
    "values": ({"a": 1}, {"a": 2}),
    "data classes": (Part("a", np.zeros(2)), Part("a", np.ones(2))),
    "objects": (np.array([{}, [2]], dtype=object), np.array([{}, [1]], dtype=object)),
    "lengths": ([1, 2], [1, 2, 3]),
}


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_data_is_compared(name):
    equal = on_ranks(2, lambda world: check_same_data(world, "the data", 3, lambda _: KINDS[name][0]))
    errors = on_ranks(
        2, lambda world: check_same_data(world, "the data", 3, lambda _: KINDS[name][world.rank])
    )

    assert equal == [None, None]
    assert [type(error) for error in errors] == [UserError] * 2


def test_a_single_rank_reads_nothing():
    assert check_same_data(SingleRank(), "the data", 4, lambda _: pytest.fail("was read")) is None


def test_few_samples_are_compared_from_the_first_to_the_last():
    assert compared_samples(1) == [0]
    assert compared_samples(0) == []
    assert compared_samples(10**9)[0::7] == [0, 10**9 - 1]


# -- where it is called


class Numbers:
    """Samples with a generator of their own, which moves when they are read."""

    def __init__(self, is_reversed):
        self.numbers = torch.arange(20.0).flip(0) if is_reversed else torch.arange(20.0)
        self.generator = np.random.default_rng(5)

    def __len__(self):
        return 20

    def __getitem__(self, index):
        self.generator.random()
        return self.numbers[index].reshape(1), index


class Task:
    def __init__(self, is_reversed=False, eval_reversed=False):
        self.is_reversed, self.eval_reversed = is_reversed, eval_reversed

    def model(self):
        return torch.nn.Linear(1, 1)

    def train_data(self):
        return Numbers(self.is_reversed)

    def eval_data(self):
        return Numbers(self.eval_reversed)

    def loss(self, model, batch):
        return model(batch[0]).mean()


def job(**task_args):
    return {
        "name": "j",
        "task": f"{__name__}:Task",
        "task_args": task_args,
        "metrics": {"enabled": False},
    }


@pytest.mark.parametrize("batch_size", [1, 3])
def test_small_batches_are_read_until_there_are_eight_samples(batch_size):
    def act(world):
        _, run = run_of(world, job(is_reversed=bool(world.rank)), train={"batch_size_per_rank": batch_size})
        check_data(run)

    for error in on_torch_ranks(2, act):
        assert isinstance(error, UserError)
        assert "a batch of samples [0, 3, 5, 8, 11, 14, 16, 19] on rank 1" in error.message


@pytest.mark.parametrize(
    ("which", "what"), [("is_reversed", "the training data"), ("eval_reversed", "the evaluation data")]
)
def test_a_job_compares_training_and_evaluation_data(which, what):
    def act(world):
        _, run = run_of(world, job(**({which: True} if world.rank else {})))
        check_data(run)

    for error in on_torch_ranks(2, act):
        assert isinstance(error, UserError)
        assert error.message.startswith(f"{what} differ between ranks: sample 0 on rank 1")


def test_the_comparison_leaves_generators_of_data_sets_where_they_were():
    def act(world):
        _, run = run_of(world, job())
        check_data(run)
        return run.train_reader.dataset.generator.random()

    assert on_torch_ranks(2, act) == [np.random.default_rng(5).random()] * 2


def test_arrays_of_own_loops_are_compared_when_the_first_batch_is_read():
    def act(world):
        arrays = np.arange(12)[:: -1 if world.rank else 1], np.zeros(12)
        return next(Shards(world, *arrays, batch_size=2).epoch(0))

    for error in on_ranks(2, act):
        assert isinstance(error, UserError)
        assert "the arrays differ between ranks: sample 0 on rank 1" in error.message
