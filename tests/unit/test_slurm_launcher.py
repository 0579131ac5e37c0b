"""Jobs in Slurm's queue and in its allocations, on programs that keep a queue of one job in a folder."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import pytest

from horovod_train.config.schema import Job
from horovod_train.errors import LaunchError, PreemptedError
from horovod_train.launch import base
from horovod_train.launch.base import LaunchPlan, Submitted
from horovod_train.launch.hosts.hostlist import Host
from horovod_train.launch.jobs import LOG_FILE, StateFile
from horovod_train.launch.launchers.hosts import SupervisedLauncher
from horovod_train.launch.launchers.slurm.launcher import SlurmAllocationLauncher, SlurmLauncher
from horovod_train.launch.submit import resolve

PROGRAM = r"""#!/bin/sh
# The queue is $QUEUE: one file for each job, with its state.
echo "$(basename "$0") $*" >> "$QUEUE/calls"
case "$(basename "$0") $1 $2" in
"sbatch --parsable "*) echo PENDING > "$QUEUE/41"; echo "41;cluster";;
"scontrol show hostnames") printf '%s\n' "$3" | tr ',' '\n';;
"scontrol show job")
    [ -e "$QUEUE/$4" ] || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
    echo "JobId=$4 JobName=j JobState=$(cat "$QUEUE/$4") Reason=Resources Dependency=(null)";;
"scontrol requeue "*)
    [ -e "$QUEUE/$2" ] || { echo "Invalid job id specified" >&2; exit 1; }
    echo REQUEUED > "$QUEUE/$2";;
