"""What can become of a run, at twenty random moments each, over MPI and Gloo.

No work is lost beyond the last checkpoint, nothing happens in silence, exit codes are those of the README:
`make campaign`. The same at chosen moments: ``test_output.py``, ``test_frozen.py``.
"""

from __future__ import annotations

import os
import pty
import random
import subprocess
import time
from contextlib import suppress

import psutil
import pytest
from safetensors.numpy import load_file
from support.launching import PROGRAMS, TIMEOUT_S, cli, write_job
from support.running import is_rank, writing_to

from horovod_train.checkpoint.store import list_checkpoints

NUM_MOMENTS = 20
EPOCHS, NUM_SAMPLES, BATCH_SIZE, RANKS = 3, 60, 4, 2
STEPS_BETWEEN = 5
# From the start to the end of an undisturbed run, and a little longer.
LONGEST_S = {"numpy": 6.0, "torch": 16.0}
# Long enough for a rank that imports PyTorch, which holds Python's lock, beside other tests.
STALL_SHUTDOWN_S = 10.0
SAVED, FAILED, KILLED_BY_HANGUP = 75, 1, -1

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.campaign,
    pytest.mark.parametrize("share", [random.Random(n).random() for n in range(NUM_MOMENTS)]),
]


def write(folder, framework, controller, **sections):
    tasks = "quick_tasks.py" if framework == "numpy" else "tasks.py"
    (folder / "notes").mkdir(exist_ok=True)
    return write_job(
        folder / "job.yaml",
        framework=framework,
        task=f"{PROGRAMS / tasks}:Noted",
        **{
            "task_args": {"notes": str(folder / "notes"), "num_samples": NUM_SAMPLES, "pause_s": 0.05},
            "run_dir": str(folder / "runs"),
            "train": {"epochs": EPOCHS, "batch_size_per_rank": BATCH_SIZE},
            "checkpoint": {"every": [1, f"{STEPS_BETWEEN} steps"]},
            "health": {"stall_warning_s": 2.0, "stall_shutdown_s": STALL_SHUTDOWN_S},
            "launch": {"num_ranks": RANKS, "controller": controller},
            **sections,
        },
    )


def weights(folder):
    newest = list_checkpoints(folder / "runs" / "test" / "checkpoints")[0]
    return {name: array.tobytes() for name, array in load_file(newest.path / "model.safetensors").items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights at the end of a run that nobody disturbs, by framework."""
    made = {}

    def of(framework):
        if framework not in made:
            folder = tmp_path_factory.mktemp("undisturbed")
            cli("run", str(write(folder, framework, "gloo")), cwd=folder)
            made[framework] = weights(folder)
        return made[framework]

    return of


def notes(folder):
    """How often each sample was trained."""
    lines = [line for file in (folder / "notes").iterdir() for line in file.read_text().split()]
    return [lines.count(str(sample)) for sample in range(NUM_SAMPLES)]


def samples_until(step):
    """How many samples are trained in so many steps; the last one of an epoch is smaller."""
    batch = BATCH_SIZE * RANKS
    epochs, steps = divmod(step, -(-NUM_SAMPLES // batch))
    return epochs * NUM_SAMPLES + steps * batch


def ends_as_if_nothing_had_been(folder, path, expected):
    """Start the job again: it goes on from the newest checkpoint, and comes to the same end."""
    checkpoints = list_checkpoints(folder / "runs" / "test" / "checkpoints")
    before = sum(notes(folder))
    done = cli("run", str(path), "--set", "health.stall_shutdown_s=600", cwd=folder)
    assert "trained test" in done.stdout
    assert weights(folder) == expected
    trained = notes(folder)
    rest = EPOCHS * NUM_SAMPLES - samples_until(checkpoints[0].step if checkpoints else 0)
    assert sum(trained) - before == rest
    assert min(trained) >= EPOCHS


def test_the_terminal_is_closed(tmp_path, controller, share, undisturbed):
    expected = undisturbed("numpy")
    path = write(tmp_path, "numpy", controller)
    terminal, inside = pty.openpty()
    process = writing_to(inside, tmp_path, path, "setsid", "--ctty", stdin=inside)
    os.close(inside)
    time.sleep(share * LONGEST_S["numpy"])

    os.close(terminal)

    code = process.wait(TIMEOUT_S)
    has_begun = any((tmp_path / "notes").iterdir())
    assert code in ((0, SAVED) if has_begun else (SAVED, KILLED_BY_HANGUP))
    ends_as_if_nothing_had_been(tmp_path, path, expected)
    assert notes(tmp_path) == [EPOCHS] * NUM_SAMPLES


def test_the_pipe_is_cut(tmp_path, controller, share, undisturbed):
    expected = undisturbed("numpy")
    reading, writing = os.pipe()
    process = writing_to(writing, tmp_path, write(tmp_path, "numpy", controller))
    os.close(writing)
    time.sleep(share * LONGEST_S["numpy"])

    os.close(reading)

    assert process.wait(TIMEOUT_S) == 0
    assert weights(tmp_path) == expected
    assert notes(tmp_path) == [EPOCHS] * NUM_SAMPLES


def test_a_rank_is_frozen(tmp_path, controller, share, undisturbed):
    expected = undisturbed("torch")
    path = write(tmp_path, "torch", controller)
    log = tmp_path / "output.txt"
    with log.open("wb") as output:
        process = writing_to(output, tmp_path, path)
    chance = random.Random(share)
    time.sleep(share * LONGEST_S["torch"])
    is_frozen = False
    while process.poll() is None and not is_frozen:
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
            if ranks := [each for each in family if is_rank(each)]:
                chance.choice(ranks).suspend()
                is_frozen = True

    code = process.wait(TIMEOUT_S)

    said = log.read_text()
    if is_frozen:
        assert code == FAILED, said
        assert "shows no sign of life" in said
    else:
        assert code == 0, said
    ends_as_if_nothing_had_been(tmp_path, path, expected)


def test_the_disk_is_full(tmp_path, controller, share, undisturbed):
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small disk")
    expected = undisturbed("numpy")
    path = write(tmp_path, "numpy", controller)
    disk = tmp_path / "runs"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], check=True)
    try:
        log = tmp_path / "output.txt"
        with log.open("wb") as output:
            process = writing_to(output, tmp_path, path)
        time.sleep(share * LONGEST_S["numpy"])
        with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while filler.write(bytes(4096)):
                pass

        code = process.wait(TIMEOUT_S)

        said = log.read_text()
        (disk / "filler").unlink()
        assert code in (0, FAILED), said
        if "No space left on device" not in said:
            assert code == 0
        ends_as_if_nothing_had_been(tmp_path, path, expected)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
