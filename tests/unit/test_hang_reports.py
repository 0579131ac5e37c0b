"""Ranks that do not go on are told from those that wait for them, in one sentence."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.waiting import wait_until

from horovod_train.events.types import Progress
from horovod_train.events.wire import Line
from horovod_train.launch.hosts.agent import RUN_VARIABLE, HostActions, ProcessState
from horovod_train.launch.hosts.staging import Mask
from horovod_train.launch.supervise.follow import Stalls
from horovod_train.launch.supervise.hangs import Hangs, absent, report, sentence, states_of
from horovod_train.system.stacks import dump_file, parsed

DUMPED = """Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 629 in wait

Current thread 0x00007f2 (most recent call first):
  File "/home/me/site-packages/numpy/core.py", line 7 in load
  File "/home/me/task.py", line 41 in __getitem__
  File "<frozen runpy>", line 88 in _run_code
"""


def process(rank, *, state="sleeping", is_loader=False, stacks="", answer=None, kernel_function=""):
    text = "" if answer is None else json.dumps({"step": 7, "step_s": 65.2, "stacks": [], **answer})
    return ProcessState(rank, 100 + rank, is_loader, state, kernel_function, 2**20, text, stacks)


def waits(rank, where="bucket.0"):
    return process(rank, answer={"collective": where, "collective_s": 60.0})


def told(*processes, known=(), num_ranks=0):
    states = states_of({"a": processes})
    missing = absent(states, known, num_ranks)
    return missing, sentence(states, missing)


def test_stacks_of_faulthandler_are_read_with_the_main_thread_first():
    main, other = parsed(DUMPED)

    assert [str(frame) for frame in main.frames[:2]] == [
        "load(), line 7 of /home/me/site-packages/numpy/core.py",
        "__getitem__(), line 41 of /home/me/task.py",
    ]
    assert [frame.function for frame in other.frames] == ["wait", "wait"]
    assert parsed("nothing") == []


class TestARankThatDoesNotGoOn:
    def test_is_where_its_own_code_is_and_not_a_library(self):
        stacks = [["MainThread", [["/x/site-packages/a.py", 1, "f"], ["/me/task.py", 41, "__getitem__"]]]]
        missing, text = told(waits(0), process(1, answer={"stacks": stacks}), waits(2))

        assert missing == [1]
        assert text == (
            "rank 1 on a is in __getitem__(), line 41 of /me/task.py for 65 s, after step 7; waiting: "
            "ranks 0, 2 in bucket.0"
        )

    def test_is_found_by_its_stack_if_it_does_not_answer(self):
        _, text = told(waits(0), process(1, stacks=DUMPED))

        assert text.startswith("rank 1 on a is in __getitem__(), line 41 of /home/me/task.py; waiting:")

    @pytest.mark.parametrize(
        ("found", "said"),
        [
            ({"state": "stopped"}, "is stopped (SIGSTOP)"),
            ({"state": "tracing-stop"}, "is held by a debugger"),
            (
                {"state": "disk-sleep", "kernel_function": "fuse_wait"},
                "is disk-sleep (it waits in the kernel, in fuse_wait), and does not answer",
            ),
            ({"answer": {"data_s": 3.0, "data": "s3://a.tar"}}, "waits for s3://a.tar for 3 s, after step 7"),
        ],
    )
    def test_is_told_with_the_state_of_its_process(self, found, said):
        _, text = told(waits(0), process(1, **found))

        assert text == f"rank 1 on a {said}; waiting: rank 0 in bucket.0"

    def test_is_told_with_its_loader_that_hangs(self):
        rank = process(0, answer={"data_s": 3.0})
        idle = process(0, is_loader=True, stacks=DUMPED.replace("/home/me/task.py", "/usr/lib/python3/x.py"))
        _, text = told(rank, idle, process(0, is_loader=True, stacks=DUMPED), known=[0])

        assert text == (
            "rank 0 on a waits for its data: its loader process 100 is in __getitem__(), line 41 of "
            "/home/me/task.py for 3 s, after step 7"
        )

    def test_is_the_one_in_another_collective_than_most(self):
        missing, text = told(waits(0), waits(1, "mine"), waits(2), known=[0, 2])

        assert missing == [1]
        assert text == "rank 1 on a waits in mine for 60 s, after step 7; waiting: ranks 0, 2 in bucket.0"

    def test_may_be_on_a_host_that_does_not_answer(self):
        missing, text = told(waits(0), waits(1), num_ranks=4)

        assert missing == [2, 3]
        assert text.startswith("rank 2 has not started, or its host does not answer; rank 3 has not started")
        assert text.endswith("; waiting: ranks 0-1 in bucket.0")

    def test_is_not_one_whose_device_waits_for_the_others(self):
        in_kernel = process(0, answer={"device": "its device's backward", "device_s": 61.0})
        missing, text = told(in_kernel, waits(1, "an all-reduce of its device"))

        assert missing == [0]
        assert text.startswith("rank 0 on a waits for its device's backward for 61 s, after step 7; waiting")

    def test_is_what_others_say_where_collectives_are_not_known(self):
        missing, text = told(*(process(rank) for rank in range(9)), known=[3, 4, 5, 6])

        assert missing == [3, 4, 5, 6]
        assert text.endswith("and 1 more ranks")


class Hosts:
    """Hosts whose ranks answer when they are allowed to."""

    def __init__(self):
        self.may_answer = threading.Event()
        self.num_examinations = 0

    def processes_of_ranks(self):
        self.num_examinations += 1
        self.may_answer.wait(5)
        return {"a": [waits(0), process(1, stacks=DUMPED)]}


class TestHangs:
    @pytest.fixture
    def hosts(self):
        return Hosts()

    @pytest.fixture
    def hangs(self, tmp_path, hosts):
        self.shown = []
        made = Hangs(Stalls(lambda _: None), tmp_path, 2, self.shown.append, Mask(["/home/me/task.py"]))
        made.hosts = hosts
        yield made
        hosts.may_answer.set()
        made.close()

    def test_are_examined_once_until_the_ranks_go_on(self, hangs, hosts, tmp_path):
        hosts.may_answer.set()
        hangs.examine([])
        wait_until(lambda: hangs.text)
        hangs.examine([1])
        hangs.handle(Line("", 0, "", event=Progress(**PROGRESS)))
        assert hangs.text == ""
        hangs.examine([])
        wait_until(lambda: len(self.shown) == 3)

        first, over, second = self.shown
        assert (first.ranks, over, second.ranks) == ((1,), None, (1,))
        assert [Path(each.report).name for each in (first, second)] == ["hang-1.txt", "hang-2.txt"]

    def test_that_are_over_before_ranks_have_answered_are_not_told_and_the_next_one_is(self, hangs, hosts):
        hangs.examine([])
        wait_until(lambda: hosts.num_examinations)
        hangs.forget()
        hosts.may_answer.set()
        wait_until(lambda: not hangs._is_busy)
        assert (hangs.text, self.shown) == ("", [])
        hangs.examine([])
        wait_until(lambda: self.shown)

    def test_secrets_are_hidden(self, hangs, hosts, tmp_path):
        hosts.may_answer.set()
        hangs.examine([])
        wait_until(lambda: self.shown)

        assert "line 41 of ***" in self.shown[0].text
        report = (tmp_path / "hang-1.txt").read_text()
        assert "***" in report
        assert "/home/me/task.py" not in report

    def test_nothing_is_told_of_ranks_that_have_ended(self, hangs, hosts):
        hangs.examine([])
        wait_until(lambda: hosts.num_examinations)
        threading.Timer(0.1, hosts.may_answer.set).start()
        hangs.close()

        assert self.shown == []
        hangs.examine([])
        assert hosts.num_examinations == 1


PROGRESS = {
    "step": 3, "num_steps": 9, "epoch": 0, "num_epochs": 1, "loss": 0.5, "lr": 0.1, "samples_per_s": 1.0,
    "eta_s": 1.0,
}  # fmt: skip


def test_a_process_that_does_not_handle_the_signal_is_not_sent_it(tmp_path):
    env = {**os.environ, RUN_VARIABLE: str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env) as process:
        (tmp_path / dump_file(0, process.pid)).touch()
        host = HostActions(str(tmp_path))
        wait_until(lambda: [each.pid for each in host.processes_of_ranks()] == [process.pid])
        is_alive = process.poll() is None
        process.kill()

    assert is_alive


RANK = """
import ctypes, os, sys, threading, time
from pathlib import Path
from horovod_train.health.watches import Heartbeat
beat = Heartbeat(Path(os.environ["HOROVOD_TRAIN_RUN"]), 5)
beat.step, beat.describe = lambda: 3, lambda: {"collective": "bucket.0", "collective_s": 1.5}
def hold():
    lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    lock(mutex)
