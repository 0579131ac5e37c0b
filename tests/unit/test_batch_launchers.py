"""Jobs in PBS and Grid Engine, on what their programs print; on real nodes they are in tests/ranks."""

from __future__ import annotations

import math
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from horovod_train.config.schema import Job
from horovod_train.errors import LaunchError
from horovod_train.horovod.mpi import Mpi
from horovod_train.launch.base import LaunchPlan, Submitted
from horovod_train.launch.jobs import StateFile
from horovod_train.launch.launchers import batch
from horovod_train.launch.launchers.hosts import SupervisedLauncher
from horovod_train.launch.submit import resolve
from horovod_train.plugins.gridengine.launcher import GridEngineAllocationLauncher, GridEngineLauncher
from horovod_train.plugins.lsf.launcher import LsfAllocationLauncher, LsfLauncher
from horovod_train.plugins.pbs.launcher import PbsAllocationLauncher, PbsLauncher, select

# As OpenPBS 23.06 and Grid Engine 8.1.9 print them.
PBS_JOB = """Job Id: 7.login
    Job_Name = j
    job_state = {state}
    Output_Path = login:/shared/runs/j/run-1/pbs.log
    Resource_List.place = scatter
    Resource_List.select = 2:ncpus=1:mpiprocs=1
    Resource_List.walltime = 01:30:00
    substate = {substate}
    Variable_List = PBS_O_HOME=/root,PBS_O_LANG=C.UTF-8,
\tPBS_O_PATH=/opt/pbs/bin:/usr/bin
    comment = Job run at Sat Nov 28 at 04:05 on (node1:ncpus=1)+(node2:ncpus=1) a
\tnd {end}
    Submit_arguments = -N j -koed -j oe -o /shared/runs/j/run-1/pbs.log -- /bin/bash
\t -l {script}
    Exit_status = 271

"""
QSTAT = """job-ID  prior   name       user         state submit/start at     queue          slots ja-task-ID
----------------------------------------------------------------------------------------------------
      7 0.50000 j          root         {letters}    11/28/2026 03:44:01 all.q@node1         2
      8 0.00000 other      root         qw    11/28/2026 03:44:02                            1
"""
QSTAT_J = """==============================================================
job_number:                 7
hard resource_list:         h_rt=5400,mem_free=1G
script_file:                {script}
error reason    1:          11/28/2026 03:44:01 [0:1]: error: can't chdir to /nowhere
"""


def request_of(folder, system="pbs", **launch):
    launch = {"num_ranks": 3, "launcher": system, **launch}
    job = Job.model_validate({"name": "j", "task": "digits", "run_dir": str(folder), "launch": launch})
    return resolve(job, "run-1")


def submitted(request, system):
    request.log_dir.mkdir(parents=True, exist_ok=True)
    return Submitted(request.job_id, system, "7", request.log_dir, 0.0)


@pytest.fixture
def printing(monkeypatch):
    """Let the programs of batch systems print texts, in order or by program; returns their calls."""
    calls = []

    def prepare(launcher, **texts):
        def call(self, *command):
            calls.append(command)
            found = texts[command[0]]
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(launcher, "call", call)
        return calls

    return prepare


