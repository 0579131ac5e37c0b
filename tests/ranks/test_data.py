"""Every sample of files is used exactly once in an epoch, also after kill -9 on other numbers of ranks."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.files import WRITERS, x_of
from support.launching import PROGRAMS, cli, environment, write_job

pytestmark = pytest.mark.ranks
SIZES = (31, 0, 17, 1, 40, 7)
NUM_SAMPLES = sum(SIZES)
BATCH_SIZE = 12
EPOCHS = 3
AT_HOME = "webdataset"


def trained(folder, data, worlds, **fields):
    """Train on a number of ranks until rank 0 is killed, then on the next one; return the weights."""
    folder.mkdir()
    for place, (num_ranks, kill_at) in enumerate(worlds):
        job = write_job(
            folder / "job.yaml",
            task=f"{PROGRAMS / 'file_tasks.py'}:Counted",
            task_args={
                "num_samples": NUM_SAMPLES,
                "kill_at": kill_at,
                "noted": str(folder / f"killed-{place}"),
            },
            run_dir=str(folder / "runs"),
            train={"epochs": EPOCHS, "global_batch_size": BATCH_SIZE, "batch_size_per_rank": 4, "seed": 5},
            lr={"base_lr": float(BATCH_SIZE), "scaling": "none"},
            optimizer={"args": {"momentum": 0.0}},
            data={
                "cache": {"dir": str(folder / "cache")},
                "decode": f"{PROGRAMS / 'file_tasks.py'}:decode",
                **data,
            },
            checkpoint={"every": "3 steps", "background": False},
            health={"one_process": "off"},
            launch={"num_ranks": num_ranks, "threads_per_rank": 1},
            **fields,
        )
        done = cli("run", str(job), cwd=folder, check=not kill_at, PYTHONPATH=str(PROGRAMS.parent))
        if kill_at:
            assert done.returncode != 0
            assert (folder / f"killed-{place}").exists(), done.stdout + done.stderr
        assert not place or "resumed from step-" in done.stdout
    cli("checkpoint", "export", "runs/test", "weights.safetensors", cwd=folder)
    return load_file(folder / "weights.safetensors")


def written(name, folder):
    """Write files in a process of its own: packages of some formats change variables, and start threads."""
    code = f"from support.files import WRITERS; print(*WRITERS[{name!r}](Path({str(folder)!r}), {SIZES}))"
    done = subprocess.run(
        [sys.executable, "-c", f"from pathlib import Path; {code}"],
        env=environment(PYTHONPATH=str(PROGRAMS.parent)), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split()


def used(weights):
    """How often each sample was used."""
    return np.round(weights["used"] * 1.0, 9)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each == AT_HOME else pytest.mark.campaign) for each in WRITERS]
)
def test_each_sample_is_used_once_in_an_epoch_after_kill_9_on_1_3_2_and_5_ranks(tmp_path, name):
    source, pattern = written(name, tmp_path)
    data = {"source": source, "files": str(tmp_path / pattern), "num_workers": 2}
    killed = trained(tmp_path / "killed", data, [(1, 17), (3, 9), (2, 10), (5, 0)])
    alone = trained(tmp_path / "alone", {**data, "num_workers": 0}, [(1, 0)])

    assert used(killed).tolist() == [EPOCHS] * NUM_SAMPLES
    for key, weight in alone.items():
        np.testing.assert_allclose(killed[key], weight, rtol=0, atol=1e-12)


def test_samples_that_are_not_kept_are_never_used(tmp_path):
    source, pattern = WRITERS["jsonl, gzip"](tmp_path, SIZES)
    keep = f"{PROGRAMS / 'file_tasks.py'}:keep"
    weights = trained(
        tmp_path / "kept", {"source": source, "files": str(tmp_path / pattern), "keep": keep}, [(2, 0)]
    )

    assert used(weights).tolist() == [EPOCHS if number % 4 else 0 for number in range(NUM_SAMPLES)]


def test_ranks_that_have_other_files_are_told_before_the_first_step(tmp_path):
    """As if a copy of the data was incomplete on the second host."""
    source, pattern = WRITERS["jsonl"](tmp_path, SIZES)
    (tmp_path / "rank-1").mkdir()
    for path in tmp_path.glob(pattern):
        text = path.read_text()
        (tmp_path / "rank-1" / path.name).write_text(text.replace('"id": 40', '"id": 41'))
    job = write_job(
        tmp_path / "job.yaml",
        task=f"{PROGRAMS / 'file_tasks.py'}:Counted",
        task_args={"num_samples": NUM_SAMPLES},
        data={
            "source": source,
            "files": f"{tmp_path}/rank-$HOROVOD_RANK/{pattern}",
            "decode": f"{PROGRAMS / 'file_tasks.py'}:decode",
        },
        launch={"num_ranks": 2, "threads_per_rank": 1, "controller": "gloo"},
    )
    (tmp_path / "rank-0").symlink_to(tmp_path)
    done = cli("run", str(job), cwd=tmp_path, check=False, PYTHONPATH=str(PROGRAMS.parent))

    assert done.returncode == 2
    said = done.stdout + done.stderr
    assert "the training data differ between ranks: file 2 is train-002.jsonl (" in said
    assert "copy the same files to all hosts" in said


def test_a_file_that_is_damaged_ends_the_job_with_its_name(tmp_path):
    source, pattern = WRITERS["webdataset"](tmp_path, SIZES)
    data = {"source": source, "files": str(tmp_path / pattern)}
    job = write_job(
        tmp_path / "job.yaml",
        task=f"{PROGRAMS / 'file_tasks.py'}:Counted",
        task_args={"num_samples": NUM_SAMPLES},
        data={**data, "decode": f"{PROGRAMS / 'file_tasks.py'}:decode", "num_workers": 1},
        launch={"num_ranks": 2, "threads_per_rank": 1},
    )
    env = {"PYTHONPATH": str(PROGRAMS.parent)}
    cli("data", "index", str(job), cwd=tmp_path, **env)
    victim = tmp_path / "train-004.tar"
    victim.write_bytes(victim.read_bytes()[:-3000])
    done = cli("run", str(job), cwd=tmp_path, check=False, **env)

    assert done.returncode == 2
    assert f"{victim}: has changed since the index of the files was made" in done.stdout + done.stderr


def test_files_are_indexed_inspected_and_verified_from_the_command_line(tmp_path):
    source, pattern = WRITERS["webdataset"](tmp_path, SIZES)
    job = write_job(
        tmp_path / "job.yaml",
        task=f"{PROGRAMS / 'file_tasks.py'}:Counted",
        task_args={"num_samples": NUM_SAMPLES},
        data={"source": source, "files": pattern, "decode": f"{PROGRAMS / 'file_tasks.py'}:decode"},
    )
    env = {"PYTHONPATH": str(PROGRAMS.parent)}
    assert (
        "data: 96 samples in 6 files"
        in cli("data", "index", str(job), "--processes", "2", cwd=tmp_path, **env).stdout
    )
    shown = cli("data", "inspect", str(job), cwd=tmp_path, **env).stdout
    assert "files    6, with 0 to 40 samples; 1 are empty" in shown
    assert "{id: int 0, x: float64[4]}" in shown
    (tmp_path / "train-002.tar").write_bytes(b"no archive")
    content = (tmp_path / "train-004.tar").read_bytes()
    (tmp_path / "train-004.tar").write_bytes(content.replace(json.dumps({"id": 50}).encode(), b'{"id": 5x}'))

    found = cli("data", "verify", str(job), "--output", "broken.txt", cwd=tmp_path, check=False, **env)
    assert found.returncode == 1
    assert "train-002.tar: is not a tar archive" in found.stdout
    assert "train-004.tar, sample 1: JSONDecodeError" in found.stdout
    excluded = ("--set", "data.exclude=broken.txt")
    assert (
        "data: 78 samples in 5 files" in cli("data", "index", str(job), *excluded, cwd=tmp_path, **env).stdout
    )
    assert (
        cli("data", "verify", str(job), *excluded, "--output", "more.txt", cwd=tmp_path, **env).returncode
        == 0
    )
    assert (tmp_path / "more.txt").read_text() == (tmp_path / "broken.txt").read_text()
    assert x_of(3).shape == (4,)
