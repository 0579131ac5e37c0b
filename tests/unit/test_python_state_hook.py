"""State in Python is compared between ranks at growing intervals; each difference is reported once."""

from __future__ import annotations

import logging

import pytest
from support.training import Task, made
from support.worlds import on_ranks

from horovod_train.frameworks.python_state import PythonState, Root
from horovod_train.training.hooks import checks
from horovod_train.training.hooks.base import PeriodicExchange
from horovod_train.training.hooks.checks import WatchPythonState
from horovod_train.training.loop import train


class Counting(Task):
    """A task with state that only Python has."""

    def __init__(self, per_rank):
        super().__init__()
        self.count, self.per_rank, self.rank = 0, per_rank, 0

    def gradient(self, params, batch):
        self.count += 1 + self.per_rank * self.rank
        found = super().gradient(params, batch)
        self.seen.clear()  # the samples of a rank
        return found


class Exchanging(WatchPythonState):
    """The hook, with the exchange after each step that another hook makes in a job."""

    def __init__(self, exchange):
        super().__init__(exchange)
        self.exchange = exchange

    def on_step(self, run):
        self.exchange.after_step()
        super().on_step(run)


def trained(size, per_rank, epochs=2, begin=lambda hook: None, part=lambda rank: 0):
    """Train on so many ranks; return the steps after which they have compared their states."""

    def act(world):
        task = Counting(per_rank)
        task.rank = world.rank
        run = made(world, task, train={"epochs": epochs, "batch_size_per_rank": 1})
        run.replica.python_state = PythonState(world, [Root("task", task)], part(world.rank))
        now = [0.0]

        def clock():
            now[0] += 1.0
            return now[0]

        hook = Exchanging(PeriodicExchange(world, clock))
        begin(hook)
        run.hooks.append(hook)
        compared = []
        examined = run.replica.python_state.examined

        def noted():
            compared.append(run.progress.step)
            return examined()

        run.replica.python_state.examined = noted
        train(run)
        return compared

    return on_ranks(size, act)


def warnings(caplog):
    return [record.message for record in caplog.records if "state in Python differs" in record.message]


def test_a_difference_is_reported_once_with_step_value_and_ranks(caplog):
    with caplog.at_level(logging.WARNING):
        trained(2, per_rank=1, epochs=4)

    (message,) = warnings(caplog)
    assert message.startswith(
        "step 1: state in Python differs between ranks: task.count: 1 on rank 0, 2 on rank 1. If the loss"
    )
    assert "train.average_buffers" in message


def test_equal_states_are_not_reported(caplog):
    with caplog.at_level(logging.WARNING):
        trained(2, per_rank=0)

    assert warnings(caplog) == []


def test_ranks_with_different_parts_of_the_model_are_not_compared(caplog):
    with caplog.at_level(logging.WARNING):
        trained(2, per_rank=1, part=lambda rank: rank)

    assert warnings(caplog) == []


def test_ranks_with_the_same_part_of_the_model_are_compared(caplog):
    with caplog.at_level(logging.WARNING):
        trained(4, per_rank=1, part=lambda rank: rank % 2)

    (message,) = warnings(caplog)
    assert "task.count: 1 on rank 0, 3 on rank 2" in message


def test_comparisons_become_rarer(monkeypatch):
    monkeypatch.setattr(checks, "MAX_BETWEEN", 8)
    first, second = trained(2, per_rank=0, epochs=8)

    assert first == second
    assert first == [1, 2, 4, 8, 16, 24, 32, 40]


def test_slow_examinations_are_rarer_on_all_ranks(monkeypatch):
    monkeypatch.setattr(checks, "MAX_PART", 1e-9)
    compared = trained(2, per_rank=0, epochs=8)

    assert compared == [[1], [1]]


@pytest.mark.parametrize("names", [3, 9])
def test_at_most_six_names_are_shown(names):
    text = checks._joined({f"task.{number}": "" for number in range(names)})

    assert text.count("task.") == min(names, 6)
    assert text.endswith("; and 3 more") == (names == 9)
