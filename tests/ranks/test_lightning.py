"""HorovodStrategy in Lightning's own Trainer, without a job."""

from __future__ import annotations

import subprocess
from itertools import chain

import numpy as np
import pytest
from frameworks.cases import Case
from frameworks.net import BATCH_SIZE
from support.joint import largest_difference, train_jointly
from support.launching import BIN, PROGRAMS, TIMEOUT_S, cli, environment, job_of_kind, results

RANKS, NUM_SAMPLES, EPOCHS = 2, 48, 3
PLAIN = Case("plain", num_samples=NUM_SAMPLES)
ACCUMULATION = Case("accumulation", num_samples=NUM_SAMPLES, accumulation=3, clip=0.3)
SCALED = Case("scaled", num_samples=NUM_SAMPLES, lr={"base_lr": 0.02})
pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module", params=["lightning"])
def ranks(request, folder, pools):
    pools.get(request.param, RANKS, "mpi").run("lightning_ways.py", str(folder), folder=folder)
    return results(folder)


def joint_batches(ranks, way, accumulation=1):
    """Lightning shuffles: the numbers of the samples that all ranks together read in each step."""
    places = [[*first, *second] for first, second in zip(*(rank[way]["seen"] for rank in ranks), strict=True)]
    steps = np.reshape(places, (EPOCHS, -1, accumulation * 2 * BATCH_SIZE))
    return [[list(step) for step in epoch] for epoch in steps]


def difference(ranks, way, case):
    batches = joint_batches(ranks, way, case.accumulation)
    expected, _ = train_jointly(case, RANKS, framework="torch", batches=batches)
    assert ranks[0][way]["weights"] == ranks[1][way]["weights"]
    return largest_difference(ranks[0][way]["weights"], expected.values())


@pytest.mark.parametrize("way", ["by object", "by name"])
def test_the_strategy_trains_like_one_process_with_the_joint_batch(ranks, way):
    assert [rank[way]["strategy"] for rank in ranks] == ["HorovodStrategy"] * RANKS
    assert difference(ranks, way, PLAIN) <= 1e-6


def test_lightning_gives_each_rank_samples_of_its_own(ranks):
    epochs = joint_batches(ranks, "by name")

    assert [sorted(chain(*epoch)) for epoch in epochs] == [list(range(NUM_SAMPLES))] * EPOCHS
    assert epochs[0] != epochs[1]


def test_accumulation_communicates_in_the_last_backward_only(ranks):
    assert difference(ranks, "accumulation, clipping", ACCUMULATION) <= 1e-6
    for rank in ranks:
        found = rank["accumulation, clipping"]
        assert found["steps"] == EPOCHS * NUM_SAMPLES / RANKS / BATCH_SIZE / 3
        assert [bool(count) for count in found["sums_per_batch"]] == [False, False, True] * found["steps"]


def test_mixed_precision_stays_near(ranks):
    assert difference(ranks, "bf16", PLAIN) <= 4e-3


def test_sync_dist_is_the_mean_over_ranks(ranks):
    assert [rank["by object"]["logged"]["rank"] for rank in ranks] == [0.5, 0.5]


def test_rank_0_saves_and_all_resume(ranks, folder):
    assert (folder / "saved by 0" / "epoch-1.ckpt").is_file()
    assert not (folder / "saved by 1").exists()
    assert difference(ranks, "undisturbed", SCALED) <= 1e-6
    for rank in ranks:
        assert len(rank["resumed"]["seen"]) == len(rank["undisturbed"]["seen"]) * 2 / 3
        assert rank["resumed"]["weights"] == rank["undisturbed"]["weights"]
        assert rank["resumed"]["lr"] == pytest.approx(0.02)


def test_a_scaled_rate_is_right_again_when_one_process_resumes(ranks, folder):
    command = [str(BIN / "python"), str(PROGRAMS / "lightning_ways.py"), str(folder)]

    subprocess.run(command, env=environment(), check=True, capture_output=True, timeout=TIMEOUT_S)

    assert results(folder)[0]["resumed"]["lr"] == pytest.approx(0.01)


def job_of(folder, kind):
    return job_of_kind(folder, "lightning", f"{PROGRAMS / 'lightning_late.py'}:Late", kind)


def test_a_module_of_a_job_reads_how_long_it_trains(tmp_path):
    output = cli("run", str(job_of(tmp_path, "plain")), cwd=tmp_path).stdout

    assert "epoch 1 of 2" in output
    assert "checkpoints do not contain" not in output, "Lightning's attributes are no state of the user"


@pytest.mark.parametrize("kind", ["sum", pytest.param("plain", marks=pytest.mark.campaign)])
def test_a_loss_that_is_not_a_mean_over_samples_is_told(tmp_path, kind):
    output = " ".join(cli("run", str(job_of(tmp_path, kind)), cwd=tmp_path).stdout.split())

    assert ("It is not a mean over samples" in output) == (kind == "sum")


def test_layers_that_are_made_after_the_optimizer_are_refused(tmp_path):
    done = cli("run", str(job_of(tmp_path, "late")), cwd=tmp_path, check=False)

    assert done.returncode == 2
    assert "head.weight was made after the optimizer" in done.stdout + done.stderr
