"""A rank whose data does not come says so, and does not wait for ever."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from horovod_train.config.schema import Health
from horovod_train.data.shard import WAITING, timed
from horovod_train.health import watches
from horovod_train.health.watches import DataWatch


@dataclass
class Ranks:
    """As much of a world as is looked at."""

    size: int
    rank: int = 0


QUICK = Health(stall_warning_s=0.2, stall_shutdown_s=0.6)


@pytest.fixture(autouse=True)
def looks_are_quick(monkeypatch):
    monkeypatch.setattr(watches, "INTERVAL_S", 0.05)


@pytest.fixture
def watch():
    told, ended, made = [], [], []

    def begin(waiting_since_s, num_ranks=1, health=QUICK):
        made.append(
            DataWatch(Ranks(num_ranks), health, waiting_since_s, lambda: "", told.append, ended.append)
        )
        return told, ended

    yield begin
    for each in made:
        each.close()


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def test_a_loader_that_hangs_is_named_and_then_ended(watch):
    told, ended = watch(lambda: 7.0)

    wait_for(lambda: ended)

    assert len(told) == 1
    assert told[0].startswith("rank 0 has waited for its data for 0 s: perhaps a loader process, the disk")
    assert (
        ended[0].message
        == "rank 0 has waited for its data for 1 s, and was ended after health.stall_shutdown_s"
    )


def test_batches_that_come_are_no_wait(watch):
    began = time.monotonic()
    told, ended = watch(lambda: time.monotonic() // 0.1)  # a new wait ten times a second

    time.sleep(1)

    assert (told, ended) == ([], []), time.monotonic() - began


def test_where_others_can_miss_the_rank_they_come_first(watch):
    _, ended = watch(lambda: 7.0, num_ranks=2, health=Health(stall_warning_s=0.2, stall_shutdown_s=2))
    time.sleep(2.2)

    assert not ended
    wait_for(lambda: ended)


def test_a_reader_says_since_when_it_is_waited_for():
    seen = []

    def batches():
        for number in range(2):
            seen.append(WAITING.since_s)
            yield number

    seen.extend(WAITING.since_s for _ in timed(batches()))

    assert seen[0] < seen[2]
    assert seen[1] is seen[3] is None
    assert WAITING.since_s is None


def test_a_reader_that_fails_is_not_waited_for_any_more():
    def batches():
        yield 1
        raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"):
        list(timed(batches()))

    assert WAITING.since_s is None
