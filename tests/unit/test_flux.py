"""Jobs in Flux, with a program that answers as Flux (``tests/support/flux.py``); ranks are started by MPI."""

from __future__ import annotations

import os
import signal
import time

import pytest
from support.flux import PARENT, Flux
from support.launching import PROGRAMS, environment

from horovod_train.config.rules import broken_rules
from horovod_train.config.schema import Job
from horovod_train.errors import LaunchError
from horovod_train.launch.base import Submitted
from horovod_train.launch.jobs import LOG_FILE, StateFile
from horovod_train.launch.submit import make_plan, resolve
from horovod_train.plugins.flux.launcher import FluxAllocationLauncher, FluxLauncher


@pytest.fixture
def flux(tmp_path, monkeypatch):
    (tmp_path / "flux").mkdir()
    flux = Flux(tmp_path / "flux")
    flux.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv(PARENT, str(flux.folder))
    return flux


def fields(folder, **launch):
    return {
        "name": "j",
        "framework": "numpy",
        "task": f"{PROGRAMS / 'quick_tasks.py'}:Noted",
        "task_args": {"notes": str(folder), "pause_s": 0.05, "num_samples": 60},
        "run_dir": str(folder / "runs"),
        "train": {"epochs": 100_000, "batch_size_per_rank": 4},
        "lr": {"base_lr": 0.01, "scaling": "none"},
        "metrics": {"enabled": False},
        "launch": {"launcher": "flux", "num_ranks": 2, **launch},
    }


@pytest.fixture
def request_(tmp_path):
    return resolve(Job.model_validate(fields(tmp_path)), "run-1")


def submit(request):
    launcher, plan = FluxLauncher(), make_plan(request)
    request.log_dir.mkdir(parents=True, exist_ok=True)
    return Submitted(request.job_id, "flux", launcher.submit(request, plan), request.log_dir, 0.0)


def until(is_so, why, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, why()
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("launch", "wanted"),
    [
        ({}, {"--nodes": "1", "--nslots": "2"}),
        ({"num_ranks": 8, "flux": {"ranks_per_node": 4}}, {"--nodes": "2", "--nslots": "8"}),
        ({"num_ranks": 5, "flux": {"ranks_per_node": 4}}, {"--nodes": "2", "--nslots": "8"}),
        ({"flux": {"options": ["--queue=gpu", "--time-limit=2h"]}}, {"--queue": "gpu", "--time-limit": "2h"}),
    ],
)
def test_a_job_asks_for_nodes_and_slots(flux, tmp_path, launch, wanted):
    job = submit(resolve(Job.model_validate(fields(tmp_path, **launch)), "run-1"))

    assert job.native_id == "1000", "in decimal notation"
    assert wanted.items() <= flux.job(1000)["options"].items()
    assert flux.job(1000)["name"] == "j/run-1"


def test_a_submission_that_was_interrupted_is_found_again(flux, request_):
    job = submit(request_)

    assert FluxLauncher().submit(request_, make_plan(request_)) == job.native_id
    assert FluxLauncher()._native_id(request_.log_dir) == job.native_id
    assert flux.ids() == [1000]


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({"state": "SCHED"}, "queued"),
        ({"state": "RUN"}, "running"),
        ({"state": "CLEANUP"}, "running"),
        ({"state": "INACTIVE", "result": "CANCELED"}, "cancelled"),
        ({"state": "INACTIVE", "result": "TIMEOUT", "returncode": 142}, "failed"),
    ],
)
def test_states_are_those_of_flux(flux, request_, state, found):
    job = submit(request_)
    StateFile(job.log_dir).write("running")
    flux.change(1000, **state)

    assert FluxLauncher().status(job).state == found


def test_a_job_that_flux_has_forgotten_is_not_there_and_one_that_waits_is_cancelled(flux, request_):
    job = submit(request_)
    FluxLauncher().cancel(job, "stop")

    assert flux.job(1000)["result"] == "CANCELED"
    assert FluxLauncher().query("999") is None


def test_a_job_runs_is_drained_and_continues_in_the_next_one(flux, request_):
    job = submit(request_)
    process = flux.start(1000, "localhost", **environment())
    log = job.log_dir / LOG_FILE
    output = flux.folder / "job-1000.out"
    try:
        until(
            lambda: log.exists() and '"epoch": 2,' in log.read_text(),
            lambda: output.read_text() + (log.read_text() if log.exists() else ""),
        )
        assert FluxLauncher().status(job).state == "running"
        FluxLauncher().cancel(job, "drain")
        assert process.wait(60) == 75, output.read_text()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    flux.ended(1000, 75)

    assert FluxLauncher().status(job).state == "preempted"
    FluxLauncher().put_back("1000", request_)
    assert flux.job(1001)["options"]["--dependency"] == "afterany:1000"
    assert flux.job(1001)["arguments"] == ["1000"]
    assert FluxLauncher().status(job).state == "queued"


class TestAnAllocation:
    def test_has_the_nodes_of_the_instance(self, flux, monkeypatch):
        monkeypatch.setenv("STUB_HOSTS", "a b")
        environ = {"FLUX_URI": "local:///1000", "HOROVOD_TRAIN_FLUX_SLOTS": "4"}

        assert FluxAllocationLauncher().hosts(environ) == ["a:4", "b:4"]
        with pytest.raises(LaunchError, match="has no Flux allocation"):
            FluxAllocationLauncher().hosts({})

    @pytest.mark.parametrize(("duration", "limit_s"), [(0.0, float("inf")), (7200.0, 7200.0)])
    def test_knows_its_time_limit(self, flux, request_, duration, limit_s):
        submit(request_)
        flux.change(1000, duration=duration)

        assert FluxAllocationLauncher().time_limit_s("1000") == limit_s


def test_gloo_is_refused(tmp_path):
    job = Job.model_validate(fields(tmp_path, controller="gloo"))

    assert [problem.path for problem in broken_rules(job)] == ["launch.controller"]
