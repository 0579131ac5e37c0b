"""Every framework, on ranks with batch b, trains like one process with the joint batch."""

from __future__ import annotations

import shutil
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from frameworks.cases import (
    BEFORE,
    EPOCHS,
    EVALUATED_WITHIN,
    NOT_A_NUMBER,
    OVERFLOW,
    OVERFLOWING,
    STOPPED_WITHIN,
    cases_of,
    refusal,
)
from frameworks.net import BATCH_SIZE, NUM_EVAL_SAMPLES, NUM_SAMPLES, Samples, start_weights
from safetensors.numpy import load_file
from support.checkpoints import arrays, newest
from support.files import in_files
from support.joint import largest_difference, train_jointly
from support.launching import PROGRAMS, cli, name_of, results, write_job
from support.matrix import COLUMNS, WEIGHTS
from support.once import once
from support.pools import CONTROLLERS

from horovod_train.checkpoint.store import list_checkpoints, read_manifest

WORLDS = [(3, "mpi"), (2, "gloo"), (2, "mpi"), (3, "gloo")]
# A third rank of those that take long to import is for campaigns; so are pools that no other test uses.
AT_HOME = {
    "torch": (3, "gloo"),
    "tensorflow": (2, "mpi"),
    "keras on tensorflow": (2, "gloo"),
    "keras on torch": (2, "mpi"),
    "keras on jax": (2, "gloo"),
    "jax": (2, "mpi"),
    "lightning": (2, "mpi"),
    "transformers": (2, "gloo"),
    "mxnet": (2, "mpi"),
}


def on_worlds(frameworks):
    """Each framework in all worlds; `make test` takes one of them, `make campaign` the others."""
    for *case, framework in frameworks:
        for world in WORLDS:
            name = "-".join([framework, *(c.name for c in case), f"{world[0]} ranks {world[1]}"])
            marks = () if world == AT_HOME[framework] else pytest.mark.campaign
            yield pytest.param(framework, *case, world, id=name, marks=marks)


WAYS = [(case, framework) for framework in COLUMNS for case in cases_of(name_of(framework))]
in_all_ways = pytest.mark.parametrize(("framework", "case", "world"), list(on_worlds(WAYS)))
in_frameworks = pytest.mark.parametrize(("framework", "world"), list(on_worlds([(f,) for f in COLUMNS])))
pytestmark = pytest.mark.ranks
VERSION_BEFORE = Path(__file__).parent.parent / "data" / "version_before" / "frameworks"


@pytest.fixture(scope="module")
def train(pools, tmp_path_factory):
    """What each rank has found, by rank: all cases of a framework are trained in one launch."""

    @once
    def launch(world, framework):
        num_ranks, controller = world
        name = name_of(framework)
        folder = tmp_path_factory.mktemp("trained")
        shutil.copytree(VERSION_BEFORE / framework.replace(" ", "-"), folder / "checkpoints")
        pool = pools.get(framework, num_ranks, controller)
        pool.run("train_cases.py", name, str(folder), folder=folder)
        found = results(folder)
        assert len(found) == num_ranks
        return found

    return launch


def says_why_not(found, case, framework):
    """Whether a way to train is refused, and if so, that the reason is the one that was expected."""
    reason = refusal(case, name_of(framework))
    assert all(reason in rank[case.name]["refused"] for rank in found)
    assert bool(reason) == bool(found[0][case.name]["refused"])
    return f"no: {reason}" if reason else ""


@in_all_ways
def test_weights_are_those_of_one_process_with_the_joint_batch(train, world, framework, case, matrix):
    found = train(world, framework)
    if not case.penalty:
        matrix(WEIGHTS.format(case.name), framework, says_why_not(found, case, framework) or "yes")
    if found[0][case.name]["refused"]:
        return
    expected, _ = train_jointly(case, len(found), framework=name_of(framework))

    mine = found[0][case.name]

    assert not mine["error"]
    assert largest_difference(mine["weights"], expected.values()) <= case.tolerance
    assert largest_difference(mine["weights"], start_weights().values()) > 10 * case.tolerance


@in_frameworks
def test_all_ranks_hold_the_same_bits(train, world, framework, matrix):
    matrix("bitwise identical weights on all ranks", framework)
    found = train(world, framework)
    trained = [case for case in found[0] if not found[0][case]["refused"]]

    assert len(trained) >= 5
    for case in trained:
        first = found[0][case]["fingerprints"]
        assert first
        assert all(rank[case]["fingerprints"] == first for rank in found), case


