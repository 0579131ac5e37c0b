"""Commands with which the process managers of MPI libraries start ranks, and how a library is found."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from support.launching import BIN

from horovod_train.config.launch import Launch
from horovod_train.config.schema import Job
from horovod_train.errors import EngineError, LaunchError, UserError
from horovod_train.horovod import environment, mpi
from horovod_train.horovod import mpi as mpi_module
from horovod_train.horovod.mpi import (
    Mpi,
    find_mpi,
    find_wrapper,
    installed_mpi,
    record_mpi,
    refuse_other_launchers,
    require_world,
)
from horovod_train.launch import mpi as starts
from horovod_train.launch.launchers.slurm.launcher import interface_of_srun, srun
from horovod_train.launch.mpi import jsrun, mpi_of, start_of
from horovod_train.launch.submit import automatic_launcher, resolve

PYTHON = Path(sys.executable)


@pytest.fixture(autouse=True)
def programs(tmp_path, monkeypatch):
    """A folder with the programs of an MPI library of the site."""
    folder = tmp_path / "mpi" / "bin"
    folder.mkdir(parents=True)
    for name in ("mpirun", "mpiexec", "mpiexec.hydra", "srun", "jsrun"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(environment, "loopback_library", lambda: Path("/engine/loopback.so"))
    return folder


def library(programs, name, version, abi="libmpi.so.12", interfaces=("pmi2", "pmi1")):
    return Mpi(name, version, programs, programs.parent / "lib" / abi, abi, interfaces)


def request_for(tmp_path, **launch):
    launch = {"network_interface": "lo", **launch}
    job = {"name": "j", "task": "digits", "run_dir": str(tmp_path), "launch": launch}
    return resolve(Job.model_validate(job), "run-1")


def command(mpi_library, request, hosts=()):
    """The arguments of the process manager, and the rest of the start."""
    found = start_of(mpi_library, request, request.hosts if hosts == () else hosts)
    return " ".join(found.argv[1:]), found


class TestOpenMpi5:
    def test_starts_ranks_on_this_machine_and_listens_on_the_loopback(self, tmp_path, programs):
        request = request_for(tmp_path, num_ranks=2)

        text, found = command(library(programs, "Open MPI", "5.0.11"), request)

        assert text == "--output tag -np 2 -H localhost:2 --bind-to none --map-by slot"
        assert found.argv[0] == str(programs / "mpirun")
        assert found.env["LD_PRELOAD"] == "/engine/loopback.so"
        assert found.env["LD_LIBRARY_PATH"] == str(programs.parent / "lib")

    def test_reaches_other_hosts_with_the_ssh_of_the_run_and_our_daemon(self, tmp_path, programs):
        request = request_for(tmp_path, hosts=["a:1", "b:2"])

        text, found = command(library(programs, "Open MPI", "5.0.11"), request)

        assert "-np 3 -H a:1,b:2" in text
        assert found.env["PRTE_MCA_plm_ssh_agent"] == f"ssh -F {request.ssh_config}"
        assert found.env["PRTE_MCA_prte_launch_agent"] == f"{request.stage}/daemon prted"
        assert "LD_PRELOAD" not in found.env


class TestHydra:
    @pytest.mark.parametrize("name", ["MPICH", "MVAPICH"])
    def test_starts_ranks_on_this_machine(self, tmp_path, programs, name):
        text, found = command(library(programs, name, "5.0.2"), request_for(tmp_path, num_ranks=2))

        assert text == "-prepend-pattern [%r]<stdout>: -n 2 -bind-to none -iface lo -genv LD_PRELOAD "
        assert found.argv[0] == str(programs / "mpiexec.hydra")

    def test_reaches_other_hosts_through_a_script(self, tmp_path, programs):
        request = request_for(tmp_path, hosts=["a:1", "b:2"])

        text, found = command(library(programs, "MPICH", "5.0.2"), request)
        script = found.files[request.log_dir / "ssh"]

        assert "-hosts a:1,b:2 -localhost localhost" in text
        assert f"-launcher ssh -launcher-exec {request.log_dir}/ssh" in text
        assert f'exec ssh -F {request.ssh_config} "$host" {request.stage}/daemon "$@"' in script

    def test_of_intel_has_other_options(self, tmp_path, programs):
        request = request_for(tmp_path, hosts=["a:1", "b:2"])

        text, found = command(library(programs, "Intel MPI", "2021.18.1"), request)

        assert f"-machinefile {request.log_dir}/machinefile -bootstrap ssh -bootstrap-exec" in text
        assert found.files[request.log_dir / "machinefile"] == "a:1\nb:2\n"
        assert found.env["I_MPI_PIN"] == "0"
        assert found.env["I_MPI_THREAD_YIELD"] == "2"
        assert found.env["I_MPI_ROOT"] == str(programs.parent)

    def test_knows_the_hosts_of_an_allocation_itself(self, tmp_path, programs):
        text, found = command(library(programs, "MPICH", "5.0.2"), request_for(tmp_path, num_ranks=2), None)

        assert "-hosts" not in text
        assert "-iface" not in text
        assert not found.files


class TestPals:
    def test_starts_as_many_ranks_on_each_host(self, tmp_path, programs):
        request = request_for(tmp_path, hosts=["a:4", "b:4"])

        text, _ = command(library(programs, "Cray MPICH", "8.1.28"), request)

        assert text == "--line-buffer -n 8 --ppn 4 --cpu-bind none --hosts a,b"

    def test_refuses_hosts_of_different_sizes(self, tmp_path, programs):
        request = request_for(tmp_path, hosts=["a:4", "b:2"])

        with pytest.raises(LaunchError, match=r"the same number of ranks on each host.*\[2, 4\]"):
            command(library(programs, "Cray MPICH", "8.1.28"), request)


class TestJsrun:
    def test_makes_a_resource_set_for_each_rank(self, tmp_path, programs):
        request = request_for(tmp_path, hosts=["a:4", "b:4"])

        found = jsrun(library(programs, "Spectrum MPI", "10.4"), request, None)

        assert " ".join(found.argv[1:]) == (
            "--nrs 8 --tasks_per_rs 1 --rs_per_host 4 --bind none --stdio_mode prepended"
        )


class TestSrun:
    @pytest.mark.parametrize(
        ("interfaces", "plugins", "chosen"),
        [
            (("pmix",), ["none", "pmi2", "pmix", "pmix_v4"], "pmix"),
            (("pmi2", "pmi1"), ["none", "pmi2", "pmix"], "pmi2"),
            (("cray_shasta", "pmi2"), ["cray_shasta", "pmi2"], "cray_shasta"),
        ],
    )
    def test_uses_an_interface_that_both_support(self, programs, interfaces, plugins, chosen):
        assert interface_of_srun(library(programs, "X", "1", interfaces=interfaces), plugins) == chosen

    def test_is_refused_without_one(self, programs):
        mpich = library(programs, "MPICH", "4.3.2")

        with pytest.raises(LaunchError, match="MPICH 4.3.2 supports .* pmi2, pmi1, and .* prints none, pmix"):
            interface_of_srun(mpich, ["none", "pmix"])

    def test_asks_slurm(self, tmp_path, programs):
        (programs / "srun").write_text(
            "#!/bin/sh\nprintf 'MPI plugin types are...\\n\\tnone\\n\\tpmi2\\n' >&2\n"
        )
        request = request_for(tmp_path, hosts=["a:1", "b:1"], slurm={"mpi": "srun"})

        found = srun(library(programs, "MPICH", "5.0.2"), request)

        assert " ".join(found.argv[1:]) == (
            "--mpi=pmi2 --label --kill-on-bad-exit=1 --ntasks=2 --nodes=2 --cpu-bind=none"
        )

    def test_takes_the_interface_of_the_job(self, tmp_path, programs):
        request = request_for(tmp_path, hosts=["a:1", "b:1"], slurm={"mpi": "pmix_v4"})

        assert "--mpi=pmix_v4" in srun(library(programs, "Open MPI", "5.0.11"), request).argv

    def test_lets_waiting_ranks_yield_as_other_starts_do(self, tmp_path, programs):
        intel = library(programs, "Intel MPI", "2021.18")
        request = request_for(tmp_path, launcher="slurm", slurm={"mpi": "pmi2"}, num_ranks=2)

        assert starts.with_environment(intel, srun(intel, request)).env["I_MPI_THREAD_YIELD"] == "2"


class TestTheEngine:
    def test_without_a_record_starts_nothing(self, tmp_path, monkeypatch):
        monkeypatch.setattr(starts, "installed_mpi", lambda: None)

        with pytest.raises(LaunchError, match="MPI library of the engine is unknown") as error:
            mpi_of(request_for(tmp_path))
        assert "engine build" in error.value.hint

    def test_names_a_library_that_is_gone(self, tmp_path, programs, monkeypatch):
        monkeypatch.setattr(starts, "installed_mpi", lambda: library(programs, "MPICH", "5.0.2"))

        with pytest.raises(LaunchError, match=r"uses MPICH 5.0.2, but .*libmpi.so.12 does not exist"):
            mpi_of(request_for(tmp_path))

    def test_needs_the_programs_of_its_library(self, tmp_path, programs):
        for name in ("mpirun", "mpiexec", "mpiexec.hydra"):
            (programs / name).unlink()

        with pytest.raises(LaunchError, match=r"MPICH 5.0.2 has no mpiexec.hydra or mpirun or mpiexec in"):
            command(library(programs, "MPICH", "5.0.2"), request_for(tmp_path, num_ranks=2))

    def test_records_its_library_with_paths_of_this_environment_relative_to_it(self, tmp_path, monkeypatch):
        monkeypatch.setattr(mpi, "horovod_folder", lambda: tmp_path)
        own = Mpi("Open MPI", "4.1.8", BIN, BIN.parent / "lib" / "libmpi.so.40", "libmpi.so.40", ("pmix",))
        record_mpi(own)

        assert json.loads((tmp_path / mpi.RECORD).read_text())["library"] == "lib/libmpi.so.40"
        assert installed_mpi() == own

    @pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"name": "MPICH"}'])
    def test_takes_a_damaged_record_for_none(self, tmp_path, monkeypatch, text):
        monkeypatch.setattr(mpi, "horovod_folder", lambda: tmp_path)
        (tmp_path / mpi.RECORD).write_text(text)

        assert installed_mpi() is None

    @pytest.mark.parametrize(
        ("name", "version", "controller", "launcher"),
        [
            ("Open MPI", "4.1.8", "mpi", "horovodrun"),
            ("Open MPI", "5.0.11", "mpi", "mpirun"),
            ("MPICH", "5.0.2", "mpi", "mpirun"),
            ("MPICH", "5.0.2", "gloo", "horovodrun"),
        ],
    )
    def test_decides_the_launcher(self, programs, monkeypatch, name, version, controller, launcher):
        found = library(programs, name, version)
        monkeypatch.setattr("horovod_train.launch.launchers.hosts.installed_mpi", lambda: found)

        assert automatic_launcher(Launch(controller=controller, num_ranks=2)) == launcher


class TestTheWrapper:
    def test_of_the_site_comes_before_that_of_this_environment(self, programs):
        wrapper = programs / "mpicxx"
        wrapper.write_text("#!/bin/sh\n")
        wrapper.chmod(0o755)

        assert find_wrapper() == wrapper

    def test_may_be_named_by_its_folder(self, programs):
        (programs / "mpicxx").write_text("#!/bin/sh\n")
        (programs / "mpicxx").chmod(0o755)

        assert find_wrapper(programs.parent) == programs / "mpicxx"
        with pytest.raises(EngineError, match="--mpi /nowhere: there is no mpicxx"):
            find_wrapper(Path("/nowhere"))

    def test_that_cannot_compile_is_an_error_with_its_words(self, programs):
        (programs / "mpicxx").write_text("#!/bin/sh\necho 'no license' >&2\nexit 1\n")
        (programs / "mpicxx").chmod(0o755)

        with pytest.raises(EngineError, match="cannot compile a program:\nno license"):
            find_mpi()


class TestAStartByAnotherLauncher:
    @pytest.mark.parametrize(
        ("name", "version", "environ"),
        [
            ("Open MPI", "4.1.8", {"PMI_RANK": "0", "PMI_SIZE": "2"}),
            ("MPICH", "5.0.2", {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}),
            ("MPICH", "5.0.2", {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}),
            ("Open MPI", "5.0.11", {"RANK": "0", "WORLD_SIZE": "2"}),
        ],
    )
    def test_is_refused(self, programs, monkeypatch, name, version, environ):
        monkeypatch.setattr(mpi_module, "installed_mpi", lambda: library(programs, name, version))

        with pytest.raises(UserError, match="each process would train alone") as error:
            refuse_other_launchers(environ)
        assert "horovod-train run JOB -n 2" in error.value.hint

    @pytest.mark.parametrize(
        ("name", "environ"),
        [
            ("MPICH", {"PMI_RANK": "0", "PMI_SIZE": "2"}),
            ("MPICH", {"PMI_RANK": "0", "PMI_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}),
            ("Open MPI", {"PMIX_RANK": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}),
            ("Open MPI", {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}),
            ("MPICH", {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}),
            ("MPICH", {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}),
            ("MPICH", {}),
        ],
    )
    def test_is_accepted_if_it_belongs_to_the_mpi_library(self, programs, monkeypatch, name, environ):
        monkeypatch.setattr(mpi_module, "installed_mpi", lambda: library(programs, name, "5.0.0"))

        refuse_other_launchers(environ)

    def test_with_another_number_of_processes_is_refused(self):
        with pytest.raises(UserError, match="number 1 of 4 .* but Horovod was initialized with 2 ranks"):
            require_world({"PMI_RANK": "1", "PMI_SIZE": "4"}, 2)