class TestPbs:
    @pytest.mark.parametrize(
        ("ranks", "settings", "chunks"),
        [
            (3, {}, "3:ncpus=1:mpiprocs=1"),
            (4, {"ranks_per_node": 2}, "2:ncpus=2:mpiprocs=2"),
            (5, {"ranks_per_node": 2}, "2:ncpus=2:mpiprocs=2+1:ncpus=1:mpiprocs=1"),
            (1, {"ranks_per_node": 8}, "1:ncpus=1:mpiprocs=1"),
            (4, {"ranks_per_node": 4, "chunk": "ncpus=16:ngpus=4"}, "1:ncpus=16:ngpus=4:mpiprocs=4"),
        ],
    )
    def test_asks_for_chunks_in_which_the_ranks_fit(self, tmp_path, ranks, settings, chunks):
        assert select(request_of(tmp_path, num_ranks=ranks, pbs=settings)) == chunks

    def test_runs_the_script_as_a_program_with_the_options_of_the_job(self, tmp_path):
        settings = {
            "ranks_per_node": 3,
            "options": ["-q gpu", "-l walltime=01:00:00"],
            "setup": ["module load x"],
        }
        request = request_of(tmp_path, pbs=settings)
        plan = PbsLauncher().plan(request)
        script = plan.files[request.log_dir / "batch.sh"].splitlines()

        assert plan.argv[-4:] == ("--", "/bin/bash", "-l", str(request.log_dir / "batch.sh"))
        assert " ".join(plan.argv).count("-l place=scatter -q gpu -l walltime=01:00:00") == 1
        assert script[-1].startswith("exec ")
        assert script.index("module load x") < script.index(f"cd {request.folder}")

    @pytest.mark.parametrize(
        ("letter", "substate", "state"),
        [("Q", "10", "queued"), ("H", "22", "queued"), ("R", "42", "running"), ("E", "51", "running")],
    )
    def test_tells_the_state_of_a_job_that_has_not_ended(self, tmp_path, printing, letter, substate, state):
        job = submitted(request_of(tmp_path), "pbs")
        StateFile(job.log_dir).write("running")
        printing(PbsLauncher, qstat=PBS_JOB.format(state=letter, substate=substate, end="waits", script="x"))

        assert PbsLauncher().status(job).state == state

    @pytest.mark.parametrize(
        ("substate", "state", "said"),
        [("91", "cancelled", "cancelled in PBS"), ("93", "failed", "state F, exit status 271: Job run at")],
    )
    def test_tells_the_end_of_a_job_that_could_not(self, tmp_path, printing, substate, state, said):
        job = submitted(request_of(tmp_path), "pbs")
        StateFile(job.log_dir).write("running")
        printing(PbsLauncher, qstat=PBS_JOB.format(state="F", substate=substate, end="failed", script="x"))

        status = PbsLauncher().status(job)

        assert status.state == state
        assert said in status.message

    def test_forgets_a_job_whose_end_is_in_the_state_file(self, tmp_path, printing):
        job = submitted(request_of(tmp_path), "pbs")
        StateFile(job.log_dir).write("succeeded", 0)
        printing(PbsLauncher, qstat=LaunchError("qstat: qstat: Unknown Job Id 7.login"))

        assert PbsLauncher().status(job).state == "succeeded"

    def test_does_not_take_a_server_that_is_down_for_the_end_of_a_job(self, tmp_path, printing):
        job = submitted(request_of(tmp_path), "pbs")
        printing(PbsLauncher, qstat=LaunchError("qstat: cannot connect to server login (errno=15010)"))

        with pytest.raises(LaunchError, match="cannot connect"):
            PbsLauncher().status(job)

    @pytest.mark.parametrize(
        ("how", "calls"),
        [
            ("drain", [("qsig", "-s", "SIGUSR2", "7")]),
            ("stop", [("qsig", "-s", "SIGTERM", "7")]),
            ("kill", [("qsig", "-s", "SIGTERM", "7")] * 2),
        ],
    )
    def test_ends_a_job_by_signals(self, tmp_path, printing, how, calls):
        made = printing(PbsLauncher, qsig="", qdel="")

        PbsLauncher().end("7", how, is_waiting=False)
        PbsLauncher().end("7", how, is_waiting=True)

        assert made == [*calls, ("qdel", "7")]

    def test_after_an_interruption_finds_the_job_that_was_queued(self, tmp_path, printing):
        request = request_of(tmp_path)
        PbsLauncher().plan(request).write_files()
        text = PBS_JOB.format(state="Q", substate="10", end="waits", script=request.log_dir / "batch.sh")
        other = text.replace("7.login", "8.login").replace("run-1", "run-2")
        printing(PbsLauncher, qstat=other + text)

        assert PbsLauncher().submit(request, PbsLauncher().plan(request)) == "7.login"

    def test_is_found_by_its_configuration_where_it_is_not_on_the_path(self, tmp_path, monkeypatch):
        (tmp_path / "bin").mkdir()
        (program := tmp_path / "bin" / "qstat").write_text("#!/bin/sh\necho found $*\n")
        program.chmod(0o755)
        (tmp_path / "pbs.conf").write_text(f"PBS_SERVER=login\nPBS_EXEC={tmp_path}\n")
        monkeypatch.setenv("PBS_CONF_FILE", str(tmp_path / "pbs.conf"))

        assert PbsLauncher().call("qstat", "-f") == "found -f\n"


