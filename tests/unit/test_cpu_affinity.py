"""Each rank gets cores of its own, near each other."""

from __future__ import annotations

import os

import pytest

from horovod_train.system.processes import bind, choose_cores, cores_of, read_nodes

TWO_SOCKETS = [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
ALL = frozenset(range(16))


def shares(mode, local_size, nodes=TWO_SOCKETS, allowed=ALL):
    return [choose_cores(mode, nodes, allowed, rank, local_size) for rank in range(local_size)]


@pytest.mark.parametrize("local_size", [2, 3, 4, 5, 16])
def test_shares_of_cores_are_disjoint_and_complete(local_size):
    found = shares("cores", local_size)

    assert frozenset().union(*found) == ALL
    assert sum(map(len, found)) == len(ALL)
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_shares_stay_within_a_socket_where_they_can():
    for share in shares("cores", 4):
        assert any(share <= set(node) for node in TWO_SOCKETS)


def test_numa_gives_each_rank_the_whole_of_its_node():
    assert shares("numa", 4) == [frozenset(TWO_SOCKETS[0])] * 2 + [frozenset(TWO_SOCKETS[1])] * 2


@pytest.mark.parametrize(
    ("mode", "local_size", "nodes", "allowed"),
    [
        ("none", 4, TWO_SOCKETS, ALL),
        ("auto", 4, [list(range(16))], ALL),  # one node: nothing is far away
        ("auto", 1, TWO_SOCKETS, ALL),  # alone on its host
        ("numa", 2, [[0], [1], [2], [3]], frozenset(range(4))),  # fewer ranks than nodes
        ("cores", 4, TWO_SOCKETS, frozenset({0, 1})),  # fewer cores than ranks
        ("auto", 4, [], ALL),  # the system does not tell
    ],
)
def test_where_it_would_do_harm_nothing_is_bound(mode, local_size, nodes, allowed):
    assert shares(mode, local_size, nodes, allowed) == [None] * local_size


def test_cores_that_were_taken_away_are_not_used():
    assert shares("numa", 2, allowed=frozenset({2, 3, 6, 7})) == [{2, 3}, {6, 7}]


def test_what_the_kernel_writes_is_read(tmp_path):
    for number, text in ((0, "0-1,4\n"), (1, "2-3\n"), (10, "\n")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(text)

    assert read_nodes(tmp_path) == [[0, 1, 4], [2, 3], []]
    assert cores_of("7") == [7]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core only")
def test_a_rank_binds_itself():
    before = os.sched_getaffinity(0)
    try:
        bind("cores", {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
        found = os.sched_getaffinity(0)
    finally:
        os.sched_setaffinity(0, before)

    assert found < before
    assert len(found) <= (len(before) + 1) // 2


def test_a_process_alone_is_left_alone():
    before = os.sched_getaffinity(0)
    bind("cores", {})

    assert os.sched_getaffinity(0) == before
