"""Hosts that go and come while a job trains: it goes on with those there are."""

from __future__ import annotations

import signal
import time
from collections import Counter

import pytest
from support.cluster import cluster
from support.launching import BIN, PLUGIN, PROGRAMS, TIMEOUT_S, cli, write_job
from support.running import Running, launched

pytestmark = pytest.mark.ranks
NUM_SAMPLES = 60
EPOCHS = 14
SOON = {"poll_s": 0.5, "cooldown_s": 2.0}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("cluster"), ("node1", "node2")) as made:
        yield made


def job(folder, hosts, launch, **sections):
    fields = {
        "framework": "numpy",
        "task": f"{PROGRAMS / 'quick_tasks.py'}:Noted",
        "task_args": {"notes": str(folder), "pause_s": 0.1, "num_samples": NUM_SAMPLES},
        "run_dir": str(folder / "runs"),
        "train": {"epochs": EPOCHS, "batch_size_per_rank": 4},
        "checkpoint": {"every": "5 steps"},
        **sections,
    }
    fixed = {"ssh": hosts.ssh, "host_timeout_s": 5, "env": {"PYTHONPATH": str(PLUGIN)}}
    return write_job(folder / "job.yaml", launch={**fixed, **launch}, **fields)


def files_of_rank(folder, rank):
    """One for each time that a rank of this number was started."""
    return sorted(folder.glob(f"rank-{rank}-*.txt"), key=lambda path: path.stat().st_mtime)


def wait_for(running, folder, rank, times):
    """Until a rank has begun to train for the so-manieth time."""
    deadline = time.monotonic() + TIMEOUT_S
    while len(files_of_rank(folder, rank)) < times:
        assert running.process.poll() is None, running.process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def times_seen(folder):
    """How often each sample was trained on, over all ranks and starts."""
    seen = Counter()
    for file in folder.glob("rank-*.txt"):
        seen.update(map(int, file.read_text().split()))
    return seen


def test_hosts_that_are_added_and_taken_away_lose_and_repeat_no_sample(tmp_path, hosts):
    listed = tmp_path / "hosts"
    listed.write_text("node1\n")
    elastic = {"min_ranks": 1, "max_ranks": 2, "discover": f"cat {listed}", **SOON}
    path = job(tmp_path, hosts, {"elastic": elastic})

    running = Running(tmp_path, path, 1, through=hosts.command)
    listed.write_text("node1 slots=1\nnode2 slots=1\n")
    wait_for(running, tmp_path, 1, times=1)
    listed.write_text("node2\n")
    wait_for(running, tmp_path, 0, times=3)
    code, output = running.end()

    assert code == 0, output
    assert "elastic: 1 ranks on node1\n" in output
    assert "elastic: node2 can join; saving a checkpoint" in output
    assert "elastic: 2 ranks on node1, node2" in output
    assert "elastic: node1 was removed from the host list; saving a checkpoint" in output
    assert "elastic: 1 ranks on node2" in output
    assert times_seen(tmp_path) == dict.fromkeys(range(NUM_SAMPLES), EPOCHS)
    assert hosts.leftovers(within_s=5) == []


@pytest.mark.campaign
def test_a_host_that_is_cut_off_is_left_out_and_taken_in_again(tmp_path, hosts):
    launch = {"hosts": ["node1:1", "node2:1"], "elastic": {"min_ranks": 1, **SOON}}
    path = job(tmp_path, hosts, launch, train={"epochs": 24, "batch_size_per_rank": 4})

    running = Running(tmp_path, path, 2, through=hosts.command)
    hosts.network.set_link("node2", "down")
    wait_for(running, tmp_path, 0, times=2)
    hosts.network.set_link("node2", "up")
    wait_for(running, tmp_path, 1, times=2)
    code, output = running.end()

    assert code == 0, output
    assert "node2 does not answer any more" in output
    assert "resuming from the newest checkpoint" in output
    assert output.count("elastic: 2 ranks on node1, node2") == 2
    assert "elastic: 1 ranks on node1\n" in output
    assert min(times_seen(tmp_path).values()) >= 24
    assert hosts.leftovers(within_s=15) == []


def test_too_few_hosts_for_too_long_is_an_error_that_names_those_missing(tmp_path, hosts):
    launch = {"hosts": ["node1:1", "node7:1"], "elastic": {"min_ranks": 2, "wait_s": 3, "poll_s": 0.5}}

    done = hosts.on_login(str(BIN / "horovod-train"), "run", str(job(tmp_path, hosts, launch)), cwd=tmp_path)

    assert done.returncode == 1
    assert "there is room for 1 ranks; at least 2 are required" in done.stderr
    assert "no answer from node7" in done.stderr


def test_a_job_that_waits_for_hosts_can_be_asked_to_leave(tmp_path, hosts):
    launch = {"hosts": ["node7:1"], "elastic": {"min_ranks": 1}}
    with launched(tmp_path, job(tmp_path, hosts, launch), through=hosts.command) as process:
        while not list((tmp_path / "runs").rglob("state.json")):
            time.sleep(0.05)
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=TIMEOUT_S)

    assert process.returncode == 75, output
    assert "preempted while no ranks were running" in output


def test_ranks_that_are_killed_again_and_again_without_getting_on_end_the_job(tmp_path):
    path = write_job(
        tmp_path / "job.yaml",
        framework="numpy",
        task=f"{PROGRAMS / 'quick_tasks.py'}:Noted",
        task_args={"notes": str(tmp_path), "kill": "1:4"},
        run_dir=str(tmp_path / "runs"),
        train={"epochs": 5, "batch_size_per_rank": 4},
        launch={"num_ranks": 2, "elastic": {"min_ranks": 2, "max_failures": 1}},
    )

    done = cli("run", str(path), cwd=tmp_path, check=False)

    assert done.returncode == 1
    assert "was killed by signal 9" in done.stderr
    assert len(files_of_rank(tmp_path, 1)) == 2