class TestAJobThatIsOutOfTime:
    @pytest.mark.parametrize(
        ("launcher", "held"),
        [
            (PbsLauncher, ("-W", "depend=afterany:7")),
            (GridEngineLauncher, ("-hold_jid", "7")),
        ],
    )
    def test_is_submitted_again_to_start_after_its_end(self, tmp_path, printing, launcher, held):
        options = ["-v DATA=/data", "-W depend=afterok:3", "-hold_jid 3"]
        name = launcher.batch_system.launcher
        request = request_of(tmp_path, name, **{name: {"options": options}})
        request.log_dir.mkdir(parents=True)
        calls = printing(launcher, qsub="9\n")

        launcher().put_back("7", request)

        after_options = calls[0][calls[0].index("-hold_jid") + 2 :]
        assert after_options[:2] == held
        assert after_options[-2:] == (str(request.log_dir / "batch.sh"), "7")
        assert launcher().job_id_file(request.log_dir).read_text() == "9\n"

    def test_continues_although_its_launcher_was_killed_before_it_had_written_the_new_id(self, tmp_path):
        request = request_of(tmp_path)
        plan = PbsLauncher().plan(request)
        plan.write_files()
        script = request.log_dir / "batch.sh"
        script.write_text(script.read_text().replace("exec ", "exec echo trains #"))

        def run(job_id, *argument):
            return subprocess.run(
                ["bash", script, *argument],
                env={"PBS_JOBID": job_id},
                capture_output=True,
                text=True,
                check=True,
            ).stdout

        assert run("7") == "trains\n"
        assert run("8") == "", "it was submitted twice"
        assert run("9", "7") == "trains\n"
        assert run("7") == "", "7 is over"

    @pytest.mark.parametrize(("limit_s", "grace_s", "after_s"), [(5.2, 5.0, 0.2), (0.4, 30.0, 0.2)])
    def test_is_notified_one_grace_period_before_its_time_limit(self, monkeypatch, limit_s, grace_s, after_s):
        monkeypatch.setattr(batch, "_age_s", lambda: 0.0)
        received_s = []
        before = signal.signal(signal.SIGUSR1, lambda *_: received_s.append(time.monotonic()))
        begun_s = time.monotonic()
        try:
            with batch._notified(limit_s, grace_s):
                while not received_s:
                    assert time.monotonic() < begun_s + 20
                    time.sleep(0.01)
        finally:
            signal.signal(signal.SIGUSR1, before)

        assert received_s[0] - begun_s >= after_s - 0.01

    @pytest.mark.parametrize(
        ("limit_s", "grace_s", "after_s"),
        [(3600.0, 30.0, 3470.0), (130.0, 30.0, 15.0), (120.0, 30.0, 10.0), (90.0, 30.0, 0.0)],
    )
    def test_is_given_the_grace_period_or_half_of_what_is_left(self, monkeypatch, limit_s, grace_s, after_s):
        started = []

        class Timer:
            def __init__(self, seconds, *_):
                started.append(seconds)

            start = cancel = lambda _: None

        monkeypatch.setattr(batch, "_age_s", lambda: 100.0)
        monkeypatch.setattr(batch, "Timer", Timer)
        with batch._notified(limit_s, grace_s), batch._notified(math.inf, grace_s):
            pass

        assert started == [after_s]

    def test_is_started_although_its_time_limit_is_unknown(self, tmp_path, printing, monkeypatch):
        printing(PbsLauncher, qstat=LaunchError("qstat: no server"))
        shown = []
        monkeypatch.setenv("PBS_JOBID", "7")
        monkeypatch.setattr(SupervisedLauncher, "run", lambda *_: 0)
        console = SimpleNamespace(print=shown.append)

        assert PbsAllocationLauncher().run(request_of(tmp_path), LaunchPlan(()), console) == 0
        assert shown == ["warning: the time limit of this job is unknown: qstat: no server"]

    def test_counts_its_time_from_the_start_of_the_script(self):
        program = (
            "import time; time.sleep(0.3); from horovod_train.launch.launchers.batch import _age_s; "
            "print(_age_s())"
        )
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            start_new_session=True,
        )

        assert 0.3 <= float(done.stdout) < 60


