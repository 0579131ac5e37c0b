"""With `train.randomness: sample`, dropout, noise and random crops are the same on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.launching import PROGRAMS, cli, write_job

from horovod_train.checkpoint.store import list_checkpoints

pytestmark = pytest.mark.ranks
KINDS = ("transformer", "convolution")
ROUNDING = 1e-5
"""Of 36 steps in float32, whose sums are in another order."""


def trained(folder, num_ranks, num_workers=0, *, kind="transformer", strategy="allreduce", killed=False):
    """Train 36 steps; if ``killed``, a rank is killed after 25 batches, and training resumes on 2 ranks."""
    folder.mkdir()
    job = write_job(
        folder / "job.yaml",
        framework="torch",
        task=f"{PROGRAMS / 'noisy.py'}:Noisy",
        task_args={"kind": kind, "data": "crops", "killed": str(folder / "killed") if killed else None},
        run_dir=str(folder / "runs"),
        train={
            "epochs": 4, "global_batch_size": 6, "batch_size_per_rank": 4, "randomness": "sample", "seed": 3,
        },
        lr={"base_lr": 0.1, "scaling": "none"},
        optimizer={"args": {"momentum": 0.9}},
        strategy=strategy,
        data={"num_workers": num_workers},
        checkpoint={"every": [1, "5 steps"]},
        launch={"num_ranks": num_ranks, "threads_per_rank": 1},
    )  # fmt: skip
    done = cli("run", str(job), cwd=folder, check=not killed)
    if killed:
        assert done.returncode != 0
        assert (folder / "killed").exists()
        assert "resumed" in cli("run", str(job), "-n", "2", cwd=folder).stdout
    assert list_checkpoints(folder / "runs" / "test" / "checkpoints")[0].step == 36
    cli("checkpoint", "export", "runs/test", "weights.safetensors", cwd=folder)
    return np.concatenate([array.ravel() for array in load_file(folder / "weights.safetensors").values()])


def test_weights_are_those_of_one_rank_also_after_kill_9_on_another_number(tmp_path):
    alone = trained(tmp_path / "alone", 1)
    killed = trained(tmp_path / "killed", 3, 1, killed=True)

    assert np.abs(killed - alone).max() <= ROUNDING


@pytest.mark.campaign
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_equal_with_loader_processes_on_one_to_three_ranks(tmp_path, kind):
    worlds = [(ranks, workers) for ranks in (1, 2, 3) for workers in (0, 1, 3)]
    first, *others = [trained(tmp_path / f"{r}-{w}", r, w, kind=kind) for r, w in worlds]

    for other in others:
        assert np.abs(other - first).max() <= ROUNDING


@pytest.mark.campaign
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["zero", "ddp", "fsdp"])
def test_weights_are_equal_under_every_strategy_that_draws_by_sample(tmp_path, kind, strategy):
    alone = trained(tmp_path / "alone", 1, kind=kind)
    together = trained(tmp_path / "together", 2, 1, kind=kind, strategy=strategy)
    killed = trained(tmp_path / "killed", 3, kind=kind, strategy=strategy, killed=True)

    assert np.abs(together - alone).max() <= ROUNDING
    assert np.abs(killed - alone).max() <= ROUNDING


@pytest.mark.campaign
def test_weights_of_jax_are_equal_with_a_key_for_each_sample(tmp_path):
    def weights(num_ranks, num_workers):
        folder = tmp_path / f"{num_ranks}"
        folder.mkdir()
        job = write_job(
            folder / "job.yaml",
            framework="jax",
            task=f"{PROGRAMS / 'noisy_jax.py'}:Noisy",
            run_dir=str(folder / "runs"),
            train={"epochs": 4, "global_batch_size": 6, "batch_size_per_rank": 4, "randomness": "sample"},
            lr={"base_lr": 0.1, "scaling": "none"},
            data={"num_workers": num_workers},
            launch={"num_ranks": num_ranks, "threads_per_rank": 1},
        )
        cli("run", str(job), cwd=folder)
        path = list_checkpoints(folder / "runs" / "test" / "checkpoints")[0].path
        return np.concatenate([array.ravel() for array in load_file(path / "model.safetensors").values()])

    alone = weights(1, 0)
    for num_ranks, num_workers in ((2, 1), (3, 0)):
        assert np.abs(weights(num_ranks, num_workers) - alone).max() <= ROUNDING