"squeue "*) cat "$QUEUE/squeue" 2>/dev/null;;
"scancel "*) case "$*" in *--signal*) ;; *) rm "$QUEUE/41";; esac;;
*) exit 9;;
esac
"""


@pytest.fixture
def queue(tmp_path, monkeypatch):
    folder = tmp_path / "queue"
    (programs := tmp_path / "programs").mkdir()
    folder.mkdir()
    for name in ("sbatch", "scontrol", "scancel", "squeue"):
        (programs / name).write_text(PROGRAM)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("QUEUE", str(folder))
    return folder


def request_of(folder, **launch):
    launch = {"num_ranks": 3, "launcher": "slurm", "grace_s": 40, **launch}
    job = Job.model_validate({"name": "j", "task": "digits", "run_dir": str(folder), "launch": launch})
    return resolve(job, "run-1")


@pytest.fixture
def job(tmp_path, queue):
    """A job that has been submitted, and waits."""
    request = request_of(tmp_path)
    launcher = SlurmLauncher()
    number = launcher.submit(request, launcher.plan(request))
    return Submitted(request.job_id, "slurm", number, request.log_dir, 0.0)


def calls(queue, program):
    return [line for line in (queue / "calls").read_text().splitlines() if line.startswith(program)]


class TestSubmitting:
    def test_leaves_a_script_and_the_job_that_it_runs(self, job, queue, tmp_path):
        script = job.log_dir / "batch.sh"
        inner = json.loads((job.log_dir / "request.json").read_text())

        assert job.native_id == "41"
        assert calls(queue, "sbatch") == [f"sbatch --parsable {script}"]
        assert (inner["launch"]["launcher"], inner["launch"]["num_ranks"]) == ("slurm-allocation", 3)
        assert (
            f"exec {sys.executable} -P -m horovod_train run {job.log_dir}/request.json" in script.read_text()
        )

    def test_asks_for_what_the_job_says(self, tmp_path):
        wishes = {
            "ranks_per_node": 2,
            "requeue": False,
            "options": {"mem": "3 G"},
            "setup": ["module load x"],
        }
        script = SlurmLauncher().script(request_of(tmp_path, slurm=wishes)).splitlines()

        assert "#SBATCH --ntasks=3" in script
        assert "#SBATCH --ntasks-per-node=2" in script
        assert "#SBATCH --signal=B:USR1@40" in script
        assert "#SBATCH --no-requeue" in script
        assert "#SBATCH --mem='3 G'" in script
        assert script.index("module load x") < script.index(f"cd {request_of(tmp_path).folder}")

    def test_without_wishes_asks_for_no_more(self, tmp_path):
        script = SlurmLauncher().script(request_of(tmp_path, grace_s=0.2))

        assert "ntasks-per-node" not in script
        assert "#SBATCH --signal=B:USR1@1\n" in script
        assert "#SBATCH --requeue\n" in script

    def test_after_an_interruption_finds_the_job_that_was_queued(self, tmp_path, queue):
        request = request_of(tmp_path)
        launcher = SlurmLauncher()
        interrupted = Submitted(request.job_id, "slurm", "", request.log_dir, 0.0)
        assert launcher.status(interrupted).message == "not in Slurm's queue: its submission was interrupted"
        launcher.plan(request).write_files()
        (queue / "squeue").write_text(f"40   /else/batch.sh  \n41   {request.log_dir}/batch.sh   \n")
        (queue / "41").write_text("PENDING")

        assert launcher.submit(request, launcher.plan(request)) == "41"
        assert launcher.status(interrupted).state == "queued"
        launcher.cancel(interrupted, "stop")
        assert not calls(queue, "sbatch")
        assert calls(queue, "scancel") == ["scancel 41"]

    def test_twice_trains_once_and_the_status_is_that_of_the_job_that_trains(self, job, queue):
        script = job.log_dir / "batch.sh"
        script.write_text(re.sub("exec .*", 'exec echo "$SLURM_JOB_ID" trains', script.read_text()))

        said = [
            subprocess.run(
                ["bash", script], env={"SLURM_JOB_ID": number}, capture_output=True, text=True, check=True
            ).stdout
            for number in ("42", "41", "42")  # 42 is requeued
        ]

        assert said == ["42 trains\n", "", "42 trains\n"]
        (queue / "42").write_text("RUNNING")
        (queue / "41").unlink()
        assert SlurmLauncher().status(job).state == "starting"


class TestStatus:
    def test_of_a_job_in_the_queue_says_what_it_waits_for(self, job):
        status = SlurmLauncher().status(job)

        assert (status.state, status.message) == ("queued", "in Slurm's queue: Resources")

    def test_of_a_job_that_runs_is_its_own_word(self, job, queue):
        (queue / "41").write_text("RUNNING")
        assert SlurmLauncher().status(job).state == "starting"

        StateFile(job.log_dir).write("running", message="step 3")
        status = SlurmLauncher().status(job)

        assert (status.state, status.message) == ("running", "step 3")

    def test_of_a_job_that_runs_again_is_not_its_last_word_of_before(self, job, queue):
        StateFile(job.log_dir).write("preempted", 75, "saved")

        (queue / "41").write_text("RUNNING")
        assert SlurmLauncher().status(job).state == "starting"
        (queue / "41").write_text("COMPLETING")
        assert SlurmLauncher().status(job).state == "preempted"

    def test_of_a_job_that_slurm_has_forgotten_is_its_own_word(self, job, queue):
        (queue / "41").unlink()
        StateFile(job.log_dir).write("succeeded", 0)

        status = SlurmLauncher().status(job)

        assert (status.state, status.exit_code) == ("succeeded", 0)

    @pytest.mark.parametrize(
        ("slurm", "state", "code", "said"),
        [
            ("CANCELLED", "cancelled", 143, "cancelled in Slurm; before that: queued"),
            ("COMPLETED", "failed", 1, "the state file has no final state"),
            ("NODE_FAIL", "failed", 1, "Slurm reports NODE_FAIL, but the state file"),
            (None, "failed", 1, "Slurm reports no job with this ID, but"),
        ],
    )
    def test_of_a_job_that_could_not_say_how_it_ended_is_slurms_word(
        self, job, queue, slurm, state, code, said
    ):
        if slurm:
            (queue / "41").write_text(slurm)
        else:
            (queue / "41").unlink()

        status = SlurmLauncher().status(job)

        assert (status.state, status.exit_code) == (state, code)
        assert said in status.message

    def test_cannot_be_known_where_slurm_does_not_answer(self, job, monkeypatch):
        monkeypatch.setenv("PATH", "/nowhere")

        with pytest.raises(LaunchError, match="scontrol is not installed here") as caught:
            SlurmLauncher().status(job)
        assert "login node" in caught.value.hint
        assert SlurmLauncher().is_running(job), "it may"


class TestWaiting:
    def test_is_over_when_the_job_has_ended(self, job, queue, monkeypatch):
        launcher, slept = SlurmLauncher(), []

        def sleep(seconds):
            slept.append(seconds)
            if len(slept) == 2:
                (queue / "41").unlink()
                StateFile(job.log_dir).write("succeeded", 0)

        monkeypatch.setattr("horovod_train.launch.base.sleep", sleep)

        assert launcher.wait(job).exit_code == 0
        assert slept == [launcher.poll_s] * 2

    def test_is_patient_with_a_system_that_does_not_answer(self, job, monkeypatch):
        launcher, now_s, asked = SlurmLauncher(), [0.0], []

        def status(job):
            asked.append(now_s[0])
            if now_s[0] < 100:
                return StateFile(job.log_dir).read_recorded()
            raise LaunchError("no answer")

        def sleep(seconds):
            now_s[0] += 50 * seconds

        monkeypatch.setattr(launcher, "status", status)
        monkeypatch.setattr("horovod_train.launch.base.monotonic", lambda: now_s[0])
        monkeypatch.setattr("horovod_train.launch.base.sleep", sleep)

        with pytest.raises(LaunchError, match="no answer"):
            launcher.wait(job)
        assert asked[-1] == 700.0, "ten minutes after the last answer, at 50 s, it is not yet too long"


class TestLogs:
    def test_are_those_of_the_job(self, job, queue):
        (job.log_dir / LOG_FILE).write_text("one\ntwo\n")
        (job.log_dir / "slurm.log").write_text("of the script\n")

        assert list(SlurmLauncher().logs(job, follow=False)) == ["one", "two"]

    def test_are_those_of_the_script_where_it_did_not_come_as_far(self, job, queue):
        (queue / "41").unlink()
        (job.log_dir / "slurm.log").write_text("module: not found\n")

        assert list(SlurmLauncher().logs(job, follow=True)) == ["module: not found"]


class TestCancel:
    @pytest.mark.parametrize(
        ("how", "flags", "is_marked"),
        [
            ("drain", "--batch --signal=USR2 ", False),
            ("stop", "--batch --signal=TERM ", True),
            ("kill", "", True),
        ],
    )
    def test_of_a_job_that_runs_sends_what_the_verb_means(self, job, queue, how, flags, is_marked):
        (queue / "41").write_text("RUNNING")

        SlurmLauncher().cancel(job, how)

        assert calls(queue, "scancel") == [f"scancel {flags}41"]
        assert (job.log_dir / "cancelled").exists() == is_marked

    def test_of_a_job_that_waits_takes_it_out_of_the_queue(self, job, queue):
        SlurmLauncher().cancel(job, "stop")

        assert calls(queue, "scancel") == ["scancel 41"]

    def test_of_a_job_that_has_ended_does_nothing(self, job, queue):
        (queue / "41").write_text("FAILED")

        SlurmLauncher().cancel(job, "kill")

        assert calls(queue, "scancel") == []


class TestCallingSlurm:
    def test_a_refusal_is_told_in_its_own_words(self, queue):
        with pytest.raises(LaunchError, match="scontrol: slurm_load_jobs error: Invalid job id"):
            SlurmLauncher().call("scontrol", "show", "job", "--oneliner", "9")

    def test_a_refusal_without_words_is_told_by_its_code(self, queue):
        with pytest.raises(LaunchError, match="sbatch: exit code 9"):
            SlurmLauncher().call("sbatch", "what")

    def test_one_that_does_not_answer_is_not_waited_for_for_ever(self, monkeypatch):
        monkeypatch.setattr(base, "TIMEOUT_S", 0.1)

        with pytest.raises(LaunchError, match=r"sleep did not answer within 0\.1 s") as caught:
            SlurmLauncher().call("sleep", "5")
        assert "the server of Slurm" in caught.value.hint


class TestAnAllocation:
    def test_gives_its_nodes_with_as_many_ranks_as_slurm_says(self, queue):
        environ = {"SLURM_JOB_NODELIST": "a,b,c", "SLURM_TASKS_PER_NODE": "2(x2),1"}

        assert SlurmAllocationLauncher().hosts(environ) == ["a:2", "b:2", "c:1"]
        assert SlurmAllocationLauncher().hosts({"SLURM_JOB_NODELIST": "a"}) == ["a:1"]

    def test_of_which_a_step_has_a_part_is_refused(self, queue):
        environ = {"SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "1"}

        with pytest.raises(LaunchError, match="in a step on 1 of the 2 nodes of its allocation") as caught:
            SlurmAllocationLauncher().hosts(environ)
        assert "not inside srun" in caught.value.hint

    def test_that_is_not_there_is_told_with_what_to_do(self):
        with pytest.raises(LaunchError, match="no Slurm allocation") as caught:
            SlurmAllocationLauncher().hosts({})
        assert "launch.launcher: slurm" in caught.value.hint

    def test_is_reached_by_steps_beside_the_others(self, tmp_path):
        shell = SlurmAllocationLauncher().shell(request_of(tmp_path), Host("b", 2))

        assert shell[:2] == ["srun", "--overlap"]
        assert "--nodelist=b" in shell
        assert shell[-2:] == ["/bin/sh", "-c"]

    def test_over_gloo_a_task_is_a_rank(self, tmp_path, queue):
        (tmp_path / "programs" / "srun").write_text(PROGRAM)
        (tmp_path / "programs" / "srun").chmod(0o755)
        request = request_of(tmp_path, controller="gloo", hosts=["a:2", "b:1"])

        argv = SlurmAllocationLauncher().plan(request).argv

        assert argv[:5] == (sys.executable, "-P", "-m", "horovod_train.horovod.rendezvous", "a:2,b:1")
        assert {"--ntasks=3", "--nodes=2", "--label", "--kill-on-bad-exit=1"} <= set(argv)
        assert argv[-1] == request.rank_command

    def test_over_mpi_mpirun_starts_the_ranks(self, tmp_path):
        request = request_of(tmp_path, controller="mpi", hosts=["a:2", "b:1"])

        plan = SlurmAllocationLauncher().plan(request)

        assert plan.argv[0].endswith("mpirun")
        assert plan.argv[-1] == request.rank_command
        assert any(name.startswith("OMPI_MCA") for name in plan.env)


class TestWhenTheTimeOfAnAllocationIsOver:
    @pytest.fixture
    def ends(self, tmp_path, queue, monkeypatch):
        """Run a job that leaves, asked by a signal to its launcher; return its state."""

        def run(stopped_by, number, **slurm):
            def left(*_):
                error = PreemptedError("preempted: everything is saved at step 4", hint="again")
                error.stopped_by = stopped_by
                raise error

            monkeypatch.setattr(SupervisedLauncher, "run", left)
            monkeypatch.setenv("SLURM_JOB_ID", number)
            request = request_of(tmp_path, slurm=slurm)
            request.log_dir.mkdir(parents=True)
            StateFile(request.log_dir).write("preempted", 75, "saved")
            with pytest.raises((PreemptedError, LaunchError)) as caught:
                SlurmAllocationLauncher().run(request, LaunchPlan(()), None)
            return StateFile(request.log_dir).read_recorded(), caught.value

        (queue / "41").write_text("RUNNING")
        return run

    def test_the_job_is_put_back_into_the_queue(self, ends, queue):
        state, error = ends(signal.SIGUSR1, "41")

        assert (queue / "41").read_text().strip() == "REQUEUED"
        assert isinstance(error, PreemptedError)
        assert state.state == "queued"
        assert "time limit reached, requeued; preempted" in state.message

    def test_a_job_that_does_not_want_to_is_not(self, ends, queue):
        state, _ = ends(signal.SIGUSR1, "41", requeue=False)

        assert ((queue / "41").read_text(), state.state) == ("RUNNING", "preempted")

    def test_a_job_that_a_person_has_stopped_is_not(self, ends, queue):
        state, _ = ends(signal.SIGTERM, "41")

        assert ((queue / "41").read_text(), state.state) == ("RUNNING", "preempted")

    def test_a_job_that_slurm_does_not_take_back_is_preempted(self, ends):
        state, error = ends(signal.SIGUSR1, "7")

        assert "Invalid job id" in str(error)
        assert (state.state, state.exit_code) == ("preempted", 75)
        assert "saved at step 4" in state.message
