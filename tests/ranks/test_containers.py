"""Ranks in containers of a runtime that behaves as Apptainer: mpirun is outside, on the host."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.checkpoints import arrays, newest
from support.launching import PROGRAMS, cli, write_job
from support.mpis import programs_of
from support.namespaces import why_not
from support.running import Running

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).parents[2]


@pytest.fixture
def image(tmp_path, monkeypatch):
    """An image with this Python environment, and the runtime on the PATH. Tests' folders are not in it."""
    if reason := why_not("unshare"):
        pytest.skip(reason)
    programs = tmp_path / "programs"
    programs.mkdir()
    runtime = programs / "apptainer"
    runtime.write_text(f'#!/bin/sh\nexec {sys.executable} {PROGRAMS / "apptainer.py"} "$@"\n')
    runtime.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    (folder := tmp_path / "image").mkdir()
    system = [path for path in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc") if Path(path).exists()]
    (folder / "mounts").write_text("\n".join([*system, str(Path(sys.base_prefix)), str(ROOT)]))
    return folder


def job(folder, image, **sections):
    container = {"image": str(image), "python": sys.executable, **sections.pop("container", {})}
    launch = {"num_ranks": 2, "container": container, "grace_s": 10.0, **sections.pop("launch", {})}
    return str(
        write_job(
            folder / "job.yaml",
            **{
                "task": f"{PROGRAMS / 'tasks.py'}:Noted",
                "task_args": {"notes": str(folder), "pause_s": 0.02},
                "run_dir": str(folder / "runs"),
                "train": {"epochs": 2, "batch_size_per_rank": 4},
                "launch": launch,
                **sections,
            },
        )
    )


@pytest.mark.campaign
def test_ranks_train_in_the_container_as_they_do_outside(tmp_path, image):
    with TemporaryDirectory(dir="/var/tmp") as notes:
        path = job(tmp_path, image, container={"binds": [notes]}, task_args={"notes": notes})
        cli("run", path, cwd=tmp_path)
        cli("run", path, "--set", "launch.container=null", "--set", "name=outside", cwd=tmp_path)

    assert arrays(newest(tmp_path, "test")) == arrays(newest(tmp_path, "outside"))


def test_ranks_in_containers_save_and_none_is_left_when_the_job_is_preempted(tmp_path, image):
    path = job(tmp_path, image, train={"epochs": 500})
    run = Running(tmp_path, Path(path), 2)
    run.process.send_signal(signal.SIGTERM)
    code, output = run.end(within_s=5)

    assert code == 75
    assert "everything is saved at step" in output


@pytest.mark.campaign
def test_a_rank_that_is_killed_in_its_container_is_named(tmp_path, image):
    path = job(tmp_path, image, train={"epochs": 500})
    run = Running(tmp_path, Path(path), 2)
    run.ranks[1].kill()
    code, output = run.end(within_s=5)

    assert code == 1
    assert re.search(r"error: rank [01] on \S+ was killed by signal 9", output), output


def test_an_mpi_library_that_does_not_fit_the_one_in_the_image_is_refused(tmp_path, image):
    done = cli("run", job(tmp_path, image), cwd=tmp_path, programs=programs_of("mpich5"), check=False)

    assert done.returncode == 1
    assert "the engine in the image uses Open MPI 4.1.8, and MPICH 5.0.2 starts the ranks" in done.stderr


def test_a_runtime_that_fails_is_told_in_its_words(tmp_path, image):
    done = cli("run", job(tmp_path, tmp_path / "missing.sif"), cwd=tmp_path, check=False)

    assert done.returncode == 1
    assert "could not open image" in done.stderr
