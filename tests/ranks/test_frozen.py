"""A rank that is frozen is named, and the job does not wait for it for ever."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest
from support.launching import BIN, PROGRAMS, TIMEOUT_S, environment, mostly, write_job
from support.running import Running, is_alive, is_rank, launched

pytestmark = pytest.mark.ranks
WARNING_S, SHUTDOWN_S = 2.0, 6.0
LATE_S = 5.0


def job(folder, framework, launch, **sections):
    """A job that never ends by itself."""
    tasks = "quick_tasks.py" if framework == "numpy" else "tasks.py"
    return write_job(
        folder / "job.yaml",
        framework=framework,
        task=f"{PROGRAMS / tasks}:Noted",
        task_args={"notes": str(folder), "pause_s": 0.05},
        run_dir=str(folder / "runs"),
        train={"epochs": 5000, "batch_size_per_rank": 4},
        checkpoint={"every": "5 steps"},
        health={"stall_warning_s": WARNING_S, "stall_shutdown_s": SHUTDOWN_S},
        launch=launch,
        **sections,
    )


def message_of(folder):
    (file,) = folder.glob("runs/test/*/state.json")
    return json.loads(file.read_text())["message"]


def wait_for(what, within_s):
    """Return what is waited for, and how long it took."""
    started = time.monotonic()
    while not (found := what()):
        assert time.monotonic() - started < within_s
        time.sleep(0.05)
    return found, time.monotonic() - started


def check_named_then_ended(folder, running, rank):
    """From the moment in which a rank was stopped."""
    says = f"rank {rank} on"
    named, _ = wait_for(lambda: says in (text := message_of(folder)) and text, WARNING_S + LATE_S)
    wait_for(lambda: running.process.poll() is not None, SHUTDOWN_S + LATE_S)
    _, output = running.end(within_s=5)
    assert "shows no sign of life" in named
    assert running.process.returncode == 1, output
    error = output[output.rindex("error: ") :]
    assert says in error
    assert "stopped) shows no sign of life; the job was ended after health.stall_shutdown_s" in error
    assert "kill -CONT" in error


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.campaign)])
def test_a_stopped_rank_is_named_and_ends_the_job(tmp_path, rank):
    running = Running(tmp_path, job(tmp_path, "numpy", {"num_ranks": 2}), 2)
    (stopped,) = [each for each in running.ranks if each.environ()["OMPI_COMM_WORLD_RANK"] == str(rank)]

    stopped.suspend()

    check_named_then_ended(tmp_path, running, rank)


def test_so_is_the_only_rank(tmp_path):
    running = Running(tmp_path, job(tmp_path, "numpy", {"num_ranks": 1}), 1)

    running.ranks[0].suspend()

    check_named_then_ended(tmp_path, running, 0)


def test_so_is_a_rank_whose_python_has_only_begun(tmp_path):
    """It has not come to give a sign of life, and its peers wait for it."""
    running = launched(tmp_path, job(tmp_path, "numpy", {"num_ranks": 2}))
    launcher = psutil.Process(running.pid)
    ranks, _ = wait_for(lambda: [each for each in launcher.children(recursive=True) if is_rank(each)], 30)

    ranks[0].suspend()

    wait_for(lambda: running.poll() is not None, 30)
    output, _ = running.communicate()
    assert running.returncode == 1, output
    assert "stopped) shows no sign of life; the job was ended after health.stall_shutdown_s" in output


def test_a_rank_that_goes_on_in_time_is_no_longer_named(tmp_path):
    running = Running(tmp_path, job(tmp_path, "numpy", {"num_ranks": 2}), 2)

    running.ranks[0].suspend()
    wait_for(lambda: "no sign of life" in message_of(tmp_path), WARNING_S + LATE_S)
    running.ranks[0].resume()
    wait_for(lambda: "no sign of life" not in message_of(tmp_path), LATE_S)
    running.process.send_signal(signal.SIGTERM)
    code, output = running.end()

    assert code == 75, output


def test_an_elastic_job_is_started_again_from_its_newest_checkpoint(tmp_path):
    elastic = {"min_ranks": 2, "max_ranks": 2}
    running = Running(tmp_path, job(tmp_path, "numpy", {"num_ranks": 2, "elastic": elastic}), 2)
    wait_for(lambda: list(tmp_path.rglob("step-*")), 20)

    running.ranks[1].suspend()
    wait_for(lambda: len(list(tmp_path.glob("rank-*.txt"))) == 4, SHUTDOWN_S + LATE_S + 10)
    running.process.send_signal(signal.SIGTERM)
    code, output = running.end()

    assert code == 75, output
    assert "shows no sign of life; the job was ended" in output
    assert "resuming from the newest checkpoint" in output


@mostly("mpi")
def test_it_needs_no_word_from_horovod(tmp_path, controller):
    """Horovod's own inspector waits behind the frozen rank."""
    running = Running(tmp_path, job(tmp_path, "torch", {"num_ranks": 2, "controller": controller}), 2)

    running.ranks[1].suspend()
    wait_for(lambda: "no sign of life" in message_of(tmp_path), WARNING_S + LATE_S)
    wait_for(lambda: running.process.poll() is not None, SHUTDOWN_S + LATE_S)
    code, output = running.end(within_s=5)

    assert code == 1
    assert "shows no sign of life; the job was ended after health.stall_shutdown_s" in output


