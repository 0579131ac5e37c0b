"""A launch is a plan first: printed whole, compared whole."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import ClassVar

import pytest
from rich.console import Console
from support.following import Followed, event
from support.hosts import described

from horovod_train.config.schema import Job
from horovod_train.errors import KeyUsedError, LaunchError, LostError, PreemptedError
from horovod_train.events.types import Notice, Progress, Resumed, Targets
from horovod_train.events.wire import (
    Reporter,
    lines_of_ranks,
    parse_line,
    progress_text,
    summary_lines,
    to_line,
)
from horovod_train.horovod import environment
from horovod_train.horovod.mpi import Mpi
from horovod_train.launch import mpi
from horovod_train.launch.base import JobStatus, LaunchPlan, PolledLauncher
from horovod_train.launch.console import JobConsole
from horovod_train.launch.hosts.host_group import HostGroup
from horovod_train.launch.hosts.hostlist import Chosen, Host
from horovod_train.launch.hosts.staging import Mask, too_short_to_hide
from horovod_train.launch.jobs import StateFile, find_job, jobs_dir, known_jobs
from horovod_train.launch.submit import make_plan, resolve, run_job, submit_job, submit_once, submitted
from horovod_train.launch.supervise.follow import Frozen
from horovod_train.launch.supervise.preflight import check_clocks, check_reach, choose_interfaces

BIN = Path(sys.executable).parent


def request_for(tmp_path, **sections):
    return resolve(
        Job.model_validate({"name": "j", "task": "digits", "run_dir": str(tmp_path), **sections}), "run-1"
    )


def text_of(tmp_path, **sections):
    text = make_plan(request_for(tmp_path, **sections)).as_text()
    path = text.partition("PATH=")[2].partition(" \\\n")[0]
    return (
        text.replace(path, "<PATH>")
        .replace(f"{BIN}/horovodrun", "<BIN>/horovodrun")
        .replace(f"{BIN}/mpirun", "<BIN>/mpirun")
        .replace(str(tmp_path), "<RUNS>")
    )


OPEN_MPI_4 = Mpi("Open MPI", "4.1.8", BIN, BIN / "python", "libmpi.so.40", ("pmix",))


def put_out_by_mpirun(texts, choice):
    """What Open MPI 4's mpirun -tag-output writes: each piece that it has read of a rank, and its tag
    before the piece and after every newline inside it."""
    left, output = dict(enumerate(texts)), ""
    while left:
        rank = choice.choice(list(left))
        size = choice.randint(1, len(left[rank]))
        piece, left[rank] = left[rank][:size], left[rank][size:]
        tag = f"[1,{rank}]<stdout>:"
        output += tag + piece[:-1].replace("\n", "\n" + tag) + piece[-1]
        left = {rank: text for rank, text in left.items() if text}
    return output


class TestPlan:
    @pytest.fixture(autouse=True)
    def engine(self, monkeypatch):
        monkeypatch.setattr(environment, "loopback_library", lambda: Path("/engine/loopback.so"))
        monkeypatch.setattr(mpi, "installed_mpi", lambda: OPEN_MPI_4)
        monkeypatch.delenv("LD_PRELOAD", raising=False)

    def test_two_ranks_on_this_machine(self, tmp_path):
        first, rest = text_of(tmp_path, launch={"num_ranks": 2}).split("\n", 1)

        assert first.startswith("# writes <RUNS>/j/run-1/job.json (")
        assert rest == (
            f"LD_PRELOAD=/engine/loopback.so \\\n  MPI4PY_LIBMPI={OPEN_MPI_4.library} \\\n"
            "  OMPI_MCA_mpi_yield_when_idle=1 \\\n  OMPI_MCA_oob_tcp_if_include=lo \\\n"
            f"  OPAL_PREFIX={BIN.parent} \\\n  PATH=<PATH> \\\n"
            "  <BIN>/horovodrun --mpi -np 2 -H localhost:2 --disable-cache /tmp/horovod_train-j-run-1/rank"
        )

    def test_the_same_with_mpirun(self, tmp_path):
        text = text_of(tmp_path, launch={"num_ranks": 2, "launcher": "mpirun"})

        assert "<BIN>/mpirun" in text
        assert "--tag-output -np 2 -H localhost:2 --bind-to none" in text

    @pytest.mark.parametrize("launcher", ["horovodrun", "mpirun"])
    def test_mpirun_listens_elsewhere_only_for_ranks_elsewhere(self, tmp_path, launcher):
        launch = {"launcher": launcher, "network_interface": "lo"}
        here = make_plan(request_for(tmp_path, launch={**launch, "num_ranks": 2}))
        there = make_plan(request_for(tmp_path, launch={**launch, "hosts": ["a:1", "b:1"]}))

        assert here.env.keys() >= {"LD_PRELOAD", "OMPI_MCA_oob_tcp_if_include"}
        assert not there.env.keys() & {"LD_PRELOAD", "OMPI_MCA_oob_tcp_if_include"}

    @pytest.mark.parametrize(
        ("library", "preloaded", "expected"),
        [
            ("/engine/l.so", None, "/engine/l.so"),
            ("/engine/l.so", "a.so b.so", "/engine/l.so:a.so b.so"),
            ("/my engine/l.so", "a.so", None),  # the loader would split it
            (None, "a.so", None),
        ],
    )
    def test_libraries_of_the_user_are_loaded_after_ours(self, monkeypatch, library, preloaded, expected):
        monkeypatch.setattr(environment, "loopback_library", lambda: library and Path(library))
        environ = {} if preloaded is None else {"LD_PRELOAD": preloaded}

        assert environment.on_loopback(environ).get("LD_PRELOAD") == expected

    def test_open_mpi_wants_an_ssh_though_it_calls_nobody(self, tmp_path, monkeypatch):
        monkeypatch.setattr(environment, "which", {"true": "/bin/true"}.get)

        plan = make_plan(request_for(tmp_path, launch={"num_ranks": 2}))

        assert plan.env["OMPI_MCA_plm_rsh_agent"] == "/bin/true"

    @pytest.mark.parametrize(("user_id", "is_told"), [(0, True), (1, False), (1000, False)])
    def test_mpirun_is_told_that_root_may(self, tmp_path, monkeypatch, user_id, is_told):
        monkeypatch.setattr(os, "geteuid", lambda: user_id)

        plan = make_plan(request_for(tmp_path, launch={"num_ranks": 2, "launcher": "mpirun"}))

        assert ("--allow-run-as-root" in plan.argv) == is_told

    def test_mpirun_starts_no_ranks_for_gloo(self, tmp_path):
        with pytest.raises(LaunchError, match="MPI controller only"):
            text_of(tmp_path, launch={"num_ranks": 2, "launcher": "mpirun", "controller": "gloo"})

    def test_other_hosts_are_reached_as_the_job_says(self, tmp_path):
        ssh = {"port": 2222, "identity_file": "/keys/id", "options": {"ProxyJump": "gate"}}
        request = request_for(tmp_path, launch={"hosts": ["a:4", "b:2"], "controller": "gloo", "ssh": ssh})

        plan = make_plan(request)

        assert "--gloo -np 6 -H a:4,b:2 --disable-cache --network-interfaces" in " ".join(plan.argv)
        assert plan.env["HOROVOD_SSH"] == f"ssh -F {request.log_dir}/ssh_config"
        config = plan.files[request.log_dir / "ssh_config"]
        assert "\nPort 2222\nIdentityFile /keys/id\nIdentitiesOnly yes\nProxyJump gate\nInclude" in config
        assert config.startswith("Host *\nBatchMode yes\nConnectTimeout 10\nServerAliveInterval 5\n")

    def test_options_of_ssh_may_be_written_as_yaml_reads_them(self, tmp_path):
        ssh = {"options": {"StrictHostKeyChecking": True, "ConnectionAttempts": 3}}
        request = request_for(tmp_path, launch={"hosts": ["a:1", "b:1"], "ssh": ssh})

        config = make_plan(request).files[request.log_dir / "ssh_config"]

        assert "StrictHostKeyChecking yes\nConnectionAttempts 3\n" in config

    def test_open_mpi_uses_the_same_ssh_and_our_daemon(self, tmp_path):
        request = request_for(tmp_path, launch={"hosts": ["a:1", "b:1"], "launcher": "mpirun"})

        plan = make_plan(request)

        assert plan.env["OMPI_MCA_plm_rsh_agent"] == f"ssh -F {request.log_dir}/ssh_config"
        assert plan.env["OMPI_MCA_orte_launch_agent"] == f"{request.stage}/daemon orted"

    def test_slurm_gets_a_batch_script(self, tmp_path):
        slurm = {"options": {"partition": "gpu", "comment": "two words"}, "setup": ["module load cuda"]}
        request = request_for(tmp_path, launch={"num_ranks": 8, "launcher": "slurm", "slurm": slurm})

        plan = make_plan(request)
        script = plan.files[request.log_dir / "batch.sh"]

        assert plan.argv == ("sbatch", "--parsable", f"{request.log_dir}/batch.sh")
        for line in (
            "--ntasks=8",
            "--partition=gpu",
            "--comment='two words'",
            "--signal=B:USR1@30",
            "--requeue",
        ):
            assert f"#SBATCH {line}\n" in script
        assert script.index("module load cuda") < script.index("exec ")

    def test_one_rank_is_the_worker_itself(self, tmp_path):
        request = request_for(tmp_path)

        assert make_plan(request).argv == (f"{request.stage}/rank",)

    def test_a_missing_horovodrun_says_how_to_get_it(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        monkeypatch.setenv("PATH", "/nowhere")

        with pytest.raises(LaunchError, match="engine build"):
            make_plan(request_for(tmp_path, launch={"num_ranks": 2}))

    def test_planning_has_no_effect(self, tmp_path):
        make_plan(request_for(tmp_path, launch={"num_ranks": 2}))

        assert list(tmp_path.iterdir()) == []


class TestEvents:
    @pytest.mark.parametrize("tag", ["", "[1,3]<stdout>:", "[3]<stdout>:", "[1,3]<stderr>:"])
    def test_are_found_behind_any_launchers_tag(self, tag):
        notice = Notice(text="hello")

        line = parse_line(tag + to_line(notice, 3))

        assert (line.rank, line.event, line.is_launchers) == (3, notice, False)

    def test_of_ranks_that_write_at_once_are_whole_wherever_mpirun_cuts(self):
        events = {rank: Notice(text=f"a  long line of {rank}") for rank in range(3)}
        choice = Random(7)
        for _ in range(200):
            lines = [to_line(told, rank) + "\n" for rank, told in events.items()]
            output = put_out_by_mpirun(lines, choice)

            found = [parse_line(line) for line in lines_of_ranks(io.StringIO(output))]

            assert {line.rank: line.event for line in found} == events
            assert len(found) == len(events)

    def test_what_is_said_by_others_in_between_is_theirs(self):
        output = (
            "[1,0]<stdout>:half a [1,1]<stdout>:more [1,0]<stderr>:warning\n"
            "mpirun: hm\n[1,0]<stdout>:line\n[1,1]<stdout>:\n[1,0]<stdout>:no end"
        )

        assert list(lines_of_ranks(io.StringIO(output))) == [
            "[1,0]<stderr>:warning",
            "mpirun: hm",
            "[1,0]<stdout>:half a line",
            "[1,1]<stdout>:more ",
            "[1,0]<stdout>:no end",
        ]

    def test_a_line_that_was_begun_and_not_ended_comes_last(self):
        output = "[1,1]<stdout>:killed in mid[1,0]<stdout>:well\nmpirun: aborted\n"

        assert list(lines_of_ranks(io.StringIO(output))) == [
            "[1,0]<stdout>:well",
            "mpirun: aborted",
            "[1,1]<stdout>:killed in mid",
        ]

    def test_what_a_task_prints_keeps_its_spaces(self):
        assert parse_line("[1,0]<stdout>:  indented").text == "  indented"

    @pytest.mark.parametrize(
        "text",
        [
            '{"kind"',
            "[]",
            "7",
            '{"kind": "progress", "rank": 0}',
            '{"kind": "progress", "rank": "0", "step": 1}',
            '{"kind": "notice", "rank": 0, "text": 7}',
            '{"kind": "notice", "rank": null, "text": "x"}',
            '{"kind": ["notice"], "rank": 0, "text": "x"}',
            '{"kind": "unheard of", "rank": 0}',
            '{"kind": "targets", "rank": 0, "targets": [1]}',
            '{"kind": "targets", "rank": 0, "targets": [{"address": "a"}]}',
            '{"kind": "evaluation", "rank": 0, "epoch": 1, "metrics": {"loss": "low"}}',
            '{"kind": "failure", "rank": 0, "message": "x"}',
            '{"kind": "pair_time", "rank": 0, "hosts": ["a"], "seconds": 1}',
            "[" * 5000,
        ],
    )
    def test_that_are_broken_or_only_look_like_one_are_text(self, text):
        line = parse_line(f"[1,0]<stdout>:@horovod-train {text}")

        assert (line.rank, line.text, line.event) == (0, f"@horovod-train {text}", None)

    def test_with_numbers_that_are_none_can_be_shown(self):
        numbers = dict.fromkeys(("loss", "lr", "samples_per_s", "eta_s"), float("inf"))
        line = to_line(Progress(step=1, num_steps=0, epoch=0, num_epochs=1, **numbers), 0)

        assert "ETA unknown" in parse_line(line).readable()

    def test_are_text_for_a_person(self):
        stream = io.StringIO()

        Reporter(0, as_json=False, stream=stream).report(Resumed(checkpoint="step-1", epoch=2, step=3))

        assert stream.getvalue() == "resumed from step-1: epoch 2.0, step 3\n"


def test_a_quiet_console_prints_nothing():
    output = io.StringIO()

    JobConsole(Console(file=output, quiet=True)).print("a line")

    assert output.getvalue() == ""


class TestConsole:
    PROGRESS: ClassVar = Progress(
        step=3, num_steps=12, epoch=0, num_epochs=2, loss=0.5, lr=0.1, samples_per_s=900.0, eta_s=65.0
    )

    def test_without_a_terminal_progress_is_a_line_now_and_then(self, monkeypatch):
        now_s = [100.0]
        monkeypatch.setattr("horovod_train.launch.console.monotonic", lambda: now_s[0])
        output = io.StringIO()
        console = JobConsole(Console(file=output, width=200))
        for later_s in (0.0, 1.0, 3.9, 0.1, 4.9, 0.2):
            now_s[0] += later_s
            console.show(self.PROGRESS, 0)
        console.close()

        assert output.getvalue().count("step 3/12") == 3  # at 0, 5 and 10.1 s

    def test_the_bar_is_gone_before_the_summary_is_shown(self):
        output = io.StringIO()
        console = JobConsole(Console(file=output, width=120, force_terminal=True))
        console.show(self.PROGRESS, 0)
        assert console._progress is not None

        console.show(parse_line(event("summary")).event, 0)

        assert console._progress is None
        assert output.getvalue().splitlines()[-1].strip() == "checkpoint      none"

    def test_what_is_longer_than_the_terminal_is_one_line(self):
        output = io.StringIO()
        JobConsole(Console(file=output, width=20)).print("a long line, to be found with grep")

        assert output.getvalue() == "a long line, to be found with grep\n"

    def test_on_a_terminal_it_is_a_bar_that_goes_away(self):
        output = io.StringIO()
        console = JobConsole(Console(file=output, width=120, force_terminal=True))
        console.show(self.PROGRESS, 0)
        console.print("above [it]")
        console.show(self.PROGRESS.model_copy(update={"step": 6}), 0)
        console.close()
        console.close()

        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue())
        assert "epoch 1/2" in text
        assert re.search(r"step 6/12  50 %  loss 0\.5000  lr 0\.1  900 samples/s  ETA 1:05", text)
        assert "above [it]" in text

    def test_with_events_each_line_is_followed_by_its_event(self):
        output = io.StringIO()
        console = JobConsole(Console(file=output, width=80), has_events=True)
        console.show(Targets(targets=()), 0)
        console.show(Notice(text="a notice"), 3)
        console.show(parse_line(event("summary")).event, 0)
        console.record(Notice(text="shown elsewhere"), 1)

        lines = [parse_line(line) for line in output.getvalue().splitlines()]
        events = [(each.rank, each.event.kind) for each in lines if each.event is not None]
        assert events == [(0, "targets"), (3, "notice"), (0, "summary"), (1, "notice")]
        texts = [each.readable() for each in lines]
        assert texts[:2] == [None, "rank 3: a notice"]
        assert [text for text in texts if text and text.startswith("trained")] == texts[2:3]
        assert texts.count("  checkpoint      none") == 1

    def test_events_of_a_long_run_are_written_ever_less_often(self, monkeypatch):
        now_s = [0.0]
        monkeypatch.setattr("horovod_train.launch.console.monotonic", lambda: now_s[0])
        output = io.StringIO()
        console = JobConsole(Console(file=output, width=200), has_events=True)
        for second in range(0, 100_000, 5):
            now_s[0] = second
            console.show(self.PROGRESS, 0)
        console.show(self.PROGRESS.model_copy(update={"step": 12}), 0)

        found = [parse_line(line).event for line in output.getvalue().splitlines()]
        assert len(found) == 20_001
        assert 3_000 < sum(each is not None for each in found) < 5_000
        assert found[-1].step == 12

    def test_what_a_person_need_not_see_is_not_shown(self):
        output = io.StringIO()
        console = JobConsole(Console(file=output))

        console.show(Targets(targets=()), 0)

        assert output.getvalue() == ""


class TestFollowing:
    """A job that somebody else carries out."""

    class Launcher(PolledLauncher):
        def __init__(self, lines, status):
            self.lines, self.status, self.cancelled = lines, status, []

        def submit(self, request, plan):
            return "4711"

        def logs(self, job, *, follow):
            assert follow
            for line in self.lines:
                if callable(line):
                    line()
                else:
                    yield line

        def wait(self, job):
            return self.status

        def cancel(self, job, how):
            self.cancelled.append(how)

    def follow(self, tmp_path, monkeypatch, lines, status):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        launcher = self.Launcher(lines, status)
        monkeypatch.setattr("horovod_train.launch.submit.launcher_named", lambda _: launcher)
        output = io.StringIO()
        request = request_for(tmp_path, launch={"num_ranks": 2})
        code = run_job(request, None, JobConsole(Console(file=output, width=200)), is_new=True)
        return code, output.getvalue(), launcher.cancelled

    def test_shows_what_its_ranks_say_and_returns_its_code(self, tmp_path, monkeypatch):
        notice = to_line(Notice(text="a notice"), 0)
        lines = ["plain", "[1,1]<stdout>:of a rank", f"[1,0]<stdout>:{notice}"]

        found = self.follow(tmp_path, monkeypatch, lines, JobStatus("succeeded", 0))

        code, text, cancelled = found
        assert (code, cancelled) == (0, [])
        assert text.splitlines() == [
            "j-run-1: submitted to horovodrun with ID 4711",
            *("plain", "[rank 1] of a rank", "rank 0: a notice"),
            "j-run-1: succeeded",
        ]
        assert find_job("j-run-1").native_id == "4711"

    def test_shows_the_text_of_a_line_that_also_has_an_event(self, tmp_path, monkeypatch):
        summary = parse_line(event("summary")).event
        pod = io.StringIO()
        shown = JobConsole(Console(file=pod, width=200), has_events=True)
        shown.show(TestConsole.PROGRESS, 0)
        shown.show(Notice(text="a notice"), 0)
        shown.show(summary, 0)

        _, text, _ = self.follow(
            tmp_path, monkeypatch, pod.getvalue().splitlines(), JobStatus("succeeded", 0)
        )

        assert text.splitlines()[1:-1] == [
            progress_text(TestConsole.PROGRESS),
            "rank 0: a notice",
            *summary_lines(summary),
        ]

    @pytest.mark.parametrize(
        ("number", "how"),
        [
            (signal.SIGTERM, "stop"),
            (signal.SIGINT, "stop"),
            (signal.SIGUSR1, "drain"),
            (signal.SIGUSR2, "drain"),
        ],
    )
    def test_hands_a_signal_on(self, tmp_path, monkeypatch, number, how):
        status = JobStatus("preempted", 75, "saved")
        lines = ["first", lambda: os.kill(os.getpid(), number), "never shown"]

        code, text, cancelled = self.follow(tmp_path, monkeypatch, lines, status)

        assert (code, cancelled) == (75, [how])
        assert f"j-run-1: {'drain' if how == 'drain' else 'cancel'} requested" in text
        assert "never shown" not in text

    def test_of_a_job_without_a_code_is_a_failure(self, tmp_path, monkeypatch):
        assert self.follow(tmp_path, monkeypatch, [], JobStatus("unknown"))[0] == 1

    def test_can_be_left_to_others(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        launcher = self.Launcher([], JobStatus("succeeded", 0))
        monkeypatch.setattr("horovod_train.launch.submit.launcher_named", lambda _: launcher)

        assert submit_job(request_for(tmp_path), None, print).job_id == "j-run-1"
        assert submitted("j-run-1") == (launcher, find_job("j-run-1"))


class KilledError(BaseException):
    """The process ends here, in the middle of a submission."""


class TestSubmittingOnce:
    class Launcher(PolledLauncher):
        """Starts each run once, as launchers must; may be killed before or after that."""

        def __init__(self):
            self.started, self.killed, self.rejected = [], "", False

        def early_id(self, request):
            return "early/"

        def plan(self, request):
            return LaunchPlan(("true",))

        def submit(self, request, plan):
            if self.rejected:
                raise LaunchError("no such partition")
            if self.killed == "before":
                raise KilledError
            time.sleep(0.05)
            if request.run_id not in self.started:
                self.started.append(request.run_id)
            if self.killed == "after":
                raise KilledError
            return "4711"

        has_local_files = False

    @pytest.fixture
    def launcher(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        made = self.Launcher()
        monkeypatch.setattr("horovod_train.launch.submit.launcher_named", lambda _: made)
        return made

    @pytest.fixture
    def job(self, tmp_path):
        return Job(name="j", task="digits", run_dir=str(tmp_path))

    def test_starts_one_job_for_a_key_and_another_for_another(self, launcher, job):
        first, again, other = (submit_once(job, key, print)[0] for key in ("a", "a", "b"))

        assert first == again != other
        assert len(launcher.started) == 2
        assert [each.native_id for each in known_jobs()] == ["4711"] * 2

    def test_at_the_same_time_starts_one(self, launcher, job):
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: submit_once(job, "a", print)[0].job_id, range(8)))

        assert len(set(found)) == len(launcher.started) == 1

    @pytest.mark.parametrize("moment", ["before", "after"])
    def test_is_completed_after_a_kill_and_the_job_is_known_in_between(self, launcher, job, moment):
        launcher.killed = moment
        with pytest.raises(KilledError):
            submit_once(job, "a", print)
        (known,) = known_jobs()
        launcher.killed = ""

        assert submit_once(job, "a", print)[0].job_id == known.job_id
        assert known.native_id == "early/"
        assert [known.log_dir.name] == launcher.started

    def test_refuses_a_key_that_another_job_has(self, launcher, job):
        first, _ = submit_once(job, "a", print)

        with pytest.raises(KeyUsedError, match=rf"the key 'a' was used for {first.job_id}"):
            submit_once(job.model_copy(update={"name": "k"}), "a", print)

    def test_of_a_job_that_was_rejected_may_be_tried_again(self, launcher, job):
        launcher.rejected = True
        with pytest.raises(LaunchError, match="no such partition"):
            submit_once(job, "a", print)
        assert not list(known_jobs())
        launcher.rejected = False

        changed, is_new = submit_once(job.model_copy(update={"name": "k"}), "a", print)

        assert is_new
        assert [each.job_id for each in known_jobs()] == [changed.job_id]

    def test_does_not_look_into_the_folder_of_a_job_that_was_started(self, launcher, job):
        first, _ = submit_once(job, "a", print)
        launcher.killed = "before"

        assert submit_once(job, "a", print) == (first, False)

    def test_ignores_a_key_file_whose_write_was_interrupted(self, launcher, job):
        submit_once(job, "a", print)
        (file,) = (jobs_dir() / "keys").iterdir()
        for content in ("", "{", "[]", '{"other": 1}'):
            file.write_text(content)
            submit_once(job, "a", print)

        assert len(launcher.started) == 5

    def test_says_that_a_key_cannot_be_stored(self, launcher, job, tmp_path, monkeypatch):
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))

        with pytest.raises(LaunchError, match="the key cannot be stored: .*Not a directory"):
            submit_once(job, "a", print)


def test_of_several_launchers_of_one_run_one_trains(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda _: StateFile(tmp_path).claim(), range(64)))

    assert sum(won) == 1
    assert StateFile(tmp_path).read().state == "starting"
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


class TestStayingWithAJob:
    class Launcher(PolledLauncher):
        starts_ranks = True

        def run(self, request, plan, console):
            return 7

    @pytest.mark.parametrize("is_new", [True, False])
    def test_remembers_it_unless_it_was_submitted(self, tmp_path, monkeypatch, is_new):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        monkeypatch.setattr("horovod_train.launch.submit.launcher_named", lambda _: self.Launcher())
        console = JobConsole(Console(file=io.StringIO()))

        assert run_job(request_for(tmp_path), None, console, is_new=is_new) == 7

        assert [job.native_id for job in known_jobs()] == [str(os.getpid())] * is_new


def test_the_plan_of_an_elastic_job_says_that_hosts_are_found_later(tmp_path):
    launch = {"elastic": {"min_ranks": 1, "max_ranks": 2, "discover": "cat hosts"}}

    plan = make_plan(request_for(tmp_path, launch=launch))

    assert plan.note == "hosts: the output of `cat hosts`, which is called repeatedly during the run"
    assert make_plan(request_for(tmp_path)).note == ""


class TestHostsBeforeALaunch:
    """What the hosts say is given; what follows from it is not."""

    class HostConnection:
        def __init__(self, name, says):
            self.host, self.says, self.asked = Host(name, 1), says, []

        def call(self, do, /, **args):
            self.asked.append((do.__name__, args))
            return self.says.get(do.__name__)

    def hosts(self, **says):
        return HostGroup([self.HostConnection(name, each) for name, each in says.items()])

    CHOSEN: ClassVar = {name: Chosen("eth0", f"10.0.0.{n}", "asked for") for n, name in enumerate("abc")}

    def test_each_reaches_the_next_and_the_first(self):
        hosts = self.hosts(**{name: {"listen": 7000 + n, "reach": {}} for n, name in enumerate("abc")})

        check_reach(hosts, self.CHOSEN)

        asked = {connection.host.name: dict(connection.asked)["reach"] for connection in hosts.connections}
        assert asked["a"] == {"source": "10.0.0.0", "targets": [("b", "10.0.0.1", 7001)]}
        assert asked["b"]["targets"] == [("c", "10.0.0.2", 7002), ("a", "10.0.0.0", 7000)]
        assert asked["c"]["targets"] == [("a", "10.0.0.0", 7000)]
        assert dict(hosts.connections[0].asked)["listen"] == {"address": "10.0.0.0", "name": "a"}

    def test_one_that_is_not_reached_is_named_with_both_ends(self):
        hosts = self.hosts(
            a={"listen": 1, "reach": {"b": "No route to host"}},
            b={"listen": 1, "reach": {}},
            c={"listen": 1, "reach": {"b": "Connection refused"}},
        )

        with pytest.raises(LostError) as caught:
            check_reach(hosts, self.CHOSEN)

        assert "a (eth0, 10.0.0.0) does not reach b (eth0, 10.0.0.1): No route to host" in str(caught.value)
        assert "c (eth0, 10.0.0.2) does not reach b" in str(caught.value)
        assert caught.value.hosts == ("b",)

    @pytest.mark.parametrize(("times_s", "is_fine"), [((100, 100, 109.9), True), ((100, 100, 110.1), False)])
    def test_clocks_may_be_as_far_apart_as_the_job_says_and_a_little(self, times_s, is_fine):
        descriptions = {name: described(time_s=time_s) for name, time_s in zip("abc", times_s, strict=True)}

        with (
            nullcontext()
            if is_fine
            else pytest.raises(LostError, match=r"clock of c is 10\.1 s ahead of that of")
        ):
            check_clocks(descriptions, 5)

    def test_interfaces_are_chosen_by_what_hosts_say(self):
        descriptions = {"a": described(ssh_address="10.0.0.1"), "b": described(ssh_address="127.0.0.1")}

        chosen = choose_interfaces(self.hosts(a={}, b={}), Job(name="j", task="digits"), descriptions)

        assert {name: found.name for name, found in chosen.items()} == {"a": "eth0", "b": "lo"}


class TestOutcome:
    @pytest.fixture
    def run(self, tmp_path):
        run = Followed(request_for(tmp_path, launch={"num_ranks": 2}))
        yield run
        run.close()

    def failure(self, rank, message, *, is_cause=True, exit_code=1, traceback="", cause=""):
        fields = {"message": message, "traceback": traceback, "is_cause": is_cause, "exit_code": exit_code}
        return event("failure", rank, host="h", cause=cause, **fields)

    def test_the_cause_wins_over_its_consequences(self, run):
        run.handle(self.failure(0, "another rank left", is_cause=False))
        run.handle(self.failure(1, "NaN", exit_code=3))

        with pytest.raises(LaunchError) as caught:
            run.end(1)

        assert str(caught.value) == "rank 1 on h: NaN"
        assert caught.value.exit_code == 3

    def test_the_same_cause_on_many_ranks_is_told_once(self, run):
        for rank in (0, 1, 2, 5):
            run.handle(self.failure(rank, "bad", traceback="Traceback"))

        with pytest.raises(LaunchError) as caught:
            run.end(1)

        assert str(caught.value) == "ranks 0-2, 5 on h: bad\nTraceback"

    @pytest.mark.parametrize(("number", "code"), [(10, 1), (15, 143)])
    def test_a_drain_that_could_not_save_has_failed(self, run, number, code):
        run.handle(event("started"))
        run.handle(self.failure(0, "the disk is full", cause="checkpoint"))

        with pytest.raises(LaunchError, match="not saved: rank 0 on h: the disk is full") as caught:
            run.end(1, stopped_by=number)
        assert (caught.value.exit_code, caught.value.cause) == (code, "checkpoint")

    def test_ranks_that_stayed_away_are_named_when_a_drain_ends(self, run):
        run.handle(event("started"))
        run.say(0, "Missing ranks:", "1: [allreduce.x]")

        with pytest.raises(LaunchError, match="before the ranks had saved: rank 1 did not join") as caught:
            run.end(1, stopped_by=10)
        assert (list(caught.value.lost_ranks), caught.value.exit_code) == ([1], 1)

    def test_a_killed_rank_is_known_by_its_number(self, run):
        run.handle("mpirun noticed that process rank 1 with PID 7 on node n4 exited on signal 9 (Killed).")
        run.handle(self.failure(0, "a collective failed because another rank exited", is_cause=False))

        with pytest.raises(LaunchError, match="rank 1 on n4 was killed") as caught:
            run.end(137)
        assert list(caught.value.lost_ranks) == [1]

    def test_a_rank_that_the_launcher_names_is_not_mistaken_for_one_with_its_pid_elsewhere(self, run):
        run.handle("mpirun noticed that process rank 1 with PID 7 on node n4 exited on signal 9 (Killed).")

        with pytest.raises(LaunchError, match="rank 1 on n4 was killed"):
            run.end(137, ranks={7: 3})

    @pytest.mark.parametrize(("status", "signal"), [(9, 9), (139, 11)])
    def test_a_process_that_the_launcher_names_is_known_by_its_rank(self, run, status, signal):
        run.handle(event("started"))
        run.handle("=   PID 7 RUNNING AT n4")
        run.handle(f"=   EXIT CODE: {status}")

        with pytest.raises(LaunchError, match=f"rank 3 on n4 was killed by signal {signal}") as caught:
            run.end(255, ranks={7: 3})
        assert list(caught.value.lost_ranks) == [3]

    def test_an_exit_code_is_not_taken_for_a_signal(self, run):
        run.handle(event("started"))
        for pid, code in ((6, 1), (7, 9)):
            run.handle(f"=   PID {pid} RUNNING AT n4")
            run.handle(f"=   EXIT CODE: {code}")

        with pytest.raises(LaunchError, match="^rank 3 on n4 was killed by signal 9"):
            run.end(9, ranks={6: 2, 7: 3})

    def test_before_mpi_is_initialized_a_process_that_mpich_names_may_be_another_one(self, run):
        run.handle("=   PID 7 RUNNING AT n4")
        run.handle("=   EXIT CODE: 9")

        with pytest.raises(LaunchError, match=r"^a rank on n4 was killed \(mpirun names rank 3") as caught:
            run.end(9, ranks={7: 3})
        assert list(caught.value.lost_ranks) == []

    @pytest.mark.parametrize(("ranks", "named"), [([0, 1], "rank 1"), ([0, 1, 2], "a rank")])
    def test_a_rank_to_which_another_has_lost_the_connection_is_named(self, run, ranks, named):
        run.say(0, "[n1:0] *** An error occurred in Socket closed", "[n1:0] *** on a NULL communicator")
        run.handle('prterun has exited due to process rank 0 with PID 3 on node n1 calling "abort".')

        with pytest.raises(LaunchError, match=f"^rank 0 lost the connection to {named}, which") as caught:
            run.end(14, ranks={10 + rank: rank for rank in ranks})
        assert list(caught.value.lost_ranks) == ([1] if named == "rank 1" else [])

    def test_an_error_of_mpi_is_shown_in_its_words(self, run):
        run.say(1, "Fatal error in data.csv", "Fatal error in internal_Test: Other MPI error, error stack:")

        with pytest.raises(LaunchError, match="MPI has ended rank 1(.|\n)*Other MPI error") as caught:
            run.end(143)
        assert "data.csv" not in caught.value.message

    def test_a_silent_end_shows_the_launchers_last_words(self, run):
        run.handle("mpirun: something unheard of")

        with pytest.raises(LaunchError, match="no rank said why(.|\n)*something unheard of") as caught:
            run.end(7)
        assert "no rank had begun to train" in caught.value.hint
        assert "memory" not in caught.value.hint

    def test_an_end_without_a_summary_is_no_success(self, run):
        with pytest.raises(LaunchError):
            run.end(0)

    def test_a_summary_is_a_success(self, run):
        run.handle(event("summary"))

        run.end(0)

    def test_ranks_that_have_saved_and_left_are_preempted_whatever_the_launcher_says(self, run):
        run.handle(event("preempted", 1, step=7, epoch=0.5))

        with pytest.raises(PreemptedError, match="saved at step 7") as caught:
            run.end(1, stopped_by=15)

        assert caught.value.exit_code == 75

    def test_a_stop_before_the_ranks_had_begun_says_so(self, run):
        with pytest.raises(LaunchError, match="before the ranks had begun to train") as caught:
            run.end(137, stopped_by=2)

        assert caught.value.exit_code == 130

    def test_a_stop_before_the_ranks_had_saved_says_so(self, run):
        run.handle(event("started"))
        with pytest.raises(LaunchError, match="before the ranks had saved") as caught:
            run.end(137, stopped_by=15)

        assert caught.value.exit_code == 143

    def test_what_kept_ranks_from_saving_is_told(self, run):
        run.handle(event("started"))
        run.handle(self.failure(1, "ranks differ after step 6"))

        with pytest.raises(
            LaunchError, match="signal 15, and not saved: rank 1 on h: ranks differ"
        ) as caught:
            run.end(1, stopped_by=15)

        assert caught.value.exit_code == 143

    def test_frozen_ranks_are_the_cause_of_what_others_noticed(self, run):
        run.handle(self.failure(0, "another rank left", is_cause=False))
        frozen = [Frozen(1, "node7", 4711, 12.3, "stopped")]

        with pytest.raises(LostError, match=r"rank 1 on node7 \(process 4711, stopped\)") as caught:
            run.end(137, frozen=frozen)

        assert caught.value.hosts == ("node7",)
        assert "`kill -CONT 4711` on node7" in caught.value.hint

    def test_a_lost_host_is_the_cause_of_what_ranks_noticed(self, run):
        run.handle(self.failure(0, "another rank left", is_cause=False))

        with pytest.raises(LaunchError, match=r"node7 does not answer any more \(silent for 20 s\)"):
            run.end(1, lost=("node7", "silent for 20 s"))

    def test_secrets_are_not_shown_and_not_logged(self, tmp_path):
        run = Followed(request_for(tmp_path), ["hunter2hunter2"])

        run.handle("[1,1]<stdout>:the token is hunter2hunter2")
        for line in lines_of_ranks(
            ["[1,1]<stdout>:and torn hunter2[1,0]<stdout>:x\n", "[1,1]<stdout>:hunter2\n"]
        ):
            run.handle(line)
        run.close()

        assert run.shown == "[rank 1] the token is ***\n[rank 0] x\n[rank 1] and torn ***\n"
        assert "hunter2" not in run.log.read_text()

    @pytest.mark.parametrize(
        "line",
        [
            "first-half",
            "second-half",
            "first-half and second-half",
            "'first-half\\nsecond-half'",
            json.dumps({"key": "first-half\nsecond-half"}),
            json.dumps({"quoted": 'with "quotes" in it'}),
            repr({"quoted": "with 'quotes' in it"}),
        ],
    )
    def test_a_secret_of_several_lines_is_hidden_in_each(self, line):
        secrets = ["first-half\nsecond-half", 'with "quotes" in it', "with 'quotes' in it"]

        hidden = Mask(secrets).hide(line)

        assert "***" in hidden
        assert not any(word in hidden for word in ("first", "second", "quotes"))

    def test_nothing_else_is_hidden(self):
        mask = Mask(["one\ntwo-lines", 'with "quotes"', "short", "longer than short"])

        assert mask.hide("one, two-lines, short") == "one, ***, short"
        assert mask.hide(json.dumps({"a": 'with "quotes"'})) == '{"a": "***"}'
        assert mask.hide(repr("with \"quotes\" and 'more'")) == "'*** and \\'more\\''"
        assert mask.hide('longer than short, with "quotes') == '***, with "quotes'

    def test_secrets_that_are_too_short_to_be_hidden_are_named(self):
        secrets = {"A": "long enough", "B": "short", "C": "a\nb\nlong enough", "D": "a\nb\nc\nd", "E": ""}

        assert too_short_to_hide(secrets) == ["B", "D"]

    def test_an_end_with_code_0_before_training_was_done_is_explained(self, run):
        with pytest.raises(LaunchError, match=r"exit code 0 before training was done(.|\n)*os\._exit"):
            run.end(0)

    def test_a_log_that_cannot_be_written_is_told(self, run):
        (run.request.log_dir / "rank-1.log").mkdir()

        run.handle("[1,1]<stdout>:loading data")

        assert run.state.remarks == ["rank-1.log is incomplete: Is a directory"]

    def test_targets_are_written_where_prometheus_may_read_them(self, tmp_path):
        shared = tmp_path / "shared"
        request = request_for(tmp_path, metrics={"targets_dir": str(shared)})
        run = Followed(request)

        run.handle(event("targets", targets=[{"address": "127.0.0.1:9400", "labels": {"rank": "0"}}]))

        assert json.loads((shared / "j.json").read_text())[0]["targets"] == ["127.0.0.1:9400"]
        assert (shared / "j.json").stat().st_mode & 0o777 == 0o644
        run.close()
        assert json.loads((shared / "j.json").read_text()) == []

    def test_targets_of_another_run_stay_unless_their_place_is_taken(self, tmp_path):
        shared = tmp_path / "shared"
        request = request_for(tmp_path, metrics={"targets_dir": str(shared)})
        shared.mkdir()
        others = [
            {"targets": [f"127.0.0.1:940{number}"], "labels": {"rank": "0", "run": "another"}}
            for number in (0, 1)
        ]
        (shared / "j.json").write_text(json.dumps(others))
        run = Followed(request)

        ours = {"address": "127.0.0.1:9400", "labels": {"rank": "0", "run": request.run_id}}
        run.handle(event("targets", targets=[ours]))

        found = json.loads((shared / "j.json").read_text())
        assert [(each["targets"], each["labels"]["run"]) for each in found] == [
            (["127.0.0.1:9401"], "another"), (["127.0.0.1:9400"], request.run_id),
        ]  # fmt: skip
        run.close()
        assert json.loads((shared / "j.json").read_text()) == others[1:]

    def test_each_rank_has_a_log_of_its_own(self, run):
        for rank in (0, 1):
            run.handle(f"[1,{rank}]<stdout>:I am {rank}")
        run.close()

        assert (run.request.log_dir / "rank-1.log").read_text() == "I am 1\n"

    def test_targets_become_a_file_for_prometheus(self, run, tmp_path):
        targets = [{"address": f"127.0.0.1:940{rank}", "labels": {"rank": str(rank)}} for rank in range(2)]
        run.handle(event("targets", targets=targets))

        found = json.loads((tmp_path / "j" / "prometheus-targets.json").read_text())

        assert found == [{"targets": [each["address"]], "labels": each["labels"]} for each in targets]
        run.close()
        assert json.loads((tmp_path / "j" / "prometheus-targets.json").read_text()) == []

    def test_what_ranks_print_is_shown_with_their_number(self, run):
        run.handle("[1,1]<stdout>:loading data")

        assert run.shown == "[rank 1] loading data\n"


def test_the_command_is_installed():
    assert (Path(sysconfig.get_path("scripts")) / "horovod-train").exists()
