"""HorovodTrainer in a script of its own, without a job, started by mpirun alone."""

from __future__ import annotations

import subprocess
from itertools import chain

import numpy as np
import pytest
from language import EPOCHS, NUM_SAMPLES, step_by_step
from safetensors.numpy import load_file
from support.joint import largest_difference
from support.launching import BIN, PROGRAMS, TIMEOUT_S, cli, environment, results, write_job

from horovod_train.checkpoint.store import list_checkpoints

RANKS = 2
WAYS = {"plain": 1, "accumulation": 2}
pytestmark = pytest.mark.ranks


def run(launcher, folder):
    command = [*launcher, str(BIN / "python"), str(PROGRAMS / "transformers_ways.py"), str(folder)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return results(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("transformers")


@pytest.fixture(scope="module")
def ranks(folder):
    return run(["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(RANKS)], folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run([], tmp_path_factory.mktemp("alone"))


def steps_of_all(found, way):
    """The numbers of the samples of each step, over all ranks; what fills up a short step is left out."""
    places = [list(chain(*places)) for places in zip(*(rank[way]["seen"] for rank in found), strict=True)]
    steps = [list(chain(*places[at : at + WAYS[way]])) for at in range(0, len(places), WAYS[way])]
    per_epoch = len(steps) // EPOCHS
    kept = []
    for epoch in range(EPOCHS):
        used = set()
        for step in steps[epoch * per_epoch : (epoch + 1) * per_epoch]:
            kept.append(sorted(set(step) - used))
            used |= set(step)
        assert used == set(range(NUM_SAMPLES))
    return kept


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("who", ["ranks", "alone"])
def test_every_token_of_a_step_weighs_the_same(who, way, request):
    found = request.getfixturevalue(who)
    expected, losses = step_by_step(steps_of_all(found, way))

    for rank in found:
        assert largest_difference(rank[way]["weights"], expected) <= 1e-6
    epochs = np.split(np.array(losses), EPOCHS)
    assert found[0][way]["logged"] == pytest.approx([epoch.mean() for epoch in epochs], abs=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_hold_the_same_bits(ranks, way):
    assert ranks[0][way]["weights"] == ranks[1][way]["weights"]


@pytest.mark.parametrize("way", WAYS)
def test_alone_with_the_joint_batch_is_the_same_training(ranks, alone, way):
    assert largest_difference(alone[0][way]["weights"], ranks[0][way]["weights"]) <= 1e-6
    assert steps_of_all(alone, way) == steps_of_all(ranks, way)


def test_rank_0_saves_and_others_add_their_generators_only(ranks, folder):
    saved = [
        {file.name for file in (folder / f"saved by {rank}" / "checkpoint-4").iterdir()} for rank in range(2)
    ]

    assert [rank["plain"]["should_save"] for rank in ranks] == [True, False]
    assert {"model.safetensors", "optimizer.pt", "trainer_state.json", "rng_state_0.pth"} <= saved[0]
    assert saved[1] == {"rng_state_1.pth"}


def test_a_checkpoint_of_trainer_resumes_in_mid_epoch(ranks):
    for rank in ranks:
        assert rank["resumed"]["steps"] == rank["plain"]["steps"]
        assert len(rank["resumed"]["seen"]) < len(rank["plain"]["seen"])
        assert rank["resumed"]["weights"] == rank["plain"]["weights"]


@pytest.mark.parametrize("kind", ["sequences", pytest.param("tokens", marks=pytest.mark.campaign)])
def test_a_model_that_ignores_the_number_of_items_trains_what_one_process_trains(tmp_path, kind):
    """BERT accepts ``num_items_in_batch``, and returns a mean over the labels of its batch."""

    def trained(num_ranks, batch_size, accumulation):
        job = write_job(
            tmp_path / f"{num_ranks}.yaml",
            framework="transformers",
            task=f"{PROGRAMS / 'bert.py'}:Bert",
            task_args={"kind": kind},
            run_dir=str(tmp_path / f"runs-{num_ranks}"),
            train={"epochs": 2, "batch_size_per_rank": batch_size, "accumulation_steps": accumulation},
            lr={"base_lr": 0.1, "scaling": "none"},
            launch={"num_ranks": num_ranks, "threads_per_rank": 1},
        )
        cli("run", str(job), cwd=tmp_path)
        path = list_checkpoints(tmp_path / f"runs-{num_ranks}" / "test" / "checkpoints")[0].path
        return dict(sorted(load_file(path / "model.safetensors").items()))

    alone, together = trained(1, 8, 1), trained(2, 2, 2)

    assert largest_difference(together.values(), alone.values()) <= 1e-6
