"""Elastic jobs from start to start: what is counted, told and given up. The starts are scripted."""

from __future__ import annotations

import os
import signal

import pytest

from horovod_train.config.launch import Elastic
from horovod_train.config.schema import Job
from horovod_train.errors import LaunchError, LostError, PreemptedError
from horovod_train.launch.base import LaunchPlan
from horovod_train.launch.jobs import LOG_FILE, StateFile
from horovod_train.launch.submit import resolve
from horovod_train.launch.supervise import elastic as module
from horovod_train.launch.supervise.elastic import on_hosts, run_again


def lost(*hosts, has_saved=False):
    error = LostError("a rank was killed", hint="look", hosts=hosts)
    error.has_saved = has_saved
    return error


def left(stopped_by=None):
    error = PreemptedError("saved")
    error.stopped_by = stopped_by
    return error


class Shown:
    def __init__(self):
        self.lines = []

    def print(self, text):
        self.lines.append(text)


class Plans:
    def plan(self, request):
        return LaunchPlan((request.rank_command,))


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Train an elastic job on this machine; each start ends as the list says, the last one well."""

    def run(*ends, pending_signals=(), discover="echo localhost:3", **wishes):
        starts, ends = [], list(ends)

        def run_attempt(
            launcher, attempt, plan, console, state, during_attempt, pending_signals, followers, record
        ):
            assert plan.argv == (attempt.rank_command,)
            with during_attempt(lambda: None):  # as while ranks run
                starts.append(attempt)
            if ends:
                raise ends.pop(0)

        monkeypatch.setattr(module, "run_attempt", run_attempt)
        wishes = {"min_ranks": 1, "max_ranks": 2, "poll_s": 0.05, "wait_s": 0.3, "cooldown_s": 0.01, **wishes}
        elastic = Elastic(discover=discover, **wishes)
        launch = {"elastic": elastic.model_dump(exclude_none=True)}
        job = Job.model_validate({"name": "j", "task": "digits", "run_dir": str(tmp_path), "launch": launch})
        run.request = request = resolve(job, "run-1")
        request.log_dir.mkdir(parents=True, exist_ok=True)
        run.console, run.state, run.starts = Shown(), StateFile(request.log_dir), starts
        run_again(Plans(), request, run.console, run.state, pending_signals)
        return starts

    return run


def test_a_job_that_nothing_happens_to_is_started_once(train):
    (start,) = train()

    assert (start.num_ranks, [host.name for host in start.hosts]) == (2, ["localhost"])
    assert train.console.lines == ["elastic: 2 ranks on localhost"]


def test_each_start_has_a_number_and_a_folder_of_its_own(train):
    starts = train(left(), lost())

    assert [start.attempt for start in starts] == [0, 1, 2]
    assert len({start.stage for start in starts}) == 3


def test_what_is_told_is_in_the_log_as_well(train):
    train(lost())

    assert (train.request.log_dir / LOG_FILE).read_text() == "".join(
        f"{line}\n" for line in train.console.lines
    )
    assert train.console.lines[1].startswith("elastic: a rank was killed")
    assert train.console.lines[2] == (
        "elastic: resuming from the newest checkpoint (1 consecutive losses without a new checkpoint)"
    )


def test_losses_in_a_row_without_a_new_checkpoint_are_given_up_with_the_last_one_told(train):
    with pytest.raises(LostError, match="that was loss 3 in a row without a new checkpoint") as caught:
        train(lost("a"), lost("a"), lost("b"), max_failures=2)

    assert len(train.starts) == 3
    assert caught.value.hosts == ("b",)
    assert caught.value.hint == "look; launch.elastic.max_failures is 2"
    assert isinstance(caught.value.__cause__, LostError)


@pytest.mark.parametrize("between", [left(), lost(has_saved=True)])
def test_losses_are_counted_anew_when_ranks_have_got_on(train, between):
    starts = train(lost(), lost(), between, lost(), lost(), max_failures=2)

    assert len(starts) == 6


@pytest.mark.parametrize(("has_saved", "pauses_s"), [(True, ["0.01"] * 3), (False, ["0.01", "0.02", "0.04"])])
def test_a_host_is_left_alone_for_longer_only_if_ranks_have_not_got_on(train, has_saved, pauses_s):
    train(*[lost("a", has_saved=has_saved) for _ in range(3)])

    told = [line for line in train.console.lines if "is excluded" in line]
    assert told == [f"a is excluded for {pause_s} s" for pause_s in pauses_s]


def test_ranks_that_were_asked_to_leave_for_other_hosts_start_again_and_others_do_not(train):
    with pytest.raises(PreemptedError):
        train(left(), left(stopped_by=signal.SIGTERM))

    assert len(train.starts) == 2


def test_an_error_that_no_host_is_to_blame_for_ends_the_job(train):
    with pytest.raises(LaunchError, match="no such task"):
        train(LaunchError("no such task"))

    assert len(train.starts) == 1


def test_what_it_waits_for_stands_in_its_state(train):
    with pytest.raises(LaunchError, match="room for 3 ranks; at least 5 are required"):
        train(min_ranks=5, max_ranks=8)

    state = train.state.read_recorded()
    assert state.state == "starting"
    assert state.message.startswith("waits for hosts: room for 3 ranks; at least 5 are required")


def test_a_signal_that_came_before_is_heard_while_it_waits(train):
    with pytest.raises(PreemptedError, match="while no ranks were running") as caught:
        train(pending_signals=[signal.SIGTERM])

    assert (caught.value.stopped_by, train.starts) == (signal.SIGTERM, [])


def test_a_host_that_was_lost_is_left_alone_for_a_while(train, monkeypatch, tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexit 0\n")  # every host answers
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    starts = train(lost("b"), discover="printf '%s:1\\n' a b c", max_ranks=3, cooldown_s=30)

    assert [[host.name for host in start.hosts] for start in starts] == [["a", "b", "c"], ["a", "c"]]


def test_what_ranks_get_names_only_the_hosts_that_take_part(tmp_path):
    launch = {
        "elastic": {"min_ranks": 1, "max_ranks": 3},
        "hosts": ["a:2", "b:2"],
        "host_settings": {"a": {"env": {"A": "1"}}, "b": {"env": {"B": "1"}}},
        "network_interface": "lo",
    }
    job = Job.model_validate({"name": "j", "task": "digits", "run_dir": str(tmp_path), "launch": launch})
    request = resolve(job, "run-1")

    one, both = on_hosts(request, ["b:2"], 1), on_hosts(request, ["a:2", "b:2"], 2)

    assert (one.num_ranks, list(one.job.launch.host_settings), one.attempt) == (2, ["b"], 1)
    assert (both.num_ranks, list(both.job.launch.host_settings), both.attempt) == (3, ["a", "b"], 2)
    assert one.job.launch.elastic is None
