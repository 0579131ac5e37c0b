"""How many files of the package something goes through. ``pytest -s`` shows the calls.

A path is a row of stations: functions that are known to be on it. Its files are those on the stack when
a station is called, from the function that gets the news on (behind the arrow) to the station.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
from support.cluster import cluster
from support.launching import BIN, PLUGIN, PROGRAMS, TIMEOUT_S, cli, environment, write_job
from support.paths import TRACING, stacks, traced, way

pytestmark = pytest.mark.ranks

GRADIENT = {
    "torch/_tensor.py:Tensor.backward": "TorchReplica.step",
    "torch/mpi_ops.py:allreduce_async_": "TorchReplica.step",
    "torch/mpi_ops.py:synchronize": "TorchReplica.step",
    "optim/sgd.py:SGD.step": "TorchReplica.step",
}
LEARNING_RATE = {
    "config/load.py:load_job": "worker.py:main",
    "lr/policy.py:LearningRatePolicy.at": "loop.py:train_epoch",
    "optim/sgd.py:SGD.step": "loop.py:train_epoch",
}
HOSTS = {
    "hosts/hostlist.py:hosts_of": "cli/run.py:run_command",
    "submit.py:make_plan": "cli/run.py:run_command",
    "launchers/hosts.py:HorovodrunLauncher.plan": "submit.py:make_plan",
    "host_group.py:connect_all": "submit.py:run_job",
    "agent.py:HostActions.put": "agent.py:serve",
    "launch/supervise/signals.py:execute": "submit.py:run_job",
    "worker.py:run_rank": "cli/run.py:worker_command",
}
SIGTERM = {
    "supervise/signals.py:Stopper._on_signal": "signal_listener_thread.<locals>.listen",
    "host_group.py:HostGroup.signal_ranks": "Stopper._work",
    "agent.py:HostActions.signal_ranks": "agent.py:answer",
    "saving.py:PreemptionRequest._on_signal": "PreemptionRequest._on_signal",
    "saving.py:StopWhenPreempted.on_step": "StopWhenPreempted.on_step",
    "loop.py:preempted_error": "worker.py:main",
    "outcome.py:Outcome.check": "Outcome.check",
    "jobs.py:StateFile.end": "StateFile.end",
    "cli/main.py:fail": "cli/main.py:main",
}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """The stacks of a job of two ranks under horovodrun."""
    folder = tmp_path_factory.mktemp("steps")
    variables = traced(folder / "calls", [*GRADIENT, *LEARNING_RATE])
    job = write_job(
        folder / "job.yaml",
        task=f"{PROGRAMS / 'tasks.py'}:Noted",
        task_args={"notes": str(folder), "pause_s": 0},
        train={"epochs": 1, "batch_size_per_rank": 16},
        run_dir=str(folder / "runs"),
        launch={"num_ranks": 2, "env": variables},
    )
    cli("run", str(job), cwd=folder)
    return stacks(folder / "calls")


@pytest.fixture(scope="module")
def preempted(tmp_path_factory):
    """The stacks of a job on two hosts, given as ``-H``, whose launcher gets SIGTERM."""
    folder = tmp_path_factory.mktemp("hosts")
    variables = traced(folder / "calls", [*HOSTS, *SIGTERM])
    with cluster(folder, ("node1", "node2")) as hosts:
        python = folder / "python"  # ssh passes no variables on
        exports = [f"export {name}={value}" for name, value in variables.items()]
        python.write_text("\n".join(["#!/bin/sh", *exports, f'exec {BIN}/python "$@"', ""]))
        python.chmod(0o755)
        of_ranks = {**variables, "PYTHONPATH": f"{TRACING}:{PLUGIN}"}
        job = write_job(
            folder / "job.yaml",
            framework="numpy",
            task=f"{PROGRAMS / 'quick_tasks.py'}:Noted",
            task_args={"notes": str(folder), "pause_s": 0.05},
            train={"epochs": 500, "batch_size_per_rank": 4},
            run_dir=str(folder / "runs"),
            checkpoint={"every": None},
            launch={
                "ssh": hosts.ssh,
                "env": of_ranks,
                "host_settings": {name: {"python": str(python)} for name in ("node1", "node2")},
            },
        )
        # exec: the signal is for the launcher itself.
        command = f"exec {BIN}/horovod-train run -H node1:1,node2:1 {job}"
        launcher = subprocess.Popen(
            hosts.command("sh", "-c", f"echo $$ > {folder}/pid; {command}"),
            cwd=folder,
            env=environment(**variables),
            stdout=subprocess.DEVNULL,
        )
        while len(list(folder.glob("rank-*.txt"))) < 2:
            assert launcher.poll() is None
            time.sleep(0.1)
        os.kill(int((folder / "pid").read_text()), signal.SIGTERM)
        assert launcher.wait(TIMEOUT_S) == 75
    return stacks(folder / "calls")


def files_of(calls, stations):
    """Return the files of a path, and show its calls."""
    found = way(calls, stations)
    print("", *found, sep="\n    ")
    return {call.partition(":")[0] for call in found}


def test_a_gradient_goes_through_nine_files(steps):
    assert files_of(steps, GRADIENT) == {
        "frameworks/torch/step/replica.py",
        "frameworks/torch/step/update.py",
        "frameworks/torch/strategies/allreduce/strategy.py",
        "frameworks/torch/strategies/base.py",
        "frameworks/torch/codecs.py",
        "frameworks/torch/comm/buckets.py",
        "frameworks/torch/comm/collectives.py",
        "collectives/horovod.py",
    }


def test_the_learning_rate_goes_through_seven_files(steps):
    assert files_of(steps, LEARNING_RATE) == {
        "worker.py",
        "config/load.py",
        "lr/policy.py",
        "training/loop.py",
        "training/run.py",
        "frameworks/torch/step/replica.py",
        "frameworks/torch/step/update.py",
    }


def test_a_list_of_hosts_goes_through_nine_files_until_ranks_run(preempted):
    assert files_of(preempted, HOSTS) == {
        "cli/run.py",
        "launch/submit.py",
        "launch/hosts/hostlist.py",
        "launch/launchers/hosts.py",
        "launch/supervise/attempt.py",
        "launch/hosts/host_group.py",
        "launch/hosts/agent.py",
        "launch/supervise/signals.py",
        "worker.py",
    }


def test_sigterm_goes_through_nine_files_until_the_exit_code(preempted):
    assert files_of(preempted, SIGTERM) == {
        "launch/supervise/signals.py",
        "launch/hosts/host_group.py",
        "launch/hosts/agent.py",
        "training/hooks/saving.py",
        "training/loop.py",
        "worker.py",
        "launch/supervise/outcome.py",
        "launch/jobs.py",
        "cli/main.py",
    }
