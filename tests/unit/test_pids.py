"""Processes that are told from others, and killed: real ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from horovod_train.system import processes

SAY_IT = """
import json, time
from horovod_train.system.processes import own_identity
print(json.dumps(own_identity()), flush=True)
time.sleep(60)
"""


@pytest.fixture
def other():
    """A process and what it says it is."""
    with subprocess.Popen([sys.executable, "-c", SAY_IT], stdout=subprocess.PIPE, text=True) as process:
        yield process, json.loads(process.stdout.readline())
        process.kill()


def test_one_that_is_stopped_is_killed(other):
    process, identity = other
    process.send_signal(signal.SIGSTOP)

    assert processes.kill(identity)
    assert process.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize(("part", "value"), [(0, "another boot"), (1, "pid:[1]"), (3, 1), (3, None)])
def test_one_that_only_has_the_same_number_is_left_alone(other, part, value):
    process, identity = other
    identity[part] = value

    assert not processes.kill(identity)
    assert processes.is_alive(process.pid)


def test_nobody_is_killed_twice(other):
    process, identity = other
    process.kill()
    process.wait(10)

    assert not processes.kill(identity)
    assert not processes.kill([*identity[:3], None])


def test_nobody_kills_itself():
    assert processes.own_identity()[2] == os.getpid()
    assert not processes.kill(processes.own_identity())


def test_somebody_elses_is_left_alone(other, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", refuse)

    assert not processes.kill(other[1])


def test_one_that_nobody_has_waited_for_has_ended(other):
    process, _ = other
    assert processes.is_alive(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    assert not processes.is_alive(process.pid)
    process.wait()
    assert not processes.is_alive(process.pid)
