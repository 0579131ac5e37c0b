"""After which failures a job starts again, when, and on which hosts. The starts are scripted."""

from __future__ import annotations

import json
import os
import signal

import pytest
from test_elastic_runs import Plans, Shown, left, lost

from horovod_train.config.launch import Restarts
from horovod_train.config.schema import Job
from horovod_train.errors import LaunchError, PreemptedError
from horovod_train.launch.jobs import StateFile
from horovod_train.launch.submit import resolve
from horovod_train.launch.supervise import elastic as module
from horovod_train.launch.supervise.elastic import RESTARTS_FILE, run_again
from horovod_train.launch.supervise.restarts import RestartPolicy


def failed(message="ValueError: 3", cause="task", *, step=7, exit_code=1, has_saved=False, hosts=()):
    error = LaunchError(message, hint="look")
    error.cause, error.step, error.exit_code = cause, step, exit_code
    error.has_saved, error.hosts = has_saved, hosts
    return error


class TestThePolicy:
    @pytest.fixture
    def policy(self, tmp_path):
        def made(**settings):
            return RestartPolicy(Restarts(**settings), tmp_path / "restarts.json", lambda: self.time_s)

        self.time_s = 1e9
        return made

    @pytest.mark.parametrize(
        "error",
        [
            failed(cause="configuration", exit_code=2),
            failed(cause="out_of_memory", exit_code=2),
            failed(cause="data", exit_code=2),
            failed(cause="engine"),
            failed(cause="world"),
            failed(cause="other", exit_code=3),
            failed(cause="other", exit_code=130),
        ],
    )
    def test_no_machine_is_the_cause_of_some_errors(self, policy, error):
        with pytest.raises(LaunchError) as caught:
            policy().after(error, [])

        assert caught.value is error
        assert error.hint.startswith("not started again: ")
        assert error.hint.endswith("; look")

    @pytest.mark.parametrize(
        "cause", ["task", "other", "gpu", "nccl", "checkpoint", "lost", "replicas_differ"]
    )
    def test_others_may_pass(self, policy, cause):
        restart = policy(max=3).after(failed("it failed\nin detail", cause), [])

        assert (restart.number, restart.most, restart.pause_s, restart.reason) == (1, 3, 5.0, "it failed")

    def test_the_same_error_after_the_same_step_is_not_repeated_a_third_time(self, policy):
        made = policy()
        made.after(failed(step=7), failed(step=7).hosts)
        made.after(failed(step=8), failed(step=8).hosts)
        made.after(failed("KeyError: 3", step=7), failed("KeyError: 3", step=7).hosts)
        with pytest.raises(LaunchError) as caught:
            made.after(failed(step=7), failed(step=7).hosts)

        assert "the same error was raised twice after step 7" in caught.value.hint

    def test_the_same_error_is_recognized_whichever_ranks_report_it_first(self, policy):
        made = policy()
        first, second = failed("ranks 0-3 on a: KeyError: 0x7f3a"), failed("ranks 0-2 on a: KeyError: 0x7f9b")
        first.failure, second.failure = "KeyError: 0x7f3a", "KeyError: 0x7f9b"
        made.after(first, [])
        with pytest.raises(LaunchError, match="KeyError"):
            made.after(second, [])

    def test_hosts_that_cannot_be_used_are_tried_twice(self, policy):
        """They have answered before: it is their environment."""
        made = policy()
        errors = [lost("a"), lost("a")]
        for error in errors:
            error.was_before_start = True
        made.after(errors[0], ["a"])
        with pytest.raises(LaunchError) as caught:
            made.after(errors[1], ["a"])
        assert "the same error was raised twice before the first step" in caught.value.hint

    def test_a_rank_may_be_killed_twice_after_the_same_step(self, policy):
        made = policy()

        assert [made.after(lost("a"), lost("a").hosts).number for _ in range(4)] == [1, 2, 3, 4]

    def test_failures_count_within_a_window(self, policy):
        made = policy(max=2, window_h=1)
        made.after(lost(), lost().hosts)
        self.time_s += 1800
        made.after(lost(), lost().hosts)
        with pytest.raises(LaunchError) as caught:
            made.after(lost(), lost().hosts)
        assert "2 restarts within 1 h (launch.restarts.max)" in caught.value.hint
        self.time_s += 3601

        assert made.after(lost(), lost().hosts).number == 1

    def test_pauses_double_until_there_is_a_checkpoint(self, policy):
        made = policy(backoff_s=[2, 15])
        pauses = [made.after(lost(), lost().hosts).pause_s for _ in range(5)]

        assert pauses == [2, 4, 8, 15, 15]
        assert made.after(lost(has_saved=True), lost(has_saved=True).hosts).pause_s == 2

    def test_a_host_that_has_failed_twice_is_named_with_the_reasons(self, policy):
        made = policy()
        made.after(lost("a"), lost("a").hosts)
        made.after(
            failed("rank 3's GPU: ECC", "gpu", hosts=["b"]),
            failed("rank 3's GPU: ECC", "gpu", hosts=["b"]).hosts,
        )
        assert made.failed_hosts() == {}
        made.after(lost("a", "c"), lost("a", "c").hosts)

        assert made.failed_hosts() == {"a": ["a rank was killed"] * 2}

    def test_another_launcher_of_the_run_goes_on_counting(self, policy):
        """Kubernetes and Slurm may start the launcher again after it has given up."""
        policy(max=2).after(failed(), [])
        with pytest.raises(LaunchError, match="ValueError"):
            policy(max=2).after(failed(), [])
        with pytest.raises(LaunchError) as caught:
            policy(max=2).after(failed("another"), [])

        assert "2 restarts within" in caught.value.hint

    @pytest.mark.parametrize("content", ["", "{", "[1]", '[{"a": 1}]'])
    def test_a_damaged_file_is_no_reason_to_end(self, policy, tmp_path, content):
        (tmp_path / "restarts.json").write_text(content)

        assert policy().after(lost(), []).number == 1


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Train a job; each start ends as the list says, the last one well."""

    def run(*ends, hosts=(), num_ranks=1, restarts=None, pending_signals=()):
        starts, ends = [], list(ends)

        def run_attempt(*arguments):
            starts.append(arguments[1])
            if ends:
                raise ends.pop(0)

        monkeypatch.setattr(module, "run_attempt", run_attempt)
        settings = {"backoff_s": [0.01, 0.02], **(restarts or {})}
        launch = {
            "restarts": settings,
            "hosts": list(hosts),
            "num_ranks": num_ranks,
            "network_interface": "lo",
        }
        job = Job.model_validate({"name": "j", "task": "digits", "run_dir": str(tmp_path), "launch": launch})
        request = resolve(job, "run-1")
        request.log_dir.mkdir(parents=True, exist_ok=True)
        run.console, run.state, run.events = Shown(), StateFile(request.log_dir), []
        run.failures = request.log_dir / RESTARTS_FILE
        run_again(Plans(), request, run.console, run.state, pending_signals, record=run.events.append)
        return starts

    return run


@pytest.fixture
def _every_host_answers(monkeypatch, tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexit 0\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def names(starts):
    return [[host.name for host in start.hosts] for start in starts]


def test_the_ranks_start_again_after_a_failure_and_it_is_told(train):
    starts = train(failed(), lost())

    assert [start.attempt for start in starts] == [0, 1, 2]
    assert [event.kind for event in train.events] == ["restart"] * 2
    assert "restart 1 of 10 in 0.01 s, after: ValueError: 3" in train.console.lines[0]
    assert [each["message"] for each in json.loads(train.failures.read_text())] == [
        "ValueError: 3", "a rank was killed",
    ]  # fmt: skip


def test_a_job_that_was_stopped_does_not_start_again(train):
    with pytest.raises(PreemptedError):
        train(left(stopped_by=signal.SIGTERM))
    stopped = failed("stopped by signal 15, before the ranks had saved", "other", exit_code=143)
    stopped.was_stopped = True
    with pytest.raises(LaunchError, match="stopped"):
        train(stopped)


@pytest.mark.usefixtures("_every_host_answers")
def test_hosts_beyond_the_ranks_are_spares(train):
    starts = train(lost("b"), hosts=["a:2", "b:2", "c:2"], num_ranks=4)

    assert names(starts) == [["a", "b"], ["a", "c"]]
    assert {start.num_ranks for start in starts} == {4}


@pytest.mark.usefixtures("_every_host_answers")
def test_what_happens_on_all_hosts_is_the_fault_of_none(train):
    starts = train(lost("a", "b"), lost("a", "b"), hosts=["a:1", "b:1", "c:1"], num_ranks=2)

    assert names(starts) == [["a", "b"]] * 3


@pytest.mark.usefixtures("_every_host_answers")
def test_a_host_that_has_failed_twice_is_used_if_there_is_no_spare_one(train, monkeypatch):
    monkeypatch.setattr(module.Membership, "mark_lost", lambda *_: None)
    starts = train(lost("a"), lost("a"), hosts=["a:1", "b:1"], num_ranks=2)

    assert names(starts) == [["a", "b"]] * 3
    assert "a has failed 2 times, and there is no spare host" in train.console.lines


def test_a_rank_that_was_preempted_ends_a_job_that_is_not_elastic(train):
    with pytest.raises(PreemptedError):
        train(left())


@pytest.mark.usefixtures("_every_host_answers")
def test_a_host_that_has_failed_twice_is_not_used_again(train, monkeypatch):
    monkeypatch.setattr(module.Membership, "mark_lost", lambda *_: None)  # no cooldown
    starts = train(lost("a"), lost("a"), lost("b"), hosts=["a:1", "b:1", "c:1"], num_ranks=2)

    assert names(starts) == [["a", "b"], ["a", "b"], ["b", "c"], ["b", "c"]]
    assert "a is not used any more: a rank was killed; a rank was killed" in train.console.lines


def test_a_signal_is_heard_during_the_pause(train):
    with pytest.raises(PreemptedError, match="while no ranks were running"):
        train(lost(), pending_signals=[signal.SIGTERM])