@in_frameworks
def test_evaluation_is_exact(train, world, framework, matrix):
    matrix("exact evaluation", framework)
    found = train(world, framework)
    for case in cases_of(name_of(framework)):
        if says_why_not(found, case, framework):
            continue
        _, expected = train_jointly(case, len(found), framework=name_of(framework))

        for rank in found:
            metrics = rank[case.name]["metrics"]
            assert metrics == found[0][case.name]["metrics"]
            if case.precision == "fp32":
                assert metrics["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-7)
                assert metrics["loss"] == pytest.approx(expected["loss"], abs=2e-6)


@in_frameworks
def test_evaluates_within_epochs(train, world, framework, matrix):
    """The weights of this case, too, are those of one process."""
    matrix("evaluations every few steps", framework)
    found = train(world, framework)
    own = found[0][EVALUATED_WITHIN.name]
    last = own["steps"]

    steps = [step for step, _ in own["evaluations"]]
    assert steps == sorted({*range(2, last + 1, 2), last})
    assert all(rank[EVALUATED_WITHIN.name]["evaluations"] == own["evaluations"] for rank in found)
    assert own["evaluations"][-1][1] == own["metrics"]
    losses = [metrics["loss"] for _, metrics in own["evaluations"]]
    assert len(set(losses)) == len(losses)


@in_frameworks
def test_stops_within_an_epoch(train, world, framework):
    """The second evaluation is not better than the first."""
    for rank in train(world, framework):
        assert not rank[STOPPED_WITHIN.name]["error"]
        assert rank[STOPPED_WITHIN.name]["steps"] == 4


@in_frameworks
def test_an_overflow_on_one_rank_skips_that_step_on_all(train, world, framework, matrix):
    found = train(world, framework)
    row = "an overflow on one rank: all ranks skip the step"
    matrix(row, framework, says_why_not(found, OVERFLOW, framework) or "yes")
    if found[0][OVERFLOW.name]["refused"]:
        return
    expected, _ = train_jointly(
        OVERFLOW, len(found), framework=name_of(framework), huge=OVERFLOWING, skipped=[0]
    )

    for rank in found:
        assert not rank[OVERFLOW.name]["error"]
        assert largest_difference(rank[OVERFLOW.name]["weights"], expected.values()) <= OVERFLOW.tolerance


@in_frameworks
def test_a_loss_that_is_not_a_number_on_one_rank_ends_all_with_its_name(train, world, framework, matrix):
    matrix("NaN on one rank: all ranks stop and report it", framework)
    found = train(world, framework)
    for case in NOT_A_NUMBER:
        if not says_why_not(found, case, framework):
            for rank in found:
                assert "step 1: the loss is nan because of rank 1" in rank[case.name]["error"]


def batches_of(num_ranks):
    """Return the numbers of the samples of each step of an epoch."""
    global_batch = BATCH_SIZE * num_ranks
    return np.split(np.arange(NUM_SAMPLES), range(global_batch, NUM_SAMPLES, global_batch))


@in_frameworks
def test_a_checkpoint_of_the_version_before_is_resumed(train, world, framework):
    """It had trained an epoch on one rank; the others are trained here, with the state of its optimizer."""
    found = train(world, framework)
    batches = [batches_of(1), *[batches_of(len(found))] * (EPOCHS - 1)]
    expected, _ = train_jointly(BEFORE, 1, framework=name_of(framework), batches=batches)

    for rank in found:
        mine = rank["version before"]
        assert not mine["error"]
        assert mine["steps"] == len(list(chain(*batches)))
        assert largest_difference(mine["weights"], expected.values()) <= BEFORE.tolerance


@pytest.mark.parametrize(
    ("framework", "task"),
    [
        ("torch", "OfTorch"),
        ("transformers", "OfTransformers"),
        ("lightning", "OfLightning"),
        pytest.param("keras on torch", "OfKeras", marks=pytest.mark.campaign),
        pytest.param("keras on tensorflow", "OfKeras", marks=pytest.mark.campaign),
    ],
)
def test_evaluations_do_not_change_what_is_trained(tmp_path, framework, task):
    """Also if a job is stopped between two of them, and resumed."""

    def weights(name, *starts, every):
        for number, train in enumerate(starts):
            job = write_job(
                tmp_path / f"{name}-{number}.yaml",
                name=name,
                framework=name_of(framework),
                task=f"{PROGRAMS / 'dropout_tasks.py'}:{task}",
                run_dir=str(tmp_path / "runs"),
                train={"epochs": 2, "batch_size_per_rank": 8, **train},
                lr={"base_lr": 0.1, "scaling": "none"},
                evaluation={"every": every},
                launch={"num_ranks": 1, "threads_per_rank": 1},
            )
            cli("run", str(job), cwd=tmp_path, KERAS_BACKEND=framework.rpartition(" ")[2])
        path = list_checkpoints(tmp_path / "runs" / name / "checkpoints")[0].path
        return [array.tolist() for array in load_file(path / "model.safetensors").values()]

    expected = weights("undisturbed", {}, every=2)

    assert weights("stopped", {"stop_at_step": 3}, {}, every="2 steps") == expected


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(each, marks=[] if each in ("jax", "lightning") else pytest.mark.campaign)
        for each in CONTROLLERS
    ],
)
def test_every_framework_trains_with_files_as_with_arrays(run, tmp_path, pools):
    for name, data in (("train", Samples(50, 1)), ("eval", Samples(NUM_EVAL_SAMPLES, 2))):
        in_files(tmp_path, name, data, (0, 20, 20, len(data)))
    framework = name_of(run)
    decode = "frameworks.net:" + ("dictionary" if framework == "transformers" else "pair")
    files = {
        "source": "arrays",
        "files": "train-*.safetensors",
        "eval": {"files": "eval-*.safetensors"},
        "decode": decode,
    }
    found = {}
    for name, data in (("arrays", {}), ("files", {**files, "cache": {"dir": str(tmp_path / "cache")}})):
        job = write_job(
            tmp_path / f"{name}.yaml",
            name=name,
            framework=framework,
            task=f"frameworks.{framework}_task:Task",
            run_dir=str(tmp_path / "runs"),
            train={"epochs": 2, "batch_size_per_rank": 4},
            lr={"base_lr": 0.01, "scaling": "none"},
            data={"shuffle": False, **data},
            launch={"num_ranks": 2, "controller": CONTROLLERS[run]},
        )
        pools.get(run, 2, CONTROLLERS[run]).run("run_job.py", str(job), folder=tmp_path)
        path = newest(tmp_path, name)
        found[name] = arrays(path), read_manifest(path).summary["metrics"]

    assert found["files"] == found["arrays"]
    assert found["files"][1]
