"""A node of a real Slurm dies under a job whose ranks are started by srun alone."""

from __future__ import annotations

import json
import re

import pytest
from support.cluster import cluster
from support.launching import PROGRAMS, write_job
from support.mpis import programs_of
from support.slurm import slurm_on
from support.waiting import wait_for_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.campaign]


@pytest.mark.parametrize("mpi", ["openmpi5", "mpich5"])
def test_it_is_named_and_the_job_is_ended(tmp_path, tmp_path_factory, mpi):
    programs = programs_of(mpi)
    slurm = {"ranks_per_node": 1, "mpi": "srun", "requeue": False}
    path = write_job(
        tmp_path / "job.yaml",
        task=f"{PROGRAMS / 'tasks.py'}:Noted",
        task_args={"notes": str(tmp_path), "pause_s": 0.05},
        run_dir=str(tmp_path / "runs"),
        train={"epochs": 500, "batch_size_per_rank": 4},
        launch={"launcher": "slurm", "num_ranks": 2, "host_timeout_s": 8.0, "slurm": slurm},
    )
    folder = tmp_path_factory.mktemp("cluster")
    with cluster(folder, ("node1", "node2")) as hosts, slurm_on(hosts) as made:
        ask = hosts.cli(tmp_path, made.variables)
        job_id = ask("submit", str(path), programs=programs).stdout.strip()
        wait_for_ranks(tmp_path)
        number = json.loads(next((tmp_path / "state").rglob(f"{job_id}.json")).read_text())["native_id"]
        shown = made.ask("scontrol", "show", "job", number)
        (other,) = {"node1", "node2"} - set(re.findall(r"BatchHost=(\S+)", shown))
        made.kill(other)
        waited = ask("wait", job_id, check=False, programs=programs)

    assert waited.returncode != 0
    assert other in waited.stdout
