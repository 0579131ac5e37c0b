"""Processes of a run: what agents answer, what is adopted, how a command's end is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from horovod_train import __version__
from horovod_train.errors import LaunchError
from horovod_train.launch.base import LaunchPlan
from horovod_train.launch.hosts.agent import GREETING, RUN_VARIABLE, HostActions, answer
from horovod_train.launch.supervise.signals import (
    TerminationRequested,
    _is_alive,
    adopting_orphans,
    execute,
    guarded,
    kill_descendants,
)


class TestAnAgent:
    """A real one, spoken to through pipes."""

    @pytest.fixture
    def agent(self, tmp_path):
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "horovod_train.launch.hosts.agent", str(tmp_path / "stage"), "20"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout.readline().decode() == f"{GREETING} {__version__}\n"
        yield process
        process.stdin.close()
        process.stdout.close()
        process.wait(20)

    def say(self, agent, *pieces):
        for piece in pieces:
            agent.stdin.write(piece)
            agent.stdin.flush()

    def request(self, number, do="ping", **args):
        return json.dumps({"id": number, "do": do, "args": args}).encode() + b"\n"

    def test_understands_what_comes_in_pieces_and_several_at_once(self, agent):
        first, second, third = (self.request(number) for number in (1, 2, 3))

        self.say(agent, first[:5])
        self.say(agent, first[5:] + second + third[:-1])
        self.say(agent, b"\n")

        answers = [json.loads(agent.stdout.readline()) for _ in range(3)]
        assert answers == [{"id": number, "result": True} for number in (1, 2, 3)]

    def test_answers_with_what_is_long(self, agent):
        text = "x" * 3_000_000
        self.say(agent, self.request(1, "put", files={"file": text}))

        assert json.loads(agent.stdout.readline()) == {"id": 1, "result": None}

    def test_clears_up_when_its_launcher_is_gone(self, agent, tmp_path):
        self.say(agent, self.request(1, "put", files={"rank": "#!/bin/sh"}))
        agent.stdout.readline()
        rank = subprocess.Popen(["sleep", "60"], env={RUN_VARIABLE: str(tmp_path / "stage")})
        assert (tmp_path / "stage" / "rank").exists()

        agent.stdin.close()

        assert rank.wait(20) == -signal.SIGKILL
        assert agent.wait(20) == 0
        assert not (tmp_path / "stage").exists()

    def test_an_error_is_an_answer(self, tmp_path):
        (tmp_path / "stage").mkdir()
        host = HostActions(str(tmp_path / "stage"))

        found = answer(host, {"id": 7, "do": "put", "args": {"files": {}}})

        assert found["id"] == 7
        assert found["error"].startswith("FileExistsError: ")


class TestACommand:
    def run(self, script, **plan):
        lines = []
        plan = LaunchPlan(("/bin/sh", "-c", script), **plan)
        code = execute(plan, dict(os.environ), lines.append, set())
        return code, lines

    @pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)])
    def test_ends_with_its_code_or_that_of_its_signal(self, script, code):
        assert self.run(script) == (code, [])

    def test_is_heard_on_both_its_streams(self):
        assert self.run("echo one; echo two >&2; printf three") == (0, ["one", "two", "three"])

    def test_gets_what_the_plan_adds_and_no_input(self):
        script = 'echo $OF_THE_PLAN; cat; ps -o sid= -p $$ | grep -qx " *$$" && echo alone'
        assert self.run(script, env={"OF_THE_PLAN": "yes"}) == (0, ["yes", "alone"])

    def test_that_is_not_there_is_told(self):
        with pytest.raises(LaunchError, match="cannot start /no/such/program: No such file"):
            execute(LaunchPlan(("/no/such/program", "argument")), {}, print, set())

    def test_leaves_nobody_behind_that_holds_its_output(self):
        with adopting_orphans():
            code, lines = self.run("sleep 600 & echo $!")

        assert code == 0
        assert not psutil.pid_exists(int(lines[0]))


class TestOrphans:
    def orphan(self):
        """Return a process whose parent has ended."""
        script = "sleep 60 > /dev/null 2>&1 & echo $!"
        found = subprocess.run(["/bin/sh", "-c", script], stdout=subprocess.PIPE, check=True, text=True)
        return psutil.Process(int(found.stdout))

    def test_are_adopted_while_a_run_goes_on(self):
        with adopting_orphans():
            orphan = self.orphan()

            assert orphan.ppid() == os.getpid()
            kill_descendants()
            assert orphan.status() == psutil.STATUS_ZOMBIE
        assert not psutil.pid_exists(orphan.pid), "it is gathered"

    def test_are_somebody_elses_afterwards(self):
        with adopting_orphans():
            pass
        orphan = self.orphan()

        assert orphan.ppid() != os.getpid()
        orphan.kill()

    def test_that_are_gone_are_not_waited_for(self):
        process = subprocess.Popen(["true"])
        gone = psutil.Process(process.pid)
        process.wait()

        assert not _is_alive(gone)

    def test_that_are_to_be_kept_are_kept_with_their_children(self):
        kept = subprocess.Popen(["/bin/sh", "-c", "sleep 60 & wait; sleep 60"])
        other = subprocess.Popen(["sleep", "60"])
        while not psutil.Process(kept.pid).children():
            pass

        kill_descendants({kept.pid})

        assert other.wait(5) == -signal.SIGKILL
        assert kept.poll() is None
        assert psutil.Process(kept.pid).children()
        kill_descendants()
        assert kept.wait(5) == -signal.SIGKILL

    def test_that_are_started_while_others_are_killed_are_killed_too(self, monkeypatch):
        first = subprocess.Popen(["sleep", "60"])
        started, kill = [], psutil.Process.kill

        def kill_too_late(process):
            if not started:
                started.append(subprocess.Popen(["sleep", "60"]))
            kill(process)

        monkeypatch.setattr(psutil.Process, "kill", kill_too_late)

        kill_descendants()

        assert [process.wait(5) for process in (first, *started)] == [-signal.SIGKILL] * 2


class TestTheGuard:
    def test_has_a_session_of_its_own_and_ends_with_the_block(self, tmp_path):
        with guarded(str(tmp_path / "stage")) as pid:
            assert os.getsid(pid) == pid
        assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("number", "is_drain"),
    [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGUSR1, True), (signal.SIGUSR2, True)],
)
def test_a_signal_that_is_caught_says_which(number, is_drain):
    asked = TerminationRequested(number)

    assert str(asked) == f"signal {int(number)}"
    assert asked.is_drain == is_drain
