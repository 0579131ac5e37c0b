"""Which hosts an elastic job uses: those that are listed, answer, and did not just fail."""

from __future__ import annotations

import json
import os
import signal
from threading import Event
from time import monotonic, sleep

import pytest

from horovod_train.config.launch import Elastic
from horovod_train.config.load import dump_job, load_job
from horovod_train.config.schema import Job
from horovod_train.errors import LaunchError
from horovod_train.launch.base import LaunchRequest
from horovod_train.launch.submit import resolve
from horovod_train.launch.supervise import elastic as module
from horovod_train.launch.supervise.elastic import Membership, answering, discover, on_hosts
from horovod_train.launch.supervise.signals import deferred_signals, interrupted_by_signals

# In place of ssh: it gets -o, ConnectTimeout=..., the host and a command.
SSH = ("sh", "-c", "case $2 in up*) exit 0;; slow) sleep 60;; *) exit 255;; esac")


@pytest.fixture
def membership(tmp_path, monkeypatch):
    def make(hosts, **wishes):
        elastic = Elastic(**{"min_ranks": 1, "poll_s": 0.05, "cooldown_s": 0.3, "wait_s": 1.0, **wishes})
        launch = {"hosts": hosts, "num_ranks": len(hosts) or 4, "elastic": elastic.model_dump()}
        job = Job.model_validate({"name": "j", "task": "digits", "launch": launch})
        make.request = request = LaunchRequest(job, "run", tmp_path, tmp_path)
        request.log_dir.mkdir(exist_ok=True)
        monkeypatch.setattr(LaunchRequest, "remote_shell", SSH)
        return Membership(request, elastic, print)

    return make


def test_hosts_that_answer_are_used_in_the_order_of_the_list():
    started = monotonic()

    assert answering(["up2:1", "down:1", "up1:2"], SSH, Event()) == ["up2:1", "up1:2"]
    assert monotonic() - started < 5


def test_looking_at_hosts_is_not_ended_by_ctrl_c(tmp_path):
    """The terminal sends it to everything in the launcher's session."""
    ssh = ("sh", "-c", f"ps -o sid= -p $$ > {tmp_path}/session; echo $$ > {tmp_path}/process")

    answering(["a:1"], ssh, Event())

    session, process = (int((tmp_path / name).read_text()) for name in ("session", "process"))
    assert session == process != os.getsid(0)


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
        (tmp_path / "hosts").write_text("a\nb slots=4\n# c\na:3\nd slots=0\n")

        assert discover(f"cat {tmp_path}/hosts", 2) == ["a:3", "b:4"]

    def test_may_be_empty(self):
        assert discover("true", 1) == []

    @pytest.mark.parametrize(
        "command", ["false", "no-such-command", "echo 'not a host!'", "echo -V", "'", ""]
    )
    def test_says_what_is_wrong(self, command):
        with pytest.raises(LaunchError, match=r"launch\.elastic\.discover: "):
            discover(command, 1)


class TestWaiting:
    def test_ends_at_once_when_all_are_there(self, membership):
        assert membership(["up1:1", "up2:1"], cooldown_s=60.0).wait(print) == ["up1:1", "up2:1"]

    def test_gives_the_others_a_while(self, membership):
        started = monotonic()

        assert membership(["up1:1", "down:1"]).wait(print) == ["up1:1"]
        assert monotonic() - started >= 0.3

    def test_ends_with_an_error_that_names_those_missing(self, membership):
        with pytest.raises(
            LaunchError, match="room for 1 ranks; at least 2 are required; no answer from down"
        ):
            membership(["up1:1", "down:1"], min_ranks=2).wait(print)

    def test_does_not_take_a_failing_command_for_an_empty_list(self, membership):
        with pytest.raises(
            LaunchError,
            match="room for 0 ranks; at least 1 are required; launch.elastic.discover: false: exit code 1",
        ):
            membership([], discover="false", max_ranks=4).wait(print)

    def test_looks_as_often_as_the_job_says(self, membership, monkeypatch):
        slept = []
        monkeypatch.setattr(module, "sleep", slept.append)
        monkeypatch.setattr(module, "monotonic", lambda: sum(slept))
        monkeypatch.setattr(module, "answering", lambda *_: [])

        with pytest.raises(
            LaunchError, match="after 1 s, there is room for 0 ranks; at least 1 are required"
        ):
            membership(["down:1"], min_ranks=1, poll_s=0.4, wait_s=1.0).wait(print)

        assert slept == pytest.approx([0.4, 0.4, module.POLL_S])

    def test_is_not_needed_without_hosts(self, membership):
        assert membership([]).wait(print) == []