class TestGridEngine:
    def test_asks_for_a_parallel_environment_and_the_options_of_the_job(self, tmp_path):
        settings = {"parallel_environment": "mpi", "options": ["-l h_rt=1:0:0"], "requeue": False}
        request = request_of(tmp_path, "gridengine", gridengine=settings)
        command = " ".join(GridEngineLauncher().plan(request).argv)

        assert command.startswith("qsub -terse -N j ")
        assert " -notify -r n -pe mpi 3 -l h_rt=1:0:0 " in command
        assert command.endswith(str(request.log_dir / "batch.sh"))

    def test_does_not_let_a_name_begin_with_a_digit(self, tmp_path):
        job = Job.model_validate({"name": "7b", "task": "digits", "run_dir": str(tmp_path)})

        assert "job-7b" in GridEngineLauncher().submit_command(resolve(job, "run-1"))

    @pytest.mark.parametrize(
        ("letters", "state", "message"),
        [
            ("r", "running", ""),
            ("dr", "running", ""),
            ("hqw", "queued", "in Grid Engine's queue: state hqw"),
            ("Rq", "queued", "in Grid Engine's queue: state Rq"),
            ("Eqw", "queued", "can't chdir to /nowhere"),
        ],
    )
    def test_tells_the_state_of_a_job(self, tmp_path, monkeypatch, letters, state, message):
        job = submitted(request_of(tmp_path, "gridengine"), "gridengine")
        StateFile(job.log_dir).write("running")

        def call(self, *command):
            return QSTAT_J.format(script="x") if "-j" in command else QSTAT.format(letters=letters)

        monkeypatch.setattr(GridEngineLauncher, "call", call)
        status = GridEngineLauncher().status(job)

        assert status.state == state
        assert message in status.message

    @pytest.mark.parametrize(
        ("of_queue", "limit_s"),
        [("INFINITY", 5400.0), ("1:00:00", 3600.0), ("INFINITY,[node1=0:1:0]", 5400.0), ("2:00:00", 5400.0)],
    )
    def test_has_the_time_limit_of_the_job_or_of_the_queue(self, printing, monkeypatch, of_queue, limit_s):
        monkeypatch.setenv("QUEUE", "all.q")
        queue = f"qname  all.q\ns_rt   INFINITY\nh_rt                  {of_queue}\n"
        printing(GridEngineLauncher, qstat=QSTAT_J.format(script="x"), qconf=queue)

        assert GridEngineAllocationLauncher().time_limit_s("7") == limit_s

    def test_reads_the_hosts_of_the_job(self, tmp_path):
        file = tmp_path / "hosts"
        file.write_text(
            "node2 2 all.q@node2 UNDEFINED\nnode1 1 all.q@node1 UNDEFINED\nnode2 1 b.q@node2 <NULL>\n"
        )
        of_job = {"JOB_ID": "7", "SGE_ROOT": "/sge"}

        assert GridEngineAllocationLauncher().hosts({**of_job, "PE_HOSTFILE": str(file)}) == [
            "node2:3",
            "node1:1",
        ]
        assert GridEngineAllocationLauncher().hosts(of_job) == [f"{socket.gethostname()}:1"]
        with pytest.raises(LaunchError, match="no Grid Engine allocation"):
            GridEngineAllocationLauncher().hosts({})

    def test_reaches_other_hosts_by_qrsh_which_notifications_do_not_end(self, tmp_path):
        request = request_of(tmp_path, "gridengine-allocation", num_ranks=2, hosts=["here:1", "there:1"])
        plan = GridEngineAllocationLauncher().plan(request)
        shell = GridEngineAllocationLauncher().shell(request, request.hosts[1])

        assert plan.argv[:2] == ("/bin/sh", "-c")
        assert "trap '' USR1 USR2" in plan.files[request.log_dir / "qrsh"]
        assert plan.env["OMPI_MCA_plm_rsh_agent"] == str(request.log_dir / "qrsh")
        assert "qrsh -inherit" in shell[2]
        assert shell[-1] == "there"


