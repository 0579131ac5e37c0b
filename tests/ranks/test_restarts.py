"""A job that fails in several ways starts again by itself, and has the weights of an undisturbed one."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.launching import PROGRAMS, cli, write_job

pytestmark = pytest.mark.ranks


def run(folder, *options, task="digits", check=True):
    """Train 24 steps on two ranks; return weights (None: it failed), output, and reasons of restarts."""
    folder.mkdir()
    job = write_job(
        folder / "job.yaml",
        task=task,
        run_dir=str(folder / "runs"),
        train={"epochs": 2, "batch_size_per_rank": 64},
        checkpoint={"every": "2 steps", "background": False},
        health={"stall_warning_s": 2, "stall_shutdown_s": 5, "one_process": "off"},
        launch={
            "num_ranks": 2,
            "threads_per_rank": 1,
            "controller": "gloo",
            "restarts": {"backoff_s": [0.1, 1]},
        },
    )
    done = cli("run", str(job), *options, cwd=folder, check=check)
    (log_dir,) = (folder / "runs" / "test").glob("*-*-*")
    events = [json.loads(line) for line in (log_dir / "events.jsonl").read_text().splitlines()]
    weights = None
    if not done.returncode:
        cli("checkpoint", "export", "runs/test", "weights.safetensors", cwd=folder)
        weights = load_file(folder / "weights.safetensors")
    return (
        weights,
        done.stdout + done.stderr,
        [each["reason"] for each in events if each["kind"] == "restart"],
    )


def test_a_job_whose_ranks_are_killed_raise_and_hang_ends_as_if_nothing_had_happened(tmp_path):
    faults = ("kill:rank=1,step=5", "raise:rank=0,step=12", "hang:rank=1,step=19")
    broken, said, reasons = run(tmp_path / "broken", *(f"--inject={fault}" for fault in faults))
    whole, *_ = run(tmp_path / "whole")

    assert len(reasons) == 3, said
    assert reasons[0].startswith("rank 1 was killed by signal 9")
    assert reasons[1].endswith("InjectedError: a fault was injected")
    assert reasons[2].startswith("rank 1 did not join")
    assert "injected after step 19: hang" in said
    assert broken.keys() == whole.keys()
    for name, array in whole.items():
        np.testing.assert_array_equal(broken[name], array)


def test_a_task_that_raises_the_same_error_again_is_not_started_a_third_time(tmp_path):
    task = f"{PROGRAMS / 'fragile.py'}:Fragile"
    _, said, reasons = run(tmp_path / "job", task=task, check=False)

    assert len(reasons) == 1
    assert "OSError: the disk has failed" in reasons[0]
    assert "hint: not started again: the same error was raised twice after step 4" in said