def rested(membership):
    return membership._outside_cooldown(membership._listed_hosts()[0])


def test_a_host_that_has_failed_is_used_all_the_same_when_there_are_too_few(membership):
    found = membership(["up1:1", "up2:1"], min_ranks=2, cooldown_s=60.0)
    found.mark_lost(["up2"])

    assert found.wait(print) == ["up1:1", "up2:1"]


def test_a_host_that_fails_again_is_left_alone_twice_as_long(membership, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    found = membership(["up1:1", "up2:1"], cooldown_s=10.0)

    found.mark_lost(["up2"])
    assert rested(found) == ["up1:1"]
    now[0] += 10
    assert rested(found) == ["up1:1", "up2:1"]
    found.mark_lost(["up2"])
    now[0] += 19
    assert rested(found) == ["up1:1"]
    now[0] += 1
    assert rested(found) == ["up1:1", "up2:1"]


def test_this_machine_alone_is_never_left_alone(membership):
    found, said = membership([]), []
    found._report = said.append

    found.mark_lost(["localhost"])

    assert (said, found._not_before_s) == ([], {})


def test_a_host_that_was_lost_is_told_with_its_pause(membership):
    found, said = membership(["up1:1", "up2:1"], cooldown_s=10.0), []
    found._report = said.append

    found.mark_lost(["up2"])
    found.mark_lost(["up2"])

    assert said == [f"up2 is excluded for {pause_s} s" for pause_s in (10, 20)]


def test_a_host_that_always_fails_is_left_alone_for_a_bounded_time(membership, monkeypatch):
    monkeypatch.setattr(module, "monotonic", lambda: 0.0)
    found = membership(["up1:1"], cooldown_s=1.0)
    for _ in range(module.MAX_COUNTED_LOSSES + 5):
        found.mark_lost(["up1"])

    assert found._not_before_s == {"up1": 2.0 ** (module.MAX_COUNTED_LOSSES - 1)}


def test_losses_are_forgotten_when_ranks_have_got_on(membership, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    found = membership(["up1:1", "up2:1"], cooldown_s=10.0)
    found.mark_lost(["up2"])
    found.forget_losses()
    found.mark_lost(["up2"])
    now[0] += 10

    assert rested(found) == ["up1:1", "up2:1"]


def rewrite(file, text):
    """Replace a file at once: a reader sees the old text or the new, never an empty file."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.rename(file)


class TestWhileRanksRun:
    """The list is a file that changes; ranks are asked to leave when they should go on elsewhere."""

    @pytest.fixture
    def listed(self, tmp_path):
        file = tmp_path / "hosts"
        file.write_text("up1\nup2\n")
        return file

    def asked(self, membership, listed, change, *, seconds=2.0, used=("up1:1", "up2:1"), **wishes):
        """Return whether ranks were asked to leave after a change of the list, and what was said."""
        said = []
        wishes = {"discover": f"cat {listed}", "max_ranks": 3, "cooldown_s": 0.01, **wishes}
        found = membership([], **wishes)
        found._report = said.append
        attempt = on_hosts(membership.request, list(used), 0)
        leave = Event()
        with found.watching(attempt, leave.set):
            change()
            was_asked = leave.wait(seconds)
        return was_asked, said

    def test_nothing_happens_as_long_as_nothing_changes(self, membership, listed):
        assert self.asked(membership, listed, lambda: None, seconds=0.7) == (False, [])

    def test_a_host_that_is_taken_from_the_list_is_left(self, membership, listed):
        asked, said = self.asked(membership, listed, lambda: rewrite(listed, "up1\n"))

        assert asked
        assert said == ["elastic: up2 was removed from the host list; saving a checkpoint"]

    def test_a_host_that_is_added_and_answers_is_used(self, membership, listed):
        asked, said = self.asked(membership, listed, lambda: rewrite(listed, "up1\nup2\nup3\n"))

        assert asked
        assert said == ["elastic: up3 can join; saving a checkpoint"]

    def test_one_that_does_not_answer_is_not(self, membership, listed):
        change = lambda: rewrite(listed, "up1\nup2\ndown\n")  # noqa: E731

        assert self.asked(membership, listed, change, seconds=0.7) == (False, [])

    def test_nobody_is_added_before_the_last_start_has_paid(self, membership, listed):
        change = lambda: rewrite(listed, "up1\nup2\nup3\n")  # noqa: E731

        assert self.asked(membership, listed, change, seconds=0.7, cooldown_s=60.0) == (False, [])

    def test_nobody_is_added_to_as_many_as_the_job_wants(self, membership, listed):
        listed.write_text("up1\nup2\nup3\n")
        change = lambda: rewrite(listed, "up1\nup2\nup3\nup4\n")  # noqa: E731

        used = ("up1:1", "up2:1", "up3:1")
        assert self.asked(membership, listed, change, seconds=0.7, used=used) == (False, [])

    def test_a_list_that_cannot_be_read_is_told_once_and_changes_nothing(self, membership, listed):
        asked, said = self.asked(membership, listed, listed.unlink, seconds=0.7)

        assert not asked
        assert len(said) == 1
        assert "No such file or directory" in said[0]

    def test_a_list_that_is_back_is_looked_at_again(self, membership, listed):
        def change():
            listed.unlink()
            sleep(0.4)
            rewrite(listed, "up1\n")

        asked, said = self.asked(membership, listed, change)

        assert asked
        assert said[1:] == [
            "elastic: the discovery command works again",
            "elastic: up2 was removed from the host list; saving a checkpoint",
        ]


def test_what_ranks_get_is_a_job_that_they_accept(tmp_path):
    settings = {"a": {"python": "/opt/a/python"}, "b": {"python": "/opt/b/python"}}
    launch = {
        "hosts": ["a:2", "b:2"],
        "host_settings": settings,
        "elastic": {"min_ranks": 1, "max_ranks": 3},
    }
    (tmp_path / "job.json").write_text(json.dumps({"name": "j", "task": "digits", "launch": launch}))
    request = resolve(load_job(tmp_path / "job.json", environ={}))

    for hosts, num_ranks in ((["b:2"], 2), (["a:2", "b:2"], 3)):
        attempt = on_hosts(request, hosts, 1)
        (tmp_path / "attempt.json").write_text(dump_job(attempt.job))
        again = load_job(tmp_path / "attempt.json", environ={})
        assert again.launch.num_ranks == num_ranks
        assert set(again.launch.host_settings) == {entry[0] for entry in hosts}
    assert request.num_ranks == 3


def test_an_elastic_job_without_hosts_has_as_many_ranks_as_it_may(tmp_path):
    document = {"name": "j", "task": "digits", "launch": {"elastic": {"min_ranks": 1, "max_ranks": 4}}}
    (tmp_path / "job.json").write_text(json.dumps(document))

    request = resolve(load_job(tmp_path / "job.json", environ={}))

    assert (request.num_ranks, request.job.launch.launcher) == (4, "horovodrun")


def test_a_signal_that_came_before_is_not_forgotten():
    with deferred_signals() as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        with (
            pytest.raises(LaunchError, match="signal 15"),
            interrupted_by_signals(lambda number: LaunchError(f"signal {number}"), asked),
        ):
            raise AssertionError("not reached")


def test_of_signals_that_came_before_the_first_counts():
    with pytest.raises(LaunchError, match="signal 15"):
        interrupted_by_signals(
            lambda number: LaunchError(f"signal {number}"), [signal.SIGTERM, signal.SIGUSR1]
        ).__enter__()


def test_a_signal_before_ranks_start_is_an_error_of_its_own():
    with (
        pytest.raises(LaunchError, match="signal 10"),
        interrupted_by_signals(lambda number: LaunchError(f"signal {number}")),
    ):
        os.kill(os.getpid(), signal.SIGUSR1)

    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
