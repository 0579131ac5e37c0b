"""Killed and resumed is the same as never killed: bit for bit, and sample for sample."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from support.checkpoints import arrays, newest
from support.launching import PROGRAMS, cli, write_job

from horovod_train.checkpoint.store import list_checkpoints, read_checkpoint, read_manifest

TASKS = {"numpy": "quick_tasks.py", "torch": "tasks.py"}
ADAMW = {"name": "adamw", "args": {"weight_decay": 0.1}}
NUM_SAMPLES = 60
EPOCHS = 3
pytestmark = pytest.mark.ranks


def job(
    folder: Path,
    name: str,
    controller: str,
    ranks: int,
    kill: str = "",
    framework="numpy",
    loaders=1,
    **train,
):
    notes = folder / f"notes-{name}-{ranks}-{bool(kill)}"
    notes.mkdir(exist_ok=True)
    path = write_job(
        folder / f"{name}.yaml",
        name=name,
        framework=framework,
        task=f"{PROGRAMS / TASKS[framework]}:Noted",
        task_args={"notes": str(notes), "kill": kill, "num_samples": NUM_SAMPLES, "curriculum": 0.001},
        run_dir=str(folder / "runs"),
        train={"epochs": EPOCHS, "batch_size_per_rank": 4, **train},
        optimizer={"torch": ADAMW, "numpy": {"args": {"momentum": 0.9}}}[framework],
        lr={"base_lr": 0.01, "reference_batch_size": 4, "warmup": 1, "decay": "cosine"},
        data={"num_workers": loaders if framework == "torch" else 0},
        checkpoint={"every": "3 steps", "keep_last": 100},
        launch={"num_ranks": ranks, "controller": controller},
    )
    return path, notes


def notes_by_call(notes: Path) -> list[list[list[int]]]:
    """The samples of each call, for each process."""
    return [
        [[int(word) for word in line.split()] for line in file.read_text().splitlines()]
        for file in sorted(notes.iterdir())
    ]


@pytest.mark.parametrize(
    ("controller", "framework"),
    [
        *(("mpi", "numpy"), ("gloo", "numpy")),
        # PyTorch's in `make test`: test_every_framework_recovers.py
        *(pytest.param(each, "torch", marks=pytest.mark.campaign) for each in ("mpi", "gloo")),
    ],
)
def test_killed_in_mid_epoch_and_resumed_is_bit_for_bit_the_undisturbed_run(tmp_path, controller, framework):
    whole, _ = job(tmp_path, "whole", controller, ranks=2, framework=framework, loaders=0)
    cli("run", str(whole), cwd=tmp_path)
    killed, _ = job(tmp_path, "killed", controller, ranks=2, kill="1:12", framework=framework)
    stopped = cli("run", str(killed), cwd=tmp_path, check=False)
    at_kill = read_manifest(newest(tmp_path, "killed")).step
    resumed, _ = job(tmp_path, "killed", controller, ranks=2, framework=framework)

    done = cli("run", str(resumed), cwd=tmp_path)

    assert stopped.returncode == 1
    assert at_kill in (6, 9), "the kill came in the second epoch, whose steps are 9 to 16"
    assert f"resumed from step-{at_kill:012d}" in done.stdout
    assert arrays(newest(tmp_path, "killed")) == arrays(newest(tmp_path, "whole"))


@pytest.mark.parametrize("other", [1, 3])
def test_resumed_on_another_number_of_ranks_uses_every_sample_exactly_once(tmp_path, other):
    killed, first_notes = job(tmp_path, "job", "mpi", ranks=2, kill="0:12")
    cli("run", str(killed), cwd=tmp_path, check=False)
    path = newest(tmp_path, "job")
    stands = read_checkpoint(path, only=["state"]).documents["state"]["progress"]
    assert 0 < stands["cursor"] < NUM_SAMPLES, "the checkpoint stands in the middle of an epoch"
    resumed, second_notes = job(tmp_path, "job", "mpi", ranks=other)

    cli("run", str(resumed), cwd=tmp_path)

    # What was trained after the checkpoint is lost with the killed process, and made again.
    kept = [samples for calls in notes_by_call(first_notes) for samples in calls[: stands["step"]]]
    again = [samples for calls in notes_by_call(second_notes) for samples in calls]
    visits = Counter(sample for samples in [*kept, *again] for sample in samples)
    assert visits == Counter(dict.fromkeys(range(NUM_SAMPLES), EPOCHS))


def test_a_run_that_was_complete_is_not_trained_again(tmp_path):
    path, notes = job(tmp_path, "job", "mpi", ranks=1)
    cli("run", str(path), cwd=tmp_path)
    before = notes_by_call(notes)

    done = cli("run", str(path), cwd=tmp_path)

    assert "resumed from" in done.stdout
    assert notes_by_call(notes) == before


def test_a_damaged_newest_checkpoint_is_skipped_and_said_so(tmp_path):
    path, _ = job(tmp_path, "job", "mpi", ranks=2)
    cli("run", str(path), cwd=tmp_path)
    last = newest(tmp_path, "job")
    (last / "model.safetensors").write_bytes(b"damaged")

    done = cli("run", str(path), "--set", "train.epochs=4", cwd=tmp_path)

    assert f"skipping {last.name}" in done.stdout
    assert "model.safetensors: has 7 bytes" in done.stdout
    previous = f"step-{json.loads((last / 'manifest.json').read_text())['step'] - 3:012d}"
    assert f"resumed from {previous}" in done.stdout


def test_what_was_changed_since_the_checkpoint_is_told_and_written_down(tmp_path):
    path, _ = job(tmp_path, "job", "mpi", ranks=1)
    cli("run", str(path), cwd=tmp_path)

    changes = ("train.epochs=4", "lr.base_lr=0.02", "task_args.num_samples=64")
    done = cli("run", str(path), *[word for text in changes for word in ("--set", text)], cwd=tmp_path)
    shown = cli("checkpoint", "show", str(newest(tmp_path, "job")), cwd=tmp_path)

    for change in ("data.num_samples: 60 -> 64", "lr.base_lr: 0.01 -> 0.02", "train.epochs: 3 -> 4"):
        assert f"changed since step-000000000045: {change}" in done.stdout
        assert change in shown.stdout
    (log,) = [log for log in tmp_path.rglob("run.log") if "resumed" in log.read_text()]
    assert "lr.base_lr: 0.01 -> 0.02" in log.read_text()


def test_checkpoints_that_are_all_damaged_are_refused_until_a_person_decides(tmp_path):
    path, notes = job(tmp_path, "job", "mpi", ranks=1)
    cli("run", str(path), cwd=tmp_path)
    folder = tmp_path / "runs" / "job" / "checkpoints"
    for checkpoint in list_checkpoints(folder):
        (checkpoint.path / "model.safetensors").write_bytes(b"")
    before = notes_by_call(notes)

    refused = [cli("run", str(path), cwd=tmp_path, check=False) for _ in range(2)]
    after = notes_by_call(notes)
    discarded = cli("checkpoint", "discard", str(folder), cwd=tmp_path)
    cli("run", str(path), cwd=tmp_path)

    for done in refused:
        assert done.returncode == 1
        assert "are damaged, the newest: " in done.stderr
        assert f"`horovod-train checkpoint discard {folder}`" in done.stderr
    assert after == before, "nothing was trained from zero"
    assert "deleted" in discarded.stdout
    assert len(notes_by_call(notes)) == len(before) + 1
