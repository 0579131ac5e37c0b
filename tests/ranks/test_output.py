"""Whatever becomes of a run's output: the job goes on, or saves and leaves; and what is lost is told."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from support.launching import PROGRAMS, TIMEOUT_S, cli, write_job
from support.running import writing_to

from horovod_train.checkpoint.store import list_checkpoints
from horovod_train.system.processes import is_alive

pytestmark = pytest.mark.ranks
STEPS = 15 * 3
FULL = Path("/dev/full")  # says what a full disk says


def job(folder, **sections):
    return write_job(
        folder / "job.yaml",
        framework="numpy",
        **{
            "run_dir": str(folder / "runs"),
            "task": f"{PROGRAMS / 'quick_tasks.py'}:Noted",
            "task_args": {"notes": str(folder), "pause_s": 0.02},
            "train": {"epochs": 3, "batch_size_per_rank": 4},
            "launch": {"num_ranks": 1},
            **sections,
        },
    )


def endless(folder, **sections):
    return job(folder, train={"epochs": 5000, "batch_size_per_rank": 4}, **sections)


def started(folder, path, output, *through, stdin=subprocess.DEVNULL):
    """`horovod-train run`, with a place to write to, training; what it was started through becomes it."""
    process = writing_to(output, folder, path, *through, stdin=stdin)
    deadline = time.monotonic() + TIMEOUT_S
    while not list(folder.glob("rank-*.txt")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


def last_step(folder):
    return list_checkpoints(folder / "runs" / "test" / "checkpoints")[0].step


def state(folder):
    (file,) = folder.glob("runs/test/*/state.json")
    return json.loads(file.read_text())


def test_a_pipe_that_is_cut_does_not_keep_a_job_from_its_end(tmp_path):
    reading, writing = os.pipe()
    process = started(tmp_path, job(tmp_path), writing)
    os.close(writing)

    os.close(reading)

    assert process.wait(TIMEOUT_S) == 0
    assert last_step(tmp_path) == STEPS
    assert state(tmp_path)["state"] == "succeeded"


def test_a_full_disk_behind_the_output_does_neither(tmp_path):
    with FULL.open("wb") as full:
        process = started(tmp_path, job(tmp_path), full)

    assert process.wait(TIMEOUT_S) == 0
    assert last_step(tmp_path) == STEPS


def test_a_reader_that_does_not_read_does_neither(tmp_path):
    reading, writing = os.pipe()
    process = started(tmp_path, job(tmp_path, task_args={"notes": str(tmp_path), "chatter": 4000}), writing)
    os.close(writing)

    code = process.wait(TIMEOUT_S)

    os.close(reading)
    assert code == 0
    assert last_step(tmp_path) == STEPS


def test_a_launcher_that_is_stopped_loses_no_event_and_says_what_output_it_lost(tmp_path):
    """Ctrl-Z in a terminal: the rank waits 5 s for somebody to read, and trains to its end without."""
    output = tmp_path / "output.txt"
    with output.open("wb") as file:
        chatter = {"notes": str(tmp_path), "pause_s": 0.02, "chatter": 20_000}
        process = started(tmp_path, job(tmp_path, task_args=chatter), file)
    (notes,) = tmp_path.glob("rank-*.txt")
    rank = int(notes.stem.rpartition("-")[2])

    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + TIMEOUT_S
    while is_alive(rank):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGCONT)

    assert process.wait(TIMEOUT_S) == 0
    assert last_step(tmp_path) == STEPS
    assert state(tmp_path)["state"] == "succeeded"
    assert "bytes of this rank's output are lost" in output.read_text()


def test_of_many_short_lines_none_is_lost(tmp_path):
    """Open MPI drops what is too much when it has put its tag before each line."""
    script = tmp_path / "flood.py"
    script.write_text("for number in range(5000):\n    print('line', number)\n")

    done = cli("run", "--script", str(script), "-n", "2", "--set", "launch.controller=mpi", cwd=tmp_path)

    lines = Counter(done.stdout.splitlines())
    assert {
        f"[rank {rank}] line {number}": 1 for rank in (0, 1) for number in range(5000)
    }.items() <= lines.items()


def test_a_terminal_that_is_closed_lets_the_job_save_and_leave(tmp_path):
    """The kernel sends SIGHUP to whatever runs in it, and every write fails."""
    terminal, inside = pty.openpty()
    process = started(tmp_path, endless(tmp_path), inside, "setsid", "--ctty", stdin=inside)
    os.close(inside)
    os.read(terminal, 10)

    os.close(terminal)

    assert process.wait(TIMEOUT_S) == 75
    assert state(tmp_path)["state"] == "preempted"
    assert last_step(tmp_path) > 0


def test_ctrl_c_with_tee_behind_it_saves_and_ends_with_75(tmp_path):
    """Both get the signal; tee is gone when the job says that it has saved."""
    reading, writing = os.pipe()
    process = started(tmp_path, endless(tmp_path), writing)
    os.close(writing)

    os.close(reading)
    process.send_signal(signal.SIGINT)

    assert process.wait(TIMEOUT_S) == 75
    assert state(tmp_path)["state"] == "preempted"


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of its own that is soon full."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small disk")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_submitted_job_whose_log_disk_is_full_trains_on_and_says_so(tmp_path, small_disk):
    path = job(
        tmp_path,
        run_dir=str(small_disk),
        checkpoint={"dir": str(tmp_path / "checkpoints")},
        task_args={"notes": str(tmp_path), "chatter": 8000},
    )
    job_id = cli("submit", str(path), cwd=tmp_path).stdout.strip()

    cli("wait", job_id, cwd=tmp_path)
    status = json.loads(cli("status", job_id, "--json", cwd=tmp_path).stdout)

    assert status["state"] == "succeeded"
    assert "run.log is incomplete: No space left on device" in status["message"]
    assert list_checkpoints(tmp_path / "checkpoints")[0].step == STEPS
    assert (small_disk / "test" / job_id.removeprefix("test-") / "run.log").stat().st_size > 10_000


def test_a_state_folder_that_cannot_be_written_is_told_and_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("in the way")

    done = cli("run", str(job(tmp_path)), cwd=tmp_path, XDG_STATE_HOME=str(tmp_path / "file"))

    assert "will not find test-" in done.stdout
    assert "trained test" in done.stdout


@pytest.mark.parametrize(("access", "mode"), [("private", 0o700), ("group", 0o750), ("everyone", 0o755)])
def test_the_folder_of_a_run_is_private_unless_the_job_opens_it(tmp_path, access, mode):
    cli("run", str(job(tmp_path, run_dir_access=access, train={"epochs": 1})), cwd=tmp_path)

    assert (tmp_path / "runs" / "test").stat().st_mode & 0o777 == mode


def test_files_of_the_current_folder_are_not_taken_for_modules(tmp_path):
    """They would be executed in each rank."""
    for name in ("prometheus_client", "psutil", "json", "safetensors", "horovod_train"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken for a module')\n")

    done = cli("run", str(job(tmp_path, launch={"num_ranks": 2})), cwd=tmp_path)

    assert "trained test" in done.stdout


def test_a_task_of_the_current_folder_is_found_with_what_is_beside_it(tmp_path):
    (tmp_path / "helper.py").write_text("from quick_tasks import Noted\n")
    (tmp_path / "mine.py").write_text("from helper import Noted\nclass Task(Noted):\n    pass\n")
    path = job(tmp_path, task="mine:Task", train={"epochs": 1}, launch={"num_ranks": 2})

    done = cli("run", str(path), cwd=tmp_path, PYTHONPATH=str(PROGRAMS))

    assert "trained test" in done.stdout
