"""Every verb of the client on MPIJobs, against the API server of the tests: here and through a server."""

from __future__ import annotations

import io
import json
import re

import pytest
from click.testing import CliRunner
from rich.console import Console
from support.api import served as served_api
from support.fake_launcher import progress, summary
from support.mpijobs import described
from support.waiting import wait_until

import horovod_train as ht
from horovod_train import client
from horovod_train.events.wire import summary_lines
from horovod_train.launch.console import JobConsole
from horovod_train.plugins.kubernetes import launcher as module
from horovod_train.plugins.serve import api as streams
from horovod_train.plugins.serve.page import serve_page
from horovod_train.plugins.study.command import study_command as study

SUBMIT = "submit-token-0123456789"


def output_of_a_pod(ended):
    """What the launcher's pod prints: that of ``run`` without a terminal, with events."""
    output = io.StringIO()
    console = JobConsole(Console(file=output, width=80), has_events=True)
    console.show(progress(1, 2.0), 0)
    console.print("[rank 1] hello")
    console.show(progress(2, 1.0).model_copy(update={"num_steps": 2}), 0)
    console.show(ended, 0)
    return output.getvalue()


ENDED = summary(steps=2, metrics={"accuracy": 0.5}, checkpoint="/runs/step-2")
OUTPUT = output_of_a_pod(ENDED)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(client.OutputTail, "pause_s", 0.05)
    monkeypatch.setattr(streams, "STATUS_INTERVAL_S", 0.05)
    monkeypatch.setattr("horovod_train.plugins.serve.work.AGE_S", 0.0)
    monkeypatch.setattr(module, "POLL_S", 0.05)
    monkeypatch.setattr(module.MpiJobLauncher, "poll_s", 0.05)
    with served_api(tmp_path, monkeypatch) as api:
        yield api


@pytest.fixture(params=["this machine", "a server"])
def api(request, cluster, tmp_path):
    if request.param == "this machine":
        yield ht
        return
    tokens = tmp_path / "tokens"
    tokens.write_text(f"submit {SUBMIT}\n")
    tokens.chmod(0o600)
    server = serve_page(
        [tmp_path], [], host="127.0.0.1", port=0, token="x" * 16, token_file=tokens, max_role="submit"
    )
    yield ht.Client(f"http://127.0.0.1:{server.port}", SUBMIT)
    server.close()


def trains(cluster, job):
    cluster.add_condition(job, "Created")
    cluster.add_condition(job, "Running")
    cluster.add_launcher(job, OUTPUT)


def succeeds(cluster, job):
    trains(cluster, job)
    cluster.add_condition(job, "Succeeded")


def test_a_job_that_succeeds_has_output_events_metrics_and_a_result(api, cluster):
    cluster.operator = succeeds
    job = api.submit(described("cpu"), key="a")

    assert api.submit(described("cpu"), key="a").id == job.id
    assert job.launcher == "mpijob"
    assert job.wait(20).state == "succeeded"
    assert [line for line in job.logs(follow=True) if "hello" in line] == ["[rank 1] hello"]
    assert not [line for line in job.logs() if "@horovod-train" in line]
    assert [line for line in job.logs() if line.startswith("trained ")] == [next(summary_lines(ENDED))]
    assert [record.event.kind for record in job.events()] == ["progress", "progress", "summary"]
    assert job.metrics()["loss"] == [(1, 2.0), (2, 1.0)]
    result = job.result()
    assert (result.metrics, str(result.checkpoint), result.num_steps) == (
        {"accuracy": 0.5},
        "/runs/step-2",
        2,
    )
    assert cluster.names("MPIJob") == [job.id.partition("-")[0]]


def test_a_study_of_mpijobs_has_the_results_of_their_pods(cluster, tmp_path):
    losses = {"linear-r1-s0": 0.5, "linear-r1-s1": 0.52, "linear-r2-s0": 0.8, "linear-r2-s1": 0.83}
    trained, runs = [], set()

    def succeeds(cluster, job):
        name = job["metadata"]["name"]
        trained.append(name)
        cluster.add_condition(job, "Created")
        runs.update(
            re.findall(r'"run_dir": *"([^"]+)', json.dumps(list(cluster.objects.values())).replace("\\", ""))
        )
        loss = losses[next(each for each in losses if each in name)]
        cluster.add_launcher(job, output_of_a_pod(summary(steps=8, epochs=2.0, metrics={"loss": loss})))
        cluster.add_condition(job, "Succeeded")

    cluster.operator = succeeds
    job, output = tmp_path / "job.json", tmp_path / "study"
    job.write_text(json.dumps(described("cpu", train={"epochs": 2})))
    options = "--ranks 1,2 --seeds 2 --policies linear --metric loss:min"
    command = [str(job), *options.split(), "--output", str(output)]
    first = CliRunner().invoke(study, command)
    again = CliRunner().invoke(study, command)

    assert (first.exit_code, again.exit_code) == (0, 0), first.output + again.output
    assert len(trained) == 4
    assert "4 of 4 trials have results already" in again.output
    table = (output / "table.md").read_text()
    assert "0.51" in table
    assert "0.815" in table
    assert runs == {"/data/runs/digits/study"}, "on the volume, not where the table is"


def test_logs_of_a_job_whose_pods_are_not_there_yet_are_empty(api, cluster):
    cluster.operator = lambda cluster, job: cluster.add_condition(job, "Created")
    job = api.submit(described("cpu"))

    assert list(job.logs()) == []


def test_a_job_is_drained_and_another_is_cancelled(api, cluster):
    cluster.operator = trains
    job = api.submit(described("cpu"))
    assert job.state == "running"

    job.drain()
    wait_until(lambda: job.state == "preempted", 20)
    with pytest.raises(ht.JobFailedError) as caught:
        job.result(20)
    again = api.submit(described("cpu"))
    status = again.cancel()

    assert caught.value.exit_code == 75
    assert (status.state, status.exit_code) == ("cancelled", 143)
    wait_until(lambda: not cluster.names("MPIJob"), 20)
    assert {each.id for each in api.jobs()} == {job.id, again.id}
    assert api.job(again.id).state == "cancelled"


def test_a_job_that_is_rejected_is_not_listed_and_may_be_submitted_again(api, cluster):
    cluster.refuses = {"NetworkPolicy": (403, "networkpolicies is forbidden")}
    with pytest.raises(ht.errors.LaunchError, match="networkpolicies is forbidden"):
        api.submit(described("cpu"), key="a")
    assert api.jobs() == []
    cluster.refuses, cluster.operator = {}, succeeds

    assert api.submit(described("cpu"), key="a").wait(20).state == "succeeded"
