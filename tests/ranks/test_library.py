"""The parts work in a user's own loop, alone and on ranks."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from programs.cases import Case
from support.launching import PROGRAMS, TIMEOUT_S, environment, free_port, mostly, on_horovod, results
from support.reference import joint_batch_weights

EPOCHS = 3


def reference(size):
    case = Case("own", clip=0.5, accumulation=2, task_args={"partly_used": True}, epochs=EPOCHS)
    return joint_batch_weights(case, size)


def check(found, size):
    expected, metrics = reference(size)
    for rank in found:
        weights = torch.tensor(rank["weights"], dtype=torch.float64)
        assert float((weights - expected).abs().max()) <= 1e-6
        assert rank["accuracy"] == metrics["accuracy"]
        assert rank["has_metrics"]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "strategy"),
    [((2, "mpi"), "allreduce"), ((3, "gloo"), "allreduce"), ((2, "mpi"), "zero")],
    ids=["2-mpi", "3-gloo", "2-mpi-zero"],
)
def test_an_own_loop_on_ranks_trains_like_one_process(tmp_path, world, strategy, pools, matrix):
    matrix("usable in a script, without a job", "torch")
    arguments = [str(tmp_path), str(tmp_path / "checkpoints"), str(EPOCHS), str(free_port()), strategy]

    pools.get("torch", *world).run("own_loop.py", *arguments, folder=tmp_path)

    check(results(tmp_path), world[0])


@pytest.mark.ranks
def test_an_own_loop_goes_on_in_mid_epoch(tmp_path, pools):
    arguments = [str(tmp_path), str(tmp_path / "checkpoints"), str(EPOCHS), str(free_port())]
    pool = pools.get("torch", 2, "mpi")

    pool.run("own_loop.py", *arguments, "stop", folder=tmp_path)
    pool.run("own_loop.py", *arguments, folder=tmp_path)

    found = results(tmp_path)
    assert all(rank["resumed"] for rank in found)
    # 50 samples in global batches of 16 are 4 steps an epoch; 6 of 12 were left after the save.
    assert found[0]["steps"] == 4 * EPOCHS - 6
    check(found, 2)


@pytest.mark.ranks
@mostly("gloo")
def test_an_own_loop_saves_and_leaves_when_one_rank_is_asked(tmp_path, controller):
    arguments = [str(tmp_path), str(tmp_path / "checkpoints"), str(EPOCHS), str(free_port())]

    left = on_horovod(2, controller, "own_loop.py", *arguments, "leave", check=False)
    on_horovod(2, controller, "own_loop.py", *arguments)

    found = results(tmp_path)
    assert left.returncode != 0  # horovodrun itself has one code for all failures
    assert all(rank["resumed"] for rank in found)
    check(found, 2)


def test_an_own_loop_in_a_plain_python_process_does_not_need_horovod(tmp_path):
    block = tmp_path / "sitecustomize.py"
    block.write_text("import sys\nsys.modules['horovod'] = None\nsys.modules['mpi4py'] = None\n")
    command = [sys.executable, str(PROGRAMS / "own_loop.py"), str(tmp_path), str(tmp_path / "c"), str(EPOCHS)]

    subprocess.run(
        [*command, str(free_port())], env=environment(PYTHONPATH=str(tmp_path)), check=True, timeout=TIMEOUT_S
    )

    check(results(tmp_path), 1)