class TestAMachineWithoutOurLauncher:
    """A command typed by hand, `horovodrun horovod-train worker` or a script: ranks watch each other."""

    def started(self, folder, rank, controller, num_ranks):
        process = subprocess.Popen(
            [str(BIN / "horovodrun"), f"--{controller}", "-np", str(num_ranks), *map(str, rank)],
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        wait_for(lambda: len(list(folder.glob("rank-*.txt"))) == num_ranks, TIMEOUT_S)
        family = psutil.Process(process.pid).children(recursive=True)
        return process, [each for each in family if is_rank(each)], family

    def stop_one(self, folder, rank, controller, num_ranks):
        process, ranks, family = self.started(folder, rank, controller, num_ranks)
        number = ranks[-1].environ().get("HOROVOD_RANK") or ranks[-1].environ()["OMPI_COMM_WORLD_RANK"]
        ranks[-1].suspend()
        started = time.monotonic()
        output, _ = process.communicate(timeout=TIMEOUT_S)
        took_s = time.monotonic() - started
        wait_for(lambda: not any(map(is_alive, family)), 10)
        assert process.returncode != 0
        assert f"rank {number} on" in output
        assert "has shown no sign of life" in output
        return took_s, output

    def worker(self, folder, framework):
        return BIN / "horovod-train", "worker", job(folder, framework, {})

    def test_ranks_say_that_they_wait_for_one_that_was_stopped_before_it_joined(self, tmp_path):
        path = job(tmp_path, "numpy", {})
        script = tmp_path / "rank.sh"
        script.write_text(
            f"[ $OMPI_COMM_WORLD_RANK = 0 ] || kill -STOP $$\nexec {BIN}/horovod-train worker {path}\n"
        )
        process = subprocess.Popen(
            [str(BIN / "horovodrun"), "--mpi", "-np", "2", "sh", str(script)],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

        told = next((line for line in process.stdout if "for the others to join" in line), "nothing")
        family = psutil.Process(process.pid).children(recursive=True)
        for each in family:
            each.kill()
        process.communicate(timeout=TIMEOUT_S)

        assert f"rank 0: this rank has waited for {WARNING_S:.0f} s for the others to join" in told
        wait_for(lambda: not any(map(is_alive, family)), 10)

    @pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.campaign)])
    def test_a_stopped_rank_is_named_and_ends_all(self, tmp_path, num_ranks):
        took_s, output = self.stop_one(tmp_path, self.worker(tmp_path, "numpy"), "mpi", num_ranks)

        assert took_s > SHUTDOWN_S - 1
        assert "ended after health.stall_shutdown_s" in output

    @mostly("gloo")
    def test_over_horovod_too(self, tmp_path, controller):
        took_s, output = self.stop_one(tmp_path, self.worker(tmp_path, "torch"), controller, 2)

        assert took_s < SHUTDOWN_S + LATE_S
        assert "ended after health.stall_shutdown_s" in output

    @mostly("mpi")
    def test_so_is_one_of_a_script_with_an_adapter(self, tmp_path, controller):
        script = sys.executable, PROGRAMS / "joined.py", tmp_path, WARNING_S, SHUTDOWN_S

        took_s, output = self.stop_one(tmp_path, script, controller, 2)

        assert SHUTDOWN_S - 1 < took_s < SHUTDOWN_S + LATE_S
        assert "this rank waits for it in horovod_train." in output
        assert "was it stopped, does its host swap or hang?" in output
        assert "ended after health.stall_shutdown_s" in output
