"""A whole run on this machine, whose ranks are scripts: from the plan to the verdict, without a framework."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import ClassVar

import psutil
import pytest
from rich.console import Console
from support.following import event

from horovod_train.config.schema import Job
from horovod_train.errors import LaunchError, LostError, PreemptedError
from horovod_train.events.file import read_events
from horovod_train.launch import jobs
from horovod_train.launch.base import LaunchPlan
from horovod_train.launch.console import JobConsole
from horovod_train.launch.launchers.hosts import SupervisedLauncher, read_log
from horovod_train.launch.submit import resolve
from horovod_train.launch.supervise import attempt
from horovod_train.launch.supervise.follow import Frozen


def said(kind, rank=0, **fields):
    """What a rank says, as the lines of a script."""
    line = f"[1,{rank}]<stdout>:{event(kind, rank, **fields)}\n"
    return f"sys.stdout.write({line!r}); sys.stdout.flush()\n"


START = said("started")
END = said("summary")
FAILURE = {"host": "here", "message": "ValueError: no", "traceback": "", "is_cause": True, "exit_code": 3}
# As a worker does on a drain request.
LEAVES = (
    "def leave(*_):\n    "
    + said("preempted", step=4, epoch=0.5).replace("\n", "; ", 1)
    + "os._exit(75)\nsignal.signal(signal.SIGUSR1, leave)\n"
)
WAITS = "open('waiting', 'w').close()\ntime.sleep(30)\n"


class Scripted(SupervisedLauncher):
    """Starts one process in the place of all ranks."""

    def plan(self, request):
        return LaunchPlan((request.rank_command,), {"FROM_THE_PLAN": "yes"})

    def shell(self, request, host):
        return ["/bin/sh", "-c"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script as all ranks of a job; what was shown stands in ``run.shown``."""
    # To the launch it is a worker, by its command line.
    fake = tmp_path / "fake" / "horovod_train"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("")
    (fake / "__main__.py").write_text(
        "import json, os, signal, subprocess, sys, time\nexec(open(os.environ['SCRIPT']).read())\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def start(script, *, task="digits", is_left=False, **launch):
        (tmp_path / "script.py").write_text(script)
        env = {"PYTHONPATH": str(fake.parent), "SCRIPT": str(tmp_path / "script.py"), **launch.pop("env", {})}
        job = Job.model_validate(
            {
                "name": f"unit-{os.getpid()}",
                "task": task,
                "run_dir": str(tmp_path / "runs"),
                "launch": {"num_ranks": 2, "env": env, **launch},
            }
        )
        start.request = request = resolve(job)
        launcher = Scripted()
        start.shown = shown = io.StringIO()
        try:
            return launcher.run(request, launcher.plan(request), JobConsole(Console(file=shown, width=200)))
        finally:
            start.text = shown.getvalue()
            start.state = jobs.StateFile(request.log_dir).read()
            assert Path(request.stage).exists() == is_left

    return start


def signals(tmp_path, *numbers, apart_s=0.3):
    """Send signals to this process, the first when the script waits."""

    def send():
        while not (tmp_path / "waiting").exists():
            time.sleep(0.02)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(apart_s)

    timer = Timer(0.0, send)
    timer.daemon = True
    timer.start()


class TestAGoodEnd:
    def test_is_told_shown_and_logged(self, run, capfd):
        script = START + said("progress") + "print('[1,1]<stdout>:  hello')\n" + END

        assert run(script) == 0

        assert (run.state.state, run.state.exit_code) == ("succeeded", 0)
        assert "7 parameters on 2 ranks" in run.text
        assert "step 5/10" in run.text
        assert "[rank 1]   hello" in run.text
        assert "trained j: 1 epochs, 2 steps" in run.text
        log = (run.request.log_dir / "run.log").read_text()
        assert log.count("@horovod-train") == 3
        records = list(read_events(run.request.log_dir / "events.jsonl"))
        assert [(record.rank, record.event.kind) for record in records] == [
            (None, "opened"),
            (None, "state"),  # starting
            (None, "attempt"),
            (None, "state"),  # running
            (0, "started"),
            (0, "progress"),
            (0, "summary"),
            (None, "state"),
        ]
        assert records[-1].event.state == "succeeded"
        assert (run.request.log_dir / "rank-1.log").read_text() == "  hello\n"

    def test_ranks_find_their_files_and_their_environment(self, run, tmp_path, monkeypatch):
        monkeypatch.setenv("TOKEN", "hunter2hunter2")
        script = (
            "stage = os.environ['HOROVOD_TRAIN_RUN']\n"
            "found = {'env': dict(os.environ), 'cwd': os.getcwd(), 'argv': sys.argv, 'files': {\n"
            "  name: oct(os.stat(f'{stage}/{name}').st_mode)[-3:] for name in os.listdir(stage)},\n"
            "  'stage': oct(os.stat(stage).st_mode)[-3:], 'job': json.load(open(f'{stage}/job.json'))}\n"
            "json.dump(found, open('found.json', 'w'))\n"
            "print('[1,0]<stdout>:my token is', os.environ['TOKEN'])\n" + START + END
        )

        run(script, env={"MINE": "a b"}, secrets={"TOKEN": "env:TOKEN"}, threads_per_rank=3)

        found = json.loads((tmp_path / "found.json").read_text())
        environ = found["env"]
        assert environ["HOROVOD_TRAIN_RUN"] == run.request.stage
        assert (environ["OMP_NUM_THREADS"], environ["PYTHONUNBUFFERED"]) == ("3", "1")
        assert (environ["MINE"], environ["FROM_THE_PLAN"]) == ("a b", "yes")
        assert environ["TOKEN"] == "hunter2hunter2"  # noqa: S105
        assert found["cwd"] == str(tmp_path)
        assert found["argv"][1:] == [
            *("worker", "--events", "--run-id", run.request.run_id, f"{run.request.stage}/job.json")
        ]
        assert found["stage"] == "700"
        assert found["files"].pop("rank") == "700"
        assert found["files"].pop("daemon") == "700"
        assert found["files"]["environment"] == found["files"]["job.json"] == "600"
        assert any(name.startswith("alive-0-") for name in found["files"])
        assert found["job"]["launch"]["num_ranks"] == 2
        assert "my token is ***" in run.text
        assert "hunter2" not in (run.request.log_dir / "run.log").read_text()

    def test_what_a_rank_leaves_behind_is_killed(self, run, tmp_path):
        script = (
            "left = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
            "open('left', 'w').write(str(left.pid))\n" + START + END
        )

        run(script)

        pid = int((tmp_path / "left").read_text())
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE

    def test_secrets_that_cannot_be_hidden_are_named(self, run, monkeypatch):
        monkeypatch.setenv("PIN", "1234")

        run(START + END, secrets={"PIN": "env:PIN"})

        assert "warning: launch.secrets.PIN is too short to be hidden in logs" in run.text


class TestABadEnd:
    def test_of_a_rank_is_the_runs(self, run):
        with pytest.raises(LaunchError, match="rank 1 on here: ValueError: no") as caught:
            run(START + said("failure", rank=1, **FAILURE) + "sys.exit(3)\n")

        assert caught.value.exit_code == run.state.exit_code == 3
        assert run.state.state == "failed"
        assert "ValueError: no" in run.state.message

    @pytest.mark.parametrize(
        ("script", "expected"),
        [
            ("sys.exit(7)", "the launcher ended with code 7 and no rank said why"),
            ("os.kill(os.getpid(), signal.SIGKILL)", "the launcher ended with code 137"),
            ("pass", "the ranks ended with exit code 0 before training was done"),
        ],
    )
    def test_without_a_word_is_told_by_its_code(self, run, script, expected):
        with pytest.raises(LostError, match=expected):
            run(START + script)

        assert (run.state.state, run.state.exit_code) == ("failed", 1)

    def test_of_a_command_that_is_not_there_is_told(self, run, monkeypatch):
        monkeypatch.setattr(Scripted, "plan", lambda *_: LaunchPlan(("/nowhere/run",)))

        with pytest.raises(LaunchError, match="cannot start /nowhere/run: No such file or directory"):
            run("")

        assert run.state.state == "failed"

    def test_that_nobody_foresaw_is_noted_as_well(self, run, monkeypatch):
        monkeypatch.setattr(Scripted, "plan", lambda *_: LaunchPlan((0,)))

        with pytest.raises(TypeError):
            run("")

        assert run.state.state == "failed"
        assert run.state.message.startswith("TypeError: ")


class TestAsked:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
    def test_ranks_save_and_leave(self, run, tmp_path, number):
        signals(tmp_path, number)

        with pytest.raises(PreemptedError, match="everything is saved at step 4") as caught:
            run(LEAVES + START + WAITS)

        assert caught.value.stopped_by == number
        assert (run.state.state, run.state.exit_code) == ("preempted", 75)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
    def test_not_by_a_signal_that_nohup_has_set_to_be_ignored(self, run, tmp_path, number):
        before = signal.signal(number, signal.SIG_IGN)
        signals(tmp_path, number)
        try:
            run(START + WAITS.replace("30", "1") + END)
        finally:
            signal.signal(number, before)

        assert run.state.state == "succeeded"

    def test_by_cancel_it_is_cancelled(self, run, tmp_path):
        """The verb marks the folder of the run first, and then sends SIGTERM."""
        mark = (
            "import pathlib\n"
            f"(state,) = pathlib.Path({str(tmp_path)!r}, 'runs').glob('*/*/state.json')\n"
            f"(state.parent / {jobs.CANCELLED_FILE!r}).touch()\n"
        )
        signals(tmp_path, signal.SIGTERM)

        with pytest.raises(PreemptedError) as caught:
            run(LEAVES + START + mark + WAITS)

        assert caught.value.exit_code == run.state.exit_code == 143
        assert run.state.state == "cancelled"

    def test_ranks_that_do_not_leave_are_killed_after_the_grace(self, run, tmp_path):
        signals(tmp_path, signal.SIGTERM)
        started = time.monotonic()

        with pytest.raises(LaunchError, match="stopped by signal 15, before the ranks had saved") as caught:
            run("signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n" + START + WAITS, grace_s=0.5)

        assert caught.value.exit_code == run.state.exit_code == 143
        assert run.state.state == "cancelled"
        assert time.monotonic() - started < 20

    def test_before_ranks_have_begun_it_says_so(self, run, tmp_path):
        signals(tmp_path, signal.SIGINT)

        with pytest.raises(LaunchError, match="before the ranks had begun to train") as caught:
            run("signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n" + WAITS, grace_s=0.2)

        assert caught.value.exit_code == 130

    def test_while_it_waits_its_state_says_so(self, run, tmp_path):
        signals(tmp_path, signal.SIGTERM)
        seen = []
        look = Timer(0.0, lambda: self.watch(tmp_path, seen))
        look.start()

        with pytest.raises(LaunchError):
            run("signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n" + START + WAITS, grace_s=1.0)
        look.join()

        assert ("running", "2 rank(s)") in seen
        assert ("stopping", "its ranks were requested to save and exit after their step") in seen

    @staticmethod
    def watch(tmp_path, seen):
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not any(state == "cancelled" for state, _ in seen):
            for file in tmp_path.glob("runs/*/*/state.json"):
                status = jobs.StateFile(file.parent).read()
                if (found := (status.state, status.message)) not in seen:
                    seen.append(found)
            time.sleep(0.02)


class TestAnotherHost:
    """Its agent is real; a shell stands in for ssh."""

    HOST: ClassVar = {"hosts": ["faraway:2"], "network_interface": "lo"}

    def test_takes_part_like_this_one(self, run, tmp_path):
        script = "json.dump(dict(os.environ), open('found.json', 'w'))\n" + START + END

        assert run(script, **self.HOST, host_settings={"faraway": {"env": {"THERE": "yes"}}}) == 0

        environ = json.loads((tmp_path / "found.json").read_text())
        assert "faraway: network interface lo (127.0.0.1): asked for" in run.text
        assert (environ["HOROVOD_GLOO_IFACE"], environ["HOROVOD_TRAIN_HOST"]) == ("lo", "faraway")
        assert environ["THERE"] == "yes"

    def test_gets_the_tasks_code_if_the_job_says_so(self, run, tmp_path):
        folder = tmp_path / "mine"
        folder.mkdir()
        (folder / "task.py").write_text("class Task: pass\n")
        script = (
            "stage = os.environ['HOROVOD_TRAIN_RUN']\n"
            "task = json.load(open(stage + '/job.json'))['task']\n"
            f"file = open({str(tmp_path / 'found.json')!r}, 'w')\n"
            "json.dump([task, os.listdir(stage + '/code'), os.getcwd()], file)\n" + START + END
        )

        run(script, task=f"{folder / 'task.py'}:Task", **self.HOST, ship_code=True)

        task, code, cwd = json.loads((tmp_path / "found.json").read_text())
        assert task == f"{run.request.stage}/code/task.py:Task"
        assert code == ["task.py"]
        assert cwd == f"{run.request.stage}/code"

    def test_that_is_cut_off_ends_the_run_with_its_name(self, run, tmp_path):
        script = (
            START + "agents = [p for p in os.listdir('/proc') if p.isdigit()]\n"
            "for pid in agents:\n"
            "    try: line = open(f'/proc/{pid}/cmdline').read()\n"
            "    except OSError: continue\n"
            "    if 'horovod_train.launch.hosts.agent' in line and os.environ['HOROVOD_TRAIN_RUN'] in line:\n"
            "        os.kill(int(pid), signal.SIGKILL)\n" + WAITS
        )

        with pytest.raises(LostError, match="faraway does not answer any more") as caught:
            run(script, is_left=True, **self.HOST)
        shutil.rmtree(run.request.stage)  # its agent would have removed it, had it not been killed

        assert caught.value.hosts == ("faraway",)

    def test_that_cannot_be_reached_is_an_error_before_anything_starts(self, run, monkeypatch):
        monkeypatch.setattr(Scripted, "shell", lambda *_: ["/bin/false"])

        with pytest.raises(LostError, match="faraway"):
            run("open('started', 'w')", **self.HOST)

        assert not Path("started").exists()


class TestCancel:
    @pytest.fixture
    def job(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        request = resolve(Job(name="j", task="digits", run_dir=str(tmp_path)), "run-1")
        request.log_dir.mkdir(parents=True)
        return jobs.submitted_job(request, "1")

    @pytest.mark.parametrize(
        ("how", "expected"),
        [
            ("drain", [signal.SIGUSR2, signal.SIGCONT]),
            ("stop", [signal.SIGTERM, signal.SIGCONT]),
            ("kill", [signal.SIGTERM, signal.SIGTERM, signal.SIGCONT]),
        ],
    )
    def test_sends_what_the_verb_means(self, job, monkeypatch, how, expected):
        jobs.StateFile(job.log_dir).write("running")
        sent = []
        monkeypatch.setattr(
            "horovod_train.launch.launchers.hosts.os.kill", lambda pid, n: sent.append((pid, n))
        )
        # Two signals at once would be one.
        monkeypatch.setattr("horovod_train.launch.launchers.hosts.sleep", lambda _: sent.append("a pause"))

        Scripted().cancel(job, how)

        assert sent[::2] == [(os.getpid(), number) for number in expected]
        assert sent[1::2] == ["a pause"] * len(expected)
        assert (job.log_dir / jobs.CANCELLED_FILE).exists() == (how != "drain")

    def test_ends_a_launcher_that_is_stopped(self, job):
        program = (
            "import pathlib, signal, sys; from horovod_train.launch.jobs import StateFile;"
            "state = StateFile(pathlib.Path(sys.argv[1]));"
            "signal.signal(signal.SIGTERM, lambda *_: (state.write('cancelled', 143), sys.exit()));"
            "state.write('running');"
            "signal.pause()"
        )
        with subprocess.Popen([sys.executable, "-c", program, str(job.log_dir)]) as launcher:
            while jobs.StateFile(job.log_dir).read().state != "running":
                time.sleep(0.05)
            launcher.send_signal(signal.SIGSTOP)

            Scripted().cancel(job, "stop")

            launcher.wait(30)
        assert jobs.StateFile(job.log_dir).read().state == "cancelled"

    def test_of_a_job_that_has_ended_does_nothing(self, job):
        jobs.StateFile(job.log_dir).write("succeeded", 0)

        Scripted().cancel(job, "stop")

        assert not (job.log_dir / jobs.CANCELLED_FILE).exists()

    def test_of_a_job_elsewhere_says_where_to_ask(self, job):
        state = jobs.StateFile(job.log_dir)
        state.write("running")
        file = job.log_dir / "state.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "host": "faraway"}))

        with pytest.raises(LaunchError, match="does not run on this host"):
            Scripted().cancel(job, "stop")


class TestReadingALog:
    def test_waits_for_it_and_follows_it_to_the_end(self, tmp_path):
        log = tmp_path / "run.log"
        goes_on = iter([True, True, True, False])

        def is_going_on():
            answer = next(goes_on)
            with log.open("a") as file:
                file.write(f"{answer}\n")
            return answer

        assert list(read_log(log, is_going_on)) == ["True", "True", "True", "False"]

    def test_pauses_between_two_looks(self, tmp_path, monkeypatch):
        pauses_s = []
        monkeypatch.setattr("horovod_train.launch.launchers.hosts.sleep", pauses_s.append)
        log = tmp_path / "run.log"

        def is_going_on():
            if len(pauses_s) == 2:
                log.touch()
            return len(pauses_s) < 5

        assert list(read_log(log, is_going_on)) == []
        assert len(pauses_s) == 5
        assert min(pauses_s) >= 0.1

    def test_of_a_job_that_never_wrote_one_is_empty(self, tmp_path):
        assert list(read_log(tmp_path / "run.log", lambda: False)) == []


def test_a_job_that_dies_while_it_is_submitted_is_told_with_its_last_words(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "python").write_text("#!/bin/sh\necho out of luck\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    request = resolve(Job(name="j", task="digits", run_dir=str(tmp_path / "runs")), "run-1")

    with pytest.raises(LaunchError, match="the job could not be started: out of luck"):
        Scripted().submit(request, LaunchPlan(("true",)))


class TestSubmitting:
    """A process of its own carries the job out; here a script does."""

    @pytest.fixture
    def submit(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        request = resolve(Job(name="j", task="digits", run_dir=str(tmp_path / "runs")), "run-1")

        def start(script):
            python = tmp_path / "python"
            python.write_text(f"#!/bin/sh\nLOG_DIR={request.log_dir}\n{script}\n")
            python.chmod(0o755)
            monkeypatch.setattr(sys, "executable", str(python))
            return int(Scripted().submit(request, LaunchPlan(("true",))))

        start.request = request
        return start

    def state(self, name):
        """What a shell writes when the job stands like this."""
        document = {"state": name, "exit_code": None, "message": "", "pid": 1, "host": "elsewhere"}
        return f"echo '{json.dumps(document)}' > $LOG_DIR/state.json"

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it stays, by intent
    def test_returns_the_process_as_soon_as_the_job_has_a_state(self, submit):
        pid = submit(f"echo $0 $* > $LOG_DIR/called; {self.state('starting')}; exec sleep 600")

        process = psutil.Process(pid)
        assert process.cmdline() == ["sleep", "600"]
        assert os.getsid(pid) == pid, "Ctrl-C is not for it"
        process.kill()
        process.wait()
        called = (submit.request.log_dir / "called").read_text().split()[1:]
        assert called[:4] == ["-P", "-m", "horovod_train", "run"]
        assert called[-4:] == ["--resolved", "--once", "--run-id", "run-1"]
        assert json.loads(Path(called[4]).read_text())["name"] == "j"

    def test_that_takes_too_long_is_given_up_and_nothing_trains_on(self, submit, monkeypatch):
        pid = submit.request.log_dir / "pid"
        now_s = [0.0]  # the deadline is taken first; the next look comes when the script is there

        def monotonic():
            now_s[0] += 31.0 * (now_s[0] == 0.0 or pid.exists())
            return now_s[0] - 31.0

        monkeypatch.setattr("horovod_train.launch.launchers.hosts.monotonic", monotonic)

        with pytest.raises(
            LaunchError, match="could not be started: the launcher process wrote no state for 30 s"
        ):
            submit("echo $$ > $LOG_DIR/new; mv $LOG_DIR/new $LOG_DIR/pid; exec sleep 600")

        assert not psutil.pid_exists(int(pid.read_text()))

    def test_that_was_cancelled_before_starts_nothing(self, submit):
        job = jobs.submitted_job(submit.request, "")
        Scripted().cancel(job, "stop")

        submit("echo called >> $LOG_DIR/calls; exit 1")

        assert not (job.log_dir / "calls").exists()
        status = Scripted().status(job)
        assert (status.state, status.exit_code) == ("cancelled", 143)
        assert jobs.StateFile(job.log_dir).claim() is False

    def test_again_starts_nothing(self, submit):
        submit(f"echo called >> $LOG_DIR/calls; {self.state('running')}")

        assert submit("echo called >> $LOG_DIR/calls; exit 1") == 1, "the process in the state file"
        assert (submit.request.log_dir / "calls").read_text() == "called\n"

    def test_its_log_is_that_of_the_run(self, submit):
        submit.request.log_dir.mkdir(parents=True)
        (submit.request.log_dir / "run.log").write_text("one\ntwo\n")
        jobs.StateFile(submit.request.log_dir).write("succeeded", 0)
        job = jobs.submitted_job(submit.request, "1")

        assert list(Scripted().logs(job, follow=True)) == list(Scripted().logs(job, follow=False))
        assert list(Scripted().logs(job, follow=True)) == ["one", "two"]


class TestWhileRanksRun:
    def test_a_log_that_cannot_be_written_is_told_in_the_state(self, run, tmp_path):
        in_the_way = f"import glob\nos.mkdir(glob.glob('{tmp_path}/runs/*/*/')[0] + 'rank-0.log')\n"

        run(START + in_the_way + "print('[1,0]<stdout>:loading', flush=True)\n" + END)

        assert "rank-0.log is incomplete: Is a directory" in run.state.message

    def test_that_is_elastic_goes_on_when_hosts_come_and_go(self, run, monkeypatch):
        carried = []

        def run_again(launcher, request, console, state, asked, followers, record):
            carried.append((request.job.launch.elastic.min_ranks, state.read().state, list(asked)))

        monkeypatch.setattr("horovod_train.launch.launchers.hosts.run_again", run_again)

        assert run("raise SystemExit(7)", elastic={"min_ranks": 1, "max_ranks": 2}) == 0

        assert carried == [(1, "starting", [])]
        assert run.state.state == "succeeded"

    def test_ranks_that_are_frozen_for_too_long_end_the_job(self, run, monkeypatch):
        @contextmanager
        def watching(hosts, health, handle, abort_frozen_ranks, report_wait):
            abort_frozen_ranks([Frozen(1, "here", 4711, 12.3, "stopped")])
            yield

        monkeypatch.setattr(attempt, "watching_ranks", watching)

        with pytest.raises(LostError, match=r"rank 1 on here \(process 4711, stopped\)"):
            run(START + "time.sleep(30)")

    def test_the_first_host_that_is_lost_is_to_blame(self, run, monkeypatch):
        def watch(self, timeout_s, on_lost):
            on_lost("n7", "no answer")
            on_lost("n8", "no answer")

        monkeypatch.setattr("horovod_train.launch.hosts.host_group.HostGroup.watch", watch)

        with pytest.raises(LostError, match=r"n7 does not answer any more \(no answer\)") as caught:
            run(START + "time.sleep(30)")

        assert caught.value.hosts == ("n7",)

    def test_a_host_that_is_silent_when_ranks_have_ended_is_to_blame(self, run, monkeypatch):
        monkeypatch.setattr(
            "horovod_train.launch.hosts.host_group.HostGroup.silent", lambda self, timeout_s: "n7"
        )

        with pytest.raises(LostError, match=r"n7 does not answer any more \(it is silent\)") as caught:
            run(START + "sys.exit(3)")

        assert caught.value.hosts == ("n7",)
