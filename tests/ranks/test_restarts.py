"""A job that fails in several ways starts again by itself, and has the weights of an undisturbed one."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.launching import PROGRAMS, cli, write_job

pytestmark = pytest.mark.ranks


def run(folder, failures, *, check=True, **restarts):
    """Train 24 steps on two ranks; return weights (None: training failed), output and events."""
    folder.mkdir()
    job = write_job(
        folder / "job.yaml",
        task=f"{PROGRAMS / 'fragile.py'}:Fragile",
        task_args={"failures": failures, "folder": str(folder)},
        run_dir=str(folder / "runs"),
        train={"epochs": 3, "batch_size_per_rank": 6},
        lr={"base_lr": 0.1, "scaling": "none"},
        checkpoint={"every": "2 steps", "background": False},
        evaluation={"every": 9},
        health={"stall_warning_s": 2, "stall_shutdown_s": 5, "one_process": "off"},
        launch={
            "num_ranks": 2,
            "threads_per_rank": 1,
            "controller": "gloo",
            "restarts": {"backoff_s": [0.1, 1], **restarts},
        },
    )
    done = cli("run", str(job), cwd=folder, check=check)
    (log_dir,) = (folder / "runs" / "test").glob("*-*-*")
    events = [json.loads(line) for line in (log_dir / "events.jsonl").read_text().splitlines()]
    weights = None
    if not done.returncode:
        cli("checkpoint", "export", "runs/test", "weights.safetensors", cwd=folder)
        weights = load_file(folder / "weights.safetensors")
    return weights, done, [event for event in events if event["kind"] == "restart"]


def test_a_job_whose_ranks_are_killed_raise_and_hang_ends_as_if_nothing_had_happened(tmp_path):
    failures = {"5": ["kill", 1], "12": ["raise", 0], "19": ["hang", 1]}
    broken, done, restarts = run(tmp_path / "broken", failures)
    whole, *_ = run(tmp_path / "whole", {})

    assert [event["number"] for event in restarts] == [1, 2, 3], done.stdout
    reasons = [event["reason"] for event in restarts]
    assert reasons[0].startswith("rank 1 was killed by signal 9")
    assert reasons[1].endswith("OSError: the disk has failed at step 12")
    assert reasons[2].startswith("rank 1 did not join")
    assert "is in fail(), line" in done.stdout
    assert broken.keys() == whole.keys()
    for name, array in whole.items():
        np.testing.assert_array_equal(broken[name], array)


def test_a_task_that_raises_the_same_error_again_is_not_started_a_third_time(tmp_path):
    _, done, restarts = run(tmp_path / "job", {"5": ["raise always", 0]}, check=False)

    assert done.returncode == 1
    assert len(restarts) == 1
    said = done.stdout + done.stderr
    assert "error: rank 0 on " in said
    assert "OSError: the disk has failed at step 5" in said
    assert "hint: not started again: the same error was raised twice after step 4" in said
