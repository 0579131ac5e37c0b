"""A rank that hangs is named, with the line at which it is, before the job is ended."""

from __future__ import annotations

import json
import re

import pytest
from support.launching import PROGRAMS, cli, write_job

pytestmark = pytest.mark.ranks
CAMPAIGN = pytest.mark.campaign
TASK = f"{PROGRAMS / 'hangs.py'}:Hangs"
IN_LOSS = {
    "loops": r"is in loops\(\), line \d+ of .*hangs\.py",
    "holds_the_gil": r"is in holds_the_gil\(\), line \d+ of .*hangs\.py",
    "waits_for_a_lock": r"is in waits_for_a_lock\(\), line \d+ of .*hangs\.py",
    "opens_a_pipe": r"is in opens_a_pipe\(\), line \d+ of .*hangs\.py",
    "is_stopped": r"is stopped \(SIGSTOP\)",
    "enters_another_collective": r"is in enters_another_collective\(\), line \d+ of .*hangs\.py",
}

EACH_CHANGE = {("opens_a_pipe", "mpi")}


def reported(folder, task_args, controller, *, num_ranks=3, **fields):
    """Run a job that hangs; return the event that reports it, the output, and the folder of the run."""
    controller_of = {} if controller is None else {"controller": controller}
    job = write_job(
        folder / "job.yaml",
        task=TASK,
        task_args=task_args,
        train={"epochs": 1, "batch_size_per_rank": 8},
        lr={"base_lr": 0.001, "scaling": "none"},
        data={"shuffle": False, **fields},
        health={"stall_warning_s": 3, "stall_shutdown_s": 7, "one_process": "off"},
        checkpoint={"every": None},
        launch={"num_ranks": num_ranks, **controller_of, "threads_per_rank": 1, "grace_s": 2},
    )
    done = cli("run", str(job), cwd=folder, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    (run,) = (folder / "runs" / "test").glob("*-*-*")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    found = [event for event in events if event["kind"] == "hang"]
    assert found, done.stdout + done.stderr
    return found[0], done.stdout + done.stderr, run


@pytest.mark.parametrize(
    ("way", "controller"),
    [
        pytest.param(way, controller, marks=[] if (way, controller) in EACH_CHANGE else CAMPAIGN)
        for way in IN_LOSS
        for controller in ("mpi", "gloo")
    ],
)
def test_a_rank_that_does_not_go_on_is_named_with_its_line(tmp_path, way, controller):
    event, said, run = reported(tmp_path, {"way": way}, controller)

    assert event["ranks"] == [1]
    assert re.match(rf"rank 1 on \S+ {IN_LOSS[way]}", event["text"]), event["text"]
    assert event["text"].endswith("waiting: ranks 0, 2 in horovod_train.bucket.0.0")
    assert f"warning: {event['text']}" in said
    report = (run / "hang-1.txt").read_text()
    assert len(re.findall(r"^rank \d on \S+: process \d+, ", report, re.MULTILINE)) == 3


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=CAMPAIGN), 1])
def test_a_loader_that_hangs_is_named_with_its_line(tmp_path, num_workers):
    event, *_ = reported(tmp_path, {"data": "waits_for_a_lock"}, "gloo", num_workers=num_workers)

    where = r"waits for its data: its loader process \d+ is in" if num_workers else "is in"
    # Sample 100 is in the fifth global batch of 24.
    assert event["ranks"] == [0]
    assert re.match(rf"rank 0 on \S+ {where} waits_for_a_lock\(\), line \d+ of .*hangs\.py", event["text"])


@CAMPAIGN
def test_a_single_rank_that_waits_for_its_data_is_named_with_its_line(tmp_path):
    event, *_ = reported(tmp_path, {"data": "waits_for_a_lock"}, None, num_ranks=1, num_workers=2)

    assert re.match(
        r"rank 0 on \S+ waits for its data: its loader process \d+ is in waits_for_a_lock\(\)", event["text"]
    )
