"""The scripts that start ranks in a container of an HPC site; real ranks are in tests/ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from horovod_train.config.launch import Container
from horovod_train.config.schema import Job
from horovod_train.horovod import fingerprint
from horovod_train.horovod.fingerprint import environment_fingerprint, printed_fingerprint
from horovod_train.horovod.mpi import Mpi
from horovod_train.launch.hosts.staging import (
    fingerprint_script,
    in_container,
    misfit,
    rank_script,
    stage_files,
)

RUNTIME = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""


def library(name, version):
    return Mpi(name, version, Path("/mpi/bin"), Path("/mpi/lib/libmpi.so.40"), "libmpi.so.40")


@pytest.fixture
def called(tmp_path, monkeypatch):
    """Run a script with a runtime that prints its arguments and environment."""
    (program := tmp_path / "apptainer").write_text(RUNTIME)
    program.chmod(0o755)

    def run(script, **variables):
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
        done = subprocess.run(["/bin/sh", "-c", script], env=env, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    return run


class TestTheScript:
    def test_binds_the_folders_that_exist_and_those_of_the_job(self, tmp_path, called):
        container = Container(
            image="/apps/a b.sif", binds=["/data:/in:ro"], options=["--writable-tmpfs", "--env A=1"]
        )
        script = in_container(container, [tmp_path, tmp_path / "missing", tmp_path], ["echo", "a b"])

        arguments, _ = called(script)

        assert arguments == [
            *("exec", "--bind", str(tmp_path), "--bind", "/data:/in:ro", "--writable-tmpfs", "--env", "A=1"),
            *("/apps/a b.sif", "echo", "a b"),
        ]

    def test_does_not_pass_the_python_and_the_mpi_library_of_the_host(self, called):
        of_host = {"OPAL_PREFIX": "/opt/mpi", "LD_LIBRARY_PATH": "/opt/mpi/lib", "PYTHONPATH": "/x"}
        of_rank = {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "PMI_RANK": "1", "MY_OWN": "1"}

        _, inside = called(in_container(Container(image="/a.sif"), [], ["true"]), **of_host, **of_rank)

        assert not of_host.keys() & inside.keys()
        assert of_rank.items() <= inside.items()

    def test_of_a_rank_runs_the_script_inside_in_which_the_rank_has_its_own_pid(self, tmp_path):
        container = {"image": "/a.sif", "python": "/opt/python"}
        job = Job.model_validate({"name": "j", "task": "digits", "launch": {"container": container}})
        files = stage_files(
            job,
            "run-1",
            str(tmp_path),
            python="/host/python",
            mpi_programs="/x",
            folder=tmp_path,
            variables={},
        )

        assert files["rank"].rstrip().endswith(f"/a.sif /bin/sh {tmp_path}/inside")
        assert "exec /opt/python -P -m horovod_train worker" in files["inside"]
        assert "trap '' USR1 USR2" in files["rank"]

    def test_binds_the_files_of_the_run(self, tmp_path, called):
        script = rank_script(Container(image="/a.sif"), [], str(tmp_path))

        arguments, _ = called(script)

        assert arguments[:3] == ["exec", "--bind", str(tmp_path)]


class TestTheFingerprintInside:
    def test_is_that_of_the_python_in_the_image(self, tmp_path, monkeypatch):
        (runtime := tmp_path / "apptainer").write_text(
            '#!/bin/sh\nwhile [ "$1" != /a.sif ]; do shift; done\nshift\nexec "$@"\n'
        )
        runtime.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        container = Container(image="/a.sif", python=sys.executable)

        assert printed_fingerprint(fingerprint_script(container, [], None)) == environment_fingerprint()

    def test_is_not_there_where_the_container_does_not_start(self):
        with pytest.raises(OSError, match="the container does not start: FATAL: no such image"):
            printed_fingerprint("echo FATAL: no such image >&2; exit 255")

    def test_is_not_waited_for_without_end(self, monkeypatch):
        monkeypatch.setattr(fingerprint, "TIMEOUT_S", 0.1)

        with pytest.raises(OSError, match=r"did not start within 0\.1 s"):
            printed_fingerprint("sleep 5")


@pytest.mark.parametrize(
    ("outside", "inside", "fits"),
    [
        (("Open MPI", "4.1.8"), "Open MPI 4.0.3", True),
        (("Open MPI", "5.0.11"), "Open MPI 4.1.8", False),
        (("Open MPI", "4.1.8"), "MPICH 4.3.2", False),
        (("MPICH", "5.0.2"), "Open MPI 4.1.8", False),
        (("Intel MPI", "2021.18"), "MPICH 4.3.2", True),
        (("Cray MPICH", "8.1"), "MPICH 4.3.2", True),
        (("MPICH", "5.0.2"), "unknown", False),
        (("Open MPI", "4.1.8"), "unknown", False),
    ],
)
def test_the_mpi_library_inside_fits_the_process_manager_outside(outside, inside, fits):
    reason = misfit(library(*outside), inside)

    assert (reason == "") == fits
    assert fits or (inside in reason and outside[0] in reason)
