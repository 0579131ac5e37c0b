"""When the launch speaks of a rank that is silent, and when it gives up."""

from __future__ import annotations

from threading import Event

import pytest

from horovod_train.config.schema import Health
from horovod_train.launch.hosts.agent import UnresponsiveRank
from horovod_train.launch.supervise import follow as module
from horovod_train.launch.supervise.follow import Frozen, find_frozen, watching_ranks


class HostGroup:
    """Says one after the other for how long rank 1 has been silent; at last for ever the last."""

    def __init__(self, *silences_s):
        self.silences_s = list(silences_s)
        self.over = Event()

    def longest_wait_s(self):
        return 0.0

    def unresponsive_ranks(self, limit_s):
        silent_s = self.silences_s.pop(0) if len(self.silences_s) > 1 else self.silences_s[0]
        if len(self.silences_s) == 1:
            self.over.set()
        entry = UnresponsiveRank(1, 7, silent_s, "stopped")
        return {"a": [entry] if silent_s >= limit_s else [], "b": []}


@pytest.fixture(autouse=True)
def looks_are_quick(monkeypatch):
    monkeypatch.setattr(module, "POLL_INTERVAL_S", 0.01)


def watch(hosts, **health):
    told, lost = [], []
    with watching_ranks(hosts, Health(**health), told.append, lost.extend):
        hosts.over.wait(5)
        Event().wait(0.1)
    return told, lost


def test_a_rank_is_named_once_and_again_when_it_goes_on():
    told, lost = watch(HostGroup(0, 3, 4, 5, 0, 0), stall_warning_s=3, stall_shutdown_s=60)

    assert [list(map(str, ranks)) for ranks in told] == [
        ["rank 1 on a (process 7, stopped) shows no sign of life"],
        [],
    ]
    assert lost == []


def test_it_is_given_up_once():
    _, lost = watch(HostGroup(3, 9, 10, 11), stall_warning_s=3, stall_shutdown_s=10)

    assert [(each.rank, each.host, each.silent_s) for each in lost] == [(1, "a", 10)]


@pytest.mark.parametrize(
    ("silent_s", "is_named", "is_lost"), [(1.9, False, False), (3.9, True, False), (4, True, True)]
)
def test_nobody_is_missed_for_signs_that_come_late(silent_s, is_named, is_lost):
    told, lost = watch(HostGroup(silent_s), stall_warning_s=0.1, stall_shutdown_s=0.2)

    assert (bool(told), bool(lost)) == (is_named, is_lost)


def test_ranks_are_named_in_order_with_what_to_do():
    class Two:
        def unresponsive_ranks(self, limit_s):
            return {
                "b": [
                    UnresponsiveRank(2, 7, limit_s, "disk-sleep"),
                    UnresponsiveRank(9, 7, limit_s, "running"),
                ],
                "c": [UnresponsiveRank(10, 7, limit_s, "sleeping")],
                "a": [UnresponsiveRank(1, 7, limit_s, "stopped")],
            }

    found = find_frozen(Two(), 5.0)

    assert [each.rank for each in found] == [1, 2, 9, 10]
    assert "`kill -CONT 7` on a" in found[0].hint
    assert "network file system of b" in found[1].hint
    assert "is b out of memory" in found[2].hint
    assert "`py-spy dump --native --pid 7` on c" in found[3].hint
    assert Frozen(1, "a", 7, 5.0, "stopped") == found[0]