class TestLsf:
    def test_renders_a_script_and_submits_none(self, tmp_path):
        settings = {"ranks_per_node": 4, "options": ["-W 2:00"], "setup": ["module load x"]}
        request = request_of(tmp_path, "lsf", grace_s=90.0, lsf=settings)
        plan = LsfLauncher().plan(request)
        script = plan.files[request.log_dir / "batch.sh"].splitlines()

        assert plan.argv == ("/bin/sh", "-c", f"bsub < {request.log_dir}/batch.sh")
        assert '#BSUB -R "span[ptile=4]"' in script
        assert {"#BSUB -n 3", "#BSUB -wa USR1 -wt 2", "#BSUB -r", "#BSUB -W 2:00"} <= set(script)
        with pytest.raises(LaunchError, match="only renders batch scripts"):
            LsfLauncher().submit(request, plan)

    def test_starts_ranks_by_jsrun_with_spectrum_mpi_and_else_through_blaunch(self, tmp_path, monkeypatch):
        for name in ("jsrun", "mpirun"):
            (program := tmp_path / name).write_text("#!/bin/sh\n")
            program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        hosts = {"num_ranks": 2, "hosts": ["here:1", "there:1"]}
        request = request_of(tmp_path, "lsf-allocation", **hosts)

        def program(name):
            mpi = Mpi(name, "10.4", tmp_path, tmp_path / "mpirun", "libmpi.so.40")
            monkeypatch.setattr("horovod_train.launch.mpi.installed_mpi", lambda: mpi)
            return LsfAllocationLauncher().plan(request)

        assert program("Spectrum MPI").argv[0] == str(tmp_path / "jsrun")
        assert program("Open MPI").env["PRTE_MCA_plm_ssh_agent"] == "blaunch"

    def test_reads_the_hosts_of_the_job(self, tmp_path):
        (tmp_path / "hosts").write_text("node1\nnode1\nnode2\n")
        of_job = {"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": str(tmp_path / "hosts")}

        assert LsfAllocationLauncher().hosts(of_job) == ["node1:2", "node2:1"]
        with pytest.raises(LaunchError, match="no LSF allocation"):
            LsfAllocationLauncher().hosts({})


class TestPbsAllocation:
    def test_reads_the_hosts_of_the_job(self, tmp_path):
        (tmp_path / "nodes").write_text("node1\nnode1\nnode2\n")

        hosts = PbsAllocationLauncher().hosts({"PBS_JOBID": "7", "PBS_NODEFILE": str(tmp_path / "nodes")})

        assert hosts == ["node1:2", "node2:1"]
        with pytest.raises(LaunchError, match="no PBS allocation"):
            PbsAllocationLauncher().hosts({})

    @pytest.mark.parametrize(("controller", "program"), [("mpi", "mpirun"), ("gloo", "horovodrun")])
    def test_starts_ranks_over_ssh(self, tmp_path, controller, program):
        hosts = {"num_ranks": 2, "hosts": ["here:1", "there:1"], "controller": controller}
        request = request_of(tmp_path, "pbs-allocation", **hosts)
        plan = PbsAllocationLauncher().plan(request)

        assert plan.argv[0].endswith(program)
        assert request.ssh_config in plan.files

    def test_has_the_walltime_as_its_time_limit(self, printing):
        printing(PbsLauncher, qstat=PBS_JOB.format(state="R", substate="42", end="runs", script="x"))

        assert PbsAllocationLauncher().time_limit_s("7.login") == 5400.0
