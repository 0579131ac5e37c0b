"""What is not a dataset of numbered samples is refused with the remedy, before it is read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, IterableDataset, StackDataset, Subset, TensorDataset

from horovod_train.errors import UserError
from horovod_train.frameworks.reader import checked_length


class Counted(IterableDataset):
    def __len__(self):
        return 10

    def __iter__(self):
        return iter(range(10))


class Bare:
    def __len__(self):
        return 3


class Dataset(Bare):
    """Has the name of PyTorch's."""

    def __getitem__(self, index):
        return index


class InBatches(Bare):
    def __getitems__(self, indices):
        return indices


TENSORS = TensorDataset(torch.zeros(4, 2))


@pytest.mark.parametrize("dataset", [Counted(), Bare()])
def test_samples_without_numbers_are_refused(dataset):
    with pytest.raises(UserError, match=f"a {type(dataset).__name__} has no __getitem__") as caught:
        checked_length(dataset)
    assert "__getitem__(index)" in caught.value.hint


@pytest.mark.parametrize("dataset", [object(), iter([])])
def test_samples_without_a_number_are_refused(dataset):
    with pytest.raises(UserError, match="has no __len__"):
        checked_length(dataset)


def test_no_samples_are_refused():
    with pytest.raises(UserError, match="has no samples"):
        checked_length([])


@pytest.mark.parametrize(
    ("dataset", "length"),
    [
        ([1, 2], 2),
        (np.zeros((5, 2)), 5),
        (TENSORS, 4),
        (ConcatDataset([TENSORS, TENSORS]), 8),
        (Subset(TENSORS, [1]), 1),
        (StackDataset(TENSORS, TENSORS), 4),
        (InBatches(), 3),
        (Dataset(), 3),
    ],
)
def test_numbered_samples_are_counted(dataset, length):
    assert checked_length(dataset) == length
