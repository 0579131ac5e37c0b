"""After a spike of the loss, a job goes on as if its sampler had never served the samples before it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from programs.spiky import Samples, Spiky
from safetensors.numpy import load_file
from support.launching import PROGRAMS, cli, write_job

pytestmark = pytest.mark.ranks
BATCH_SIZE = 12


def one_process(parts):
    """The weights of one process that trains on parts of the training, in steps of the global batch."""
    task, data = Spiky(), Samples()
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for start, stop in parts:
        for first in range(start, stop, BATCH_SIZE):
            samples = [data[each % len(data)] for each in range(first, first + BATCH_SIZE)]
            optimizer.zero_grad()
            task.loss(model, [torch.stack(each) for each in zip(*samples, strict=True)]).backward()
            optimizer.step()
    return {name: value.numpy() for name, value in model.state_dict().items()}


def test_samples_from_the_checkpoint_to_the_spike_are_skipped_also_after_a_restart(tmp_path):
    job = write_job(
        tmp_path / "job.yaml",
        task=f"{PROGRAMS / 'spiky.py'}:Spiky",
        run_dir=str(tmp_path / "runs"),
        train={"epochs": 2, "batch_size_per_rank": BATCH_SIZE // 2},
        optimizer={"args": {"momentum": 0.9}},
        lr={"base_lr": 0.05, "scaling": "none"},
        data={"shuffle": False},
        checkpoint={"every": "2 steps", "background": False, "keep_last": 9},
        health={"loss_spike": {"action": "rollback", "window_steps": 4, "threshold": 1000}},
        launch={"num_ranks": 2, "threads_per_rank": 1, "restarts": {"backoff_s": [0.1, 1]}},
    )
    said = cli("run", str(job), "--inject=kill:rank=1,step=9", cwd=tmp_path).stdout
    cli("checkpoint", "export", "runs/test", "weights.safetensors", cwd=tmp_path)
    (run,) = (tmp_path / "runs" / "test").glob("*-*-*")
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    spikes = [(each["step"], each["restored"]) for each in events if each["kind"] == "loss_spike"]

    # Wrong samples are in the sixth batch of each epoch; two batches are skipped.
    assert spikes == [(6, 4), (12, 10)]
    assert "back to the checkpoint of step 4" in said
    assert "resumed from step-000000000008" in said
    weights = load_file(tmp_path / "weights.safetensors")
    for name, expected in one_process([(0, 48), (72, 144), (168, 192)]).items():
        np.testing.assert_allclose(weights[name], expected, rtol=0, atol=1e-12)


def test_spikes_are_reported_if_the_job_does_not_go_back(tmp_path):
    job = write_job(
        tmp_path / "job.yaml",
        task=f"{PROGRAMS / 'spiky.py'}:Spiky",
        train={"epochs": 1, "batch_size_per_rank": BATCH_SIZE},
        lr={"base_lr": 0.001, "scaling": "none"},
        data={"shuffle": False},
        checkpoint={"every": None},
        health={"loss_spike": {"window_steps": 4, "threshold": 1000}},
        launch={"num_ranks": 1},
    )
    said = cli("run", str(job), cwd=tmp_path).stdout

    assert said.count("warning: the loss of step 6 is ") == 1
    assert "back to" not in said
