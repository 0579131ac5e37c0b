"""The Python client: what a handle reads of a run, however the run is started."""

from __future__ import annotations

import re
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from support.fake_launcher import FakeLauncher, progress, summary, write_events

from horovod_train import client
from horovod_train.client import JobHandle
from horovod_train.config.schema import Job
from horovod_train.errors import ConfigError, JobFailedError, UserError
from horovod_train.events.types import Evaluation, Notice
from horovod_train.events.wire import to_line
from horovod_train.launch import submit as submitting
from horovod_train.launch.base import JobStatus, Submitted

DIGITS = {"name": "j", "task": "digits", "train": {"epochs": 2}}


@pytest.fixture
def launcher(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    made = FakeLauncher()
    for module in (client, submitting):
        monkeypatch.setattr(module, "launcher_named", lambda name: made)
    return made


def handle(folder, events=()):
    write_events(folder, *events)
    return JobHandle(client.LocalJob(Submitted("j-1", "fake", "1", folder, 5.0)))


class TestSubmit:
    def test_takes_a_mapping_and_overrides_and_changes_neither(self, launcher):
        given = deepcopy(DIGITS)

        made = client.submit(given, {"train.epochs": 7, "launch.num_ranks": 2})

        (request,) = launcher.requests
        assert (request.job.train.epochs, request.num_ranks) == (7, 2)
        assert given == DIGITS
        assert made.id == request.job_id
        assert [each.id for each in client.jobs()] == [made.id]
        assert client.job("j").folder == request.log_dir

    def test_takes_values_of_numpy(self, launcher):
        client.submit(DIGITS, {"train.epochs": np.int64(3), "launch.hosts": (), "run_dir": Path("here")})

        (request,) = launcher.requests
        assert (request.job.train.epochs, Path(request.job.run_dir).name) == (3, "here")

    def test_takes_a_job_a_file_and_the_name_of_a_shipped_one(self, launcher, tmp_path):
        (tmp_path / "j.yaml").write_text("name: of-a-file\ntask: digits\n")
        for given in (Job.model_validate(DIGITS), tmp_path / "j.yaml", "digits"):
            client.submit(given)

        assert [request.job.name for request in launcher.requests] == ["j", "of-a-file", "digits"]

    def test_environment_variables_change_files_only(self, launcher, monkeypatch):
        monkeypatch.setenv("HOROVOD_TRAIN__TRAIN__EPOCHS", "3")
        client.submit(DIGITS)
        client.submit("digits")

        assert [request.job.train.epochs for request in launcher.requests] == [2, 3]

    def test_tells_all_problems_and_where_a_value_comes_from(self, launcher):
        with pytest.raises(ConfigError) as caught:
            client.submit({**DIGITS, "optimizer": {"nam": "sgd"}}, {"train.epochs": 0})

        assert {problem.path for problem in caught.value.problems} == {"optimizer.nam", "train.epochs"}
        with pytest.raises(ConfigError, match="the overrides"):
            client.submit(DIGITS, {"train.epochs.x": 1})

    def test_refuses_what_is_no_job(self, launcher):
        with pytest.raises(UserError, match=r"t.py is a script"):
            client.submit("t.py")
        with pytest.raises(UserError, match="no job 'none'"):
            client.job("none")


class TestAHandle:
    def test_has_series_in_which_repeated_steps_are_the_new_ones(self, launcher, tmp_path):
        events = [
            progress(1, 9.0),
            progress(2, 8.0, grad_norm=3.0),
            Evaluation(epoch=0, metrics={"accuracy": 0.5}),
            progress(3, float("nan")),
            progress(2, 7.0),  # back to a checkpoint
            Evaluation(epoch=0, metrics={"accuracy": 0.6}),
        ]

        series = handle(tmp_path, events).metrics()

        assert series["loss"] == [(1, 9.0), (2, 7.0)]
        assert series["lr"] == [(1, 0.1), (2, 0.1)]
        assert series["eval/accuracy"] == [(2, 0.6)]
        assert series["grad_norm"] == [(2, 3.0)]
        assert "samples_per_s" not in series

    def test_has_a_result_when_the_job_has_succeeded(self, launcher, tmp_path):
        made = handle(
            tmp_path, [progress(4, 0.5), summary(steps=4, metrics={"a": 1.0}, checkpoint="/c/step-4")]
        )
        launcher.now = JobStatus("succeeded", 0)

        result = made.result()

        assert (result.metrics, str(result.checkpoint), result.num_steps) == ({"a": 1.0}, "/c/step-4", 4)

    @pytest.mark.parametrize(("state", "code"), [("preempted", 75), ("failed", 3), ("cancelled", 143)])
    def test_has_an_error_with_the_code_of_the_job_otherwise(self, launcher, tmp_path, state, code):
        launcher.now = JobStatus(state, code, "because")

        with pytest.raises(JobFailedError, match=f"j-1: {state}. because") as caught:
            handle(tmp_path).result()

        assert caught.value.exit_code == code
        assert caught.value.status.state == state

    def test_waits_as_long_as_it_may(self, launcher, tmp_path):
        made = handle(tmp_path)

        with pytest.raises(TimeoutError, match="j-1 has not ended within 0.05 s"):
            made.wait(0.05)

        assert made.state == "running"

    def test_drains_and_cancels(self, launcher, tmp_path):
        handle(tmp_path).drain()
        launcher.now = JobStatus("running")
        assert handle(tmp_path).cancel().exit_code == 143
        handle(tmp_path).cancel(now=True)

        assert launcher.asked == ["drain", "stop", "kill"]

    def test_reads_events_from_the_output_where_the_folder_is_elsewhere(self, launcher, tmp_path):
        launcher.has_local_files = False
        launcher.lines = [
            to_line(progress(1, 2.0), 0),
            "[1,1]<stdout>:hello",
            to_line(Notice(text="slow"), 1),
        ]
        made = JobHandle(client.LocalJob(Submitted("j-1", "fake", "1", tmp_path / "none", 5.0)))

        assert made.metrics()["loss"] == [(1, 2.0)]
        assert [(record.time_unix_s, record.rank) for record in made.events()] == [(5.0, 0), (5.0, 1)]
        assert list(made.logs())[-2:] == ["[rank 1] hello", "rank 1: slow"]

    def test_shows_itself_in_a_notebook(self, launcher, tmp_path):
        launcher.now = JobStatus("running", message="<b>")
        empty = handle(tmp_path)._repr_html_()
        shown = handle(tmp_path, [progress(step, 1.0 / step) for step in range(1, 5)])._repr_html_()

        assert "no step yet" in empty
        assert "<svg" not in empty
        assert "&lt;b&gt;" in shown
        assert "step 4, loss 0.25" in shown
        assert shown.count("<polyline") == 1


def test_is_imported_quickly_and_without_a_framework():
    program = (
        "import sys, horovod_train as ht; ht.submit; ht.jobs; "
        "heavy = {'torch', 'tensorflow', 'jax', 'keras', 'mxnet', 'horovod', 'numpy'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_documentation_lists_every_call():
    page = (Path(__file__).parents[2] / "docs" / "service.md").read_text()
    table = page[page.index("| call |") : page.index("- **Errors**")]
    public = {name for name in dir(JobHandle) if not name.startswith("_")}

    assert set(re.findall(r"`job\.(\w+)", table)) == public
    assert set(re.findall(r"`ht\.(\w+)", table)) == {"submit", "job", "jobs", "Client"}
