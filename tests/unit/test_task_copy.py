"""The plain model makes the first steps with a copy of the task, which shares no state with it."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from horovod_train.errors import UserError
from horovod_train.frameworks.torch.verify.verification import (
    SharedState,
    copy_of_task,
    counter_state,
    generators_of,
)


class Dataset:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index


class Meter:
    def __init__(self):
        self.file = Path(os.devnull).open("w")  # noqa: SIM115
        self.values = []


class Task:
    calls = 0

    def __init__(self):
        self.count = torch.zeros(2)
        self.array = np.zeros(2)
        self.past = deque([1], maxlen=5)
        self.seen = {1}
        self.data = Dataset()
        self.teacher = nn.Sequential(nn.Linear(2, 2))
        self.meter = Meter()
        self.first = self.second = [0]
        number = [0]
        self.weight = lambda: number.append(len(number))

    def loss(self):
        self.count += 1
        self.array += 1
        self.past.append(2)
        self.seen.add(2)
        self.meter.values.append(1)
        self.first.append(1)
        with torch.no_grad():
            self.teacher[0].weight.zero_()


@pytest.fixture
def task():
    made = Task()
    yield made
    made.meter.file.close()


def state_of(task):
    weights = task.teacher[0].weight.tolist()
    return (
        task.count.tolist(), task.array.tolist(), list(task.past), sorted(task.seen), weights,
        list(task.meter.values), list(task.first),
    )  # fmt: skip


def test_what_a_copy_does_leaves_the_task_alone(task):
    before = state_of(task)
    copied = copy_of_task(task)
    assert state_of(copied) == before

    copied.loss()

    assert state_of(task) == before
    assert state_of(copied) != before
    assert copied.first is copied.second, "what two attributes share, their copies share"


def test_datasets_and_files_are_shared(task):
    copied = copy_of_task(task)

    assert copied.data is task.data
    assert copied.meter.file is task.meter.file


class TestSharedState:
    @pytest.fixture
    def shared(self, task):
        made = SharedState(task, nn.Linear(2, 2))
        made.remember()
        return made

    def test_may_stay_as_it_is(self, task, shared):
        copy_of_task(task).loss()

        shared.check()

    def test_of_a_class_may_not_change(self, task, shared, monkeypatch):
        monkeypatch.setattr(Task, "calls", 1)

        with pytest.raises(UserError, match=r"changes Task\.calls when it is called"):
            shared.check()

    def test_of_a_module_may_not_change(self, task, shared, monkeypatch):
        SETTINGS.append(1)
        try:
            with pytest.raises(UserError, match=r"changes .*SETTINGS when it is called"):
                shared.check()
        finally:
            SETTINGS.clear()

    def test_of_a_closure_may_not_change(self, task, shared):
        copy_of_task(task).weight()

        with pytest.raises(UserError, match=r"changes self\.weight when it is called"):
            shared.check()


SETTINGS: list[int] = []


def test_generators_are_known_by_name(task):
    task.schedule = (number for number in range(3))

    assert generators_of(task) == ["schedule"]


def test_counting_is_seen_in_python_and_in_buffers_of_integers(task):
    model = nn.BatchNorm1d(2)
    model.register_buffer("steps", torch.zeros((), dtype=torch.int64))
    before = counter_state(task, model)
    model.num_batches_tracked += 1
    assert counter_state(task, model) == before, "which batch normalization has"

    model.steps += 1

    assert counter_state(task, model) != before
