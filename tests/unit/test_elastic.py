"""Which hosts an elastic job uses: those that are listed, answer, and did not just fail."""

from __future__ import annotations

import os
import signal
from threading import Event
from time import monotonic

import pytest

from horovod_train.config.schema import Elastic, Job
from horovod_train.errors import LaunchError
from horovod_train.launch import elastic as module
from horovod_train.launch.base import LaunchRequest
from horovod_train.launch.elastic import Members, answering, discover
from horovod_train.launch.hosts import Host
from horovod_train.launch.stop import interrupted_by_signals

# In place of ssh: it gets -o, ConnectTimeout=..., the host and a command.
SSH = ("sh", "-c", "case $2 in up*) exit 0;; slow) sleep 60;; *) exit 255;; esac")


@pytest.fixture
def members(tmp_path, monkeypatch):
    def make(hosts, **wishes):
        elastic = Elastic(**{"min_ranks": 1, "poll_s": 0.05, "cooldown_s": 0.3, "wait_s": 1.0, **wishes})
        launch = {"hosts": hosts, "num_ranks": len(hosts) or 4, "elastic": elastic.model_dump()}
        job = Job.model_validate({"name": "j", "task": "digits", "launch": launch})
        request = LaunchRequest(job, "run", tmp_path, tmp_path)
        request.log_dir.mkdir(exist_ok=True)
        monkeypatch.setattr(LaunchRequest, "ssh", SSH)
        return Members(request, elastic)

    return make


def test_hosts_that_answer_are_used_in_the_order_of_the_list():
    started = monotonic()

    assert answering(["up2:1", "down:1", "up1:2"], SSH, Event()) == ["up2:1", "up1:2"]
    assert monotonic() - started < 5


def test_looking_at_hosts_ends_when_the_job_does(monkeypatch):
    over = Event()
    over.set()
    started = monotonic()

    assert answering(["slow:1"], SSH, over) == []
    assert monotonic() - started < 2


def test_this_machine_is_not_asked():
    assert answering(["localhost:2"], ("false",), Event()) == ["localhost:2"]


class TestListing:
    def test_takes_the_lines_of_a_hostfile_each_host_once(self, tmp_path):
        (tmp_path / "hosts").write_text("a\nb slots=4\n# c\na:3\n")

        assert discover(f"cat {tmp_path}/hosts", 2) == ["a:3", "b:4"]

    def test_may_be_empty(self):
        assert discover("true", 1) == []

    @pytest.mark.parametrize("command", ["false", "no-such-command", "echo 'not a host!'"])
    def test_says_what_is_wrong(self, command):
        with pytest.raises(LaunchError, match=r"launch\.elastic\.discover: "):
            discover(command, 1)


class TestWaiting:
    def test_ends_at_once_when_all_are_there(self, members):
        assert members(["up1:1", "up2:1"], cooldown_s=60.0).wait() == ["up1:1", "up2:1"]

    def test_gives_the_others_a_while(self, members):
        started = monotonic()

        assert members(["up1:1", "down:1"]).wait() == ["up1:1"]
        assert monotonic() - started >= 0.3

    def test_ends_with_an_error_that_names_those_missing(self, members):
        with pytest.raises(LaunchError, match="room for 1 ranks only.*no answer from down"):
            members(["up1:1", "down:1"], min_ranks=2).wait()

    def test_does_not_take_a_failing_command_for_an_empty_list(self, members):
        with pytest.raises(LaunchError, match="room for 0 ranks only.*discover"):
            members([], discover="false", max_ranks=4).wait()

    def test_is_not_needed_without_hosts(self, members):
        assert members([]).wait() == []


def test_a_host_that_fails_again_is_left_alone_twice_as_long(members, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    found = members(["up1:1", "up2:1"], cooldown_s=10.0)

    found.lose(["up2"])
    assert found._listed()[0] == ["up1:1"]
    now[0] += 10
    assert found._listed()[0] == ["up1:1", "up2:1"]
    found.lose(["up2"])
    now[0] += 19
    assert found._listed()[0] == ["up1:1"]
    now[0] += 1
    assert found._listed()[0] == ["up1:1", "up2:1"]


def test_a_host_that_has_taken_part_is_trusted_again(members, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    found = members(["up1:1", "up2:1"], cooldown_s=10.0)
    found.lose(["up2"])

    class Attempt:
        hosts = [Host("up2", 1)]  # noqa: RUF012

    found.trust(Attempt())
    found.lose(["up2"])
    now[0] += 10

    assert found._listed()[0] == ["up1:1", "up2:1"]


def test_a_signal_before_ranks_start_is_an_error_of_its_own():
    with (
        pytest.raises(LaunchError, match="signal 10"),
        interrupted_by_signals(lambda number: LaunchError(f"signal {number}")),
    ):
        os.kill(os.getpid(), signal.SIGUSR1)

    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