def sleep():
    time.sleep(600)
print("ready", flush=True)
time.sleep(0.6)
{"hold": hold, "sleep": sleep}[sys.argv[1]]()
"""


@pytest.mark.parametrize("way", ["sleep", "hold"])
def test_a_rank_tells_what_it_does_also_while_a_library_holds_the_gil(tmp_path, way):
    env = {**os.environ, RUN_VARIABLE: str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", RANK, way], env=env, stdout=subprocess.PIPE) as rank:
        host = HostActions(str(tmp_path))
        try:
            assert rank.stdout.readline() == b"ready\n"
            wait_until(lambda: host.rank_pids() == [(5, rank.pid)])

            def state():
                return states_of({"a": host.processes_of_ranks()})[5]

            wait_until(lambda: f"    {way}(), line" in report({5: state()}, ""))
            found = state()
            assert bool(found.process.answer) == (way == "sleep")
            text = report({5: found}, "the sentence")
            assert re.search(rf"rank 5 on a: process {rank.pid}, sleeping", text)
            assert re.search(rf"    {way}\(\), line \d+ of <string>", text)
            if way == "sleep":
                assert (found.answer.step, found.collective) == (3, "bucket.0")
                assert "waits in bucket.0 for 2 s" in text
        finally:
            rank.kill()
