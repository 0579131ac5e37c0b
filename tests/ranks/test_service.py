"""The server and its clients on real jobs: each verb, and servers and clients that are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import yaml
from support.launching import PROGRAMS, TIMEOUT_S, quick_job
from support.service import SUBMIT, Service, kill_after
from support.waiting import wait_until

import horovod_train as ht
from horovod_train.events.types import Opened, Progress

pytestmark = pytest.mark.ranks


@pytest.fixture
def described(tmp_path, monkeypatch):
    yield quick_job(tmp_path, monkeypatch)
    wait_until(lambda: not ranks_of(tmp_path), 30)


def ranks_of(folder):
    """Processes of jobs in a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if "run" in process.cmdline() and str(folder) in " ".join(process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def service(described, tmp_path):
    made = Service(tmp_path)
    yield made
    made.end()


@pytest.mark.parametrize("through", ["this machine", "a server"])
@pytest.mark.parametrize("num_ranks", [2, pytest.param(1, marks=pytest.mark.campaign)])
def test_every_verb_of_the_client(described, service, tmp_path, through, num_ranks):
    described["launch"]["num_ranks"] = num_ranks
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(described))
    server = (service.url, SUBMIT) if through == "a server" else ()

    done = subprocess.run(
        [sys.executable, PROGRAMS / "every_verb.py", tmp_path / "job.yaml", *server],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert f"launcher {'horovodrun' if num_ranks == 2 else 'local'}" in done.stdout


def starts_of(job):
    """How often a run was started."""
    return sum(isinstance(record.event, Opened) for record in job.events())


def use(client, described, number, seen):
    """Submit a job, follow it, and end it in one of four ways; note what was seen."""
    how = ("result", "drain", "cancel", "logs")[number % 4]
    name = f"job{number}"
    pause_s = 0.02 if how in ("result", "logs") else 0.2
    job = client.submit(
        {**described, "name": name, "metrics": {"enabled": False}}, {"task_args.pause_s": pause_s},
        key=f"key {number}",
    )  # fmt: skip
    if how == "drain":
        job.drain()
    elif how == "cancel":
        job.cancel()
    elif how == "logs":
        seen[name, "lines"] = list(job.logs(follow=True))
    seen[name] = job.id, job.wait(TIMEOUT_S)


def kill_at_random_moments(service, described, num_moments, seed):
    choice = random.Random(seed)
    seen, moments = {}, []
    for number in range(num_moments):
        # A submission takes about half a second, and a job about two.
        moments.append(choice.uniform(0.0, 0.8) if number % 2 else choice.uniform(0.0, 3.0))
        user = threading.Thread(target=use, args=(service.client(), described, number, seen))
        user.start()
        kill_after(service, moments[-1])
        user.join(TIMEOUT_S)
        assert not user.is_alive(), f"seed {seed}, moment {number}: {moments[-1]:.2f} s"

    jobs = {job.id: job for job in service.client().jobs()}
    told = f"seed {seed}, moments {moments}"
    assert len(jobs) == num_moments, told
    for number in range(num_moments):
        name = f"job{number}"
        job_id, status = seen[name]
        assert jobs[job_id].status() == status, told
        assert starts_of(jobs[job_id]) == (0 if "before it was started" in status.message else 1), told
        if number % 4 in (0, 3):
            assert status.state == "succeeded", told
            assert jobs[job_id].result().num_steps == 24, told
        if number % 4 == 3:
            assert seen[name, "lines"] == list(jobs[job_id].logs()), told
    assert len(list((service.folder / "runs").glob("*/*-*/events.jsonl"))) <= num_moments, told


def test_a_server_that_is_killed_loses_and_doubles_nothing(service, described):
    kill_at_random_moments(service, described, num_moments=6, seed=time.time_ns() % 1000)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_a_server_that_is_killed_at_fifty_moments_loses_and_doubles_nothing(service, described):
    kill_at_random_moments(service, described, num_moments=50, seed=time.time_ns() % 1000)


# What a workflow engine does, which starts a task again when its worker was lost.
WORKFLOW = """
import json, sys
import horovod_train as ht

described, server = json.loads(sys.argv[1]), sys.argv[2:]
api = ht.Client(*server) if server else ht
slow = {"train.epochs": 500}
jobs = {name: api.submit({**described, "name": name}, slow if name == "c" else {}, key=f"nightly {name}")
        for name in "abc"}
print("submitted", flush=True)
next(line for line in jobs["c"].logs(follow=True) if "loss" in line)
cancelled = jobs["c"].cancel()
results = {name: jobs[name].result(300).num_steps for name in "ab"}
losses = {name: len(jobs[name].metrics()["loss"]) > 0 for name in "abc"}
print(json.dumps([{name: job.id for name, job in jobs.items()}, results, losses, cancelled.state]))
"""


@pytest.mark.parametrize("through", ["this machine", "a server"])
def test_a_workflow_that_is_killed_and_started_again_has_each_job_once(described, service, through):
    described["metrics"] = {"enabled": False}
    server = (service.url, SUBMIT) if through == "a server" else ()
    command = [sys.executable, "-c", WORKFLOW, json.dumps(described), *server]
    for pause_s in (0.5, 0.8, 1.2, 2.0, 3.0):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as workflow:
            time.sleep(pause_s)
            os.kill(workflow.pid, signal.SIGKILL)
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)

    assert done.returncode == 0, done.stderr
    ids, results, losses, state = json.loads(done.stdout.splitlines()[-1])
    assert sorted(job.id for job in ht.jobs()) == sorted(ids.values())
    assert results == {"a": 24, "b": 24}
    assert all(losses.values())
    assert state == "cancelled"
    for job in ht.jobs():
        assert starts_of(job) == 1
        steps = [record.event.step for record in job.events() if isinstance(record.event, Progress)]
        assert steps == sorted(set(steps))
