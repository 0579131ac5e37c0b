"""Under each strategy: killed and resumed is the same as never killed, and on other ranks the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from programs.strategy_cases import (
    ADAMW,
    ADASUM,
    ALLREDUCE,
    DDP,
    DEEPSPEED,
    FSDP,
    PIPELINE,
    PLAN,
    SERVER,
    SHARDED_TENSOR,
    TENSOR_PAIRS,
    ZERO,
    Task,
    Way,
    num_data,
)
from programs.strategy_references import joint_batch
from safetensors.numpy import load_file
from support.launching import PROGRAMS, cli, write_job

from horovod_train.checkpoint.store import list_checkpoints, read_manifest

pytestmark = [pytest.mark.ranks, pytest.mark.campaign]
TENSOR = {"name": "tensor_parallel", "args": {"plan": PLAN}}
LOCAL = {"name": "local_sgd", "args": {"every_steps": 2, "outer": {}}}
STRATEGIES = [ADASUM, DDP, *DEEPSPEED, FSDP, LOCAL, PIPELINE, SHARDED_TENSOR, TENSOR, ZERO]


def job(folder, name, strategy, kill="", controller="mpi", ranks=2, **more):
    return write_job(
        folder / f"{name}.yaml",
        name=name,
        task=f"{PROGRAMS / 'strategy_cases.py'}:KilledTask",
        task_args={"kill": kill},
        run_dir=str(folder / "runs"),
        train={"epochs": 3, "batch_size_per_rank": 2, "accumulation_steps": 2, **more},
        optimizer={"name": "adamw", "args": {"weight_decay": 0.1}},
        lr={"base_lr": 0.01, "reference_batch_size": 8, "warmup": 1, "decay": "cosine"},
        checkpoint={"every": "2 steps", "keep_last": 100},
        strategy=strategy,
        launch={"num_ranks": ranks, "controller": controller},
    )


def newest(folder, name):
    return read_manifest(list_checkpoints(folder / "runs" / name / "checkpoints")[0].path).step


def exported(folder, name):
    cli("checkpoint", "export", str(folder / "runs" / name), str(folder / f"{name}.safetensors"), cwd=folder)
    return load_file(folder / f"{name}.safetensors")


@pytest.mark.parametrize(
    ("controller", "strategy"),
    [
        pytest.param(
            controller,
            strategy,
            id=f"{strategy['name']}{strategy.get('args', {}).get('stage', '')} over {controller}",
        )
        for controller in ("mpi", "gloo")
        for strategy in STRATEGIES
        if (controller, strategy) != ("gloo", ADASUM)
    ],
)
def test_killed_and_resumed_is_bit_for_bit_the_undisturbed_run(tmp_path, controller, strategy):
    cli("run", str(job(tmp_path, "whole", strategy, controller=controller)), cwd=tmp_path)
    killed = job(tmp_path, "killed", strategy, kill="1:9", controller=controller)
    stopped = cli("run", str(killed), cwd=tmp_path, check=False)
    at_kill = newest(tmp_path, "killed")
    resumed = job(tmp_path, "killed", strategy, controller=controller)

    done = cli("run", str(resumed), cwd=tmp_path)

    assert stopped.returncode == 1
    assert "signal 9" in stopped.stdout + stopped.stderr
    assert f"resumed from step-{at_kill:012d}" in done.stdout
    whole, again = exported(tmp_path, "whole"), exported(tmp_path, "killed")
    assert whole.keys() == again.keys()
    assert all((whole[name] == again[name]).all() for name in whole)


@pytest.mark.parametrize(
    ("task", "strategies"),
    [
        ("Task", (ALLREDUCE, FSDP, ZERO, TENSOR_PAIRS)),
        ("Task", (TENSOR, PIPELINE, FSDP, SHARDED_TENSOR)),
        ("Task", (ZERO, TENSOR_PAIRS, PIPELINE, ALLREDUCE)),
        ("FloatTask", (DEEPSPEED[2], ZERO, DEEPSPEED[1], FSDP)),
        ("FloatTask", (FSDP, DEEPSPEED[2], DEEPSPEED[2], DEEPSPEED[0])),
    ],
    ids=lambda given: given if isinstance(given, str) else ", ".join(strategy["name"] for strategy in given),
)
def test_on_4_then_2_then_3_then_4_ranks_it_is_the_same_model_under_any_strategy(tmp_path, task, strategies):
    """At a constant global batch of 12."""
    for ranks, max_steps, strategy in zip((4, 2, 3, 4), (1, 2, 3, 4), strategies, strict=True):
        together = 12 // num_data(strategy, ranks)
        path = write_job(
            tmp_path / f"{max_steps}.yaml",
            name="chain",
            task=f"{PROGRAMS / 'strategy_cases.py'}:{task}",
            run_dir=str(tmp_path / "runs"),
            train={"epochs": 2, "max_steps": max_steps, "batch_size_per_rank": together},
            optimizer={"name": "adamw", "args": ADAMW["args"]},
            lr={"base_lr": ADAMW["lr"], "scaling": "none"},
            data={"shuffle": False},
            strategy=strategy,
            launch={"num_ranks": ranks},
        )
        done = cli("run", str(path), cwd=tmp_path)
        assert (f"resumed from step-{max_steps - 1:012d}" in done.stdout) == (max_steps > 1)

    way = Way("12", ALLREDUCE, accumulation=6, task=task, **ADAMW)
    weights, _ = joint_batch(way, 1)
    names = [name for name, _ in Task().model().named_parameters()]
    found = exported(tmp_path, "chain")
    together = torch.cat([torch.from_numpy(found[name]).flatten() for name in names])
    assert float((together - weights).abs().max()) <= way.tolerance


def test_parameter_servers_go_on(tmp_path):
    """No two runs are alike; but one that was killed learns as one that was not."""
    cli("run", str(job(tmp_path, "whole", SERVER)), cwd=tmp_path)
    cli("run", str(job(tmp_path, "killed", SERVER, kill="1:9")), cwd=tmp_path, check=False)
    done = cli("run", str(job(tmp_path, "killed", SERVER)), cwd=tmp_path)

    assert "resumed from" in done.stdout
    whole, again = exported(tmp_path, "whole"), exported(tmp_path, "killed")
    moved = max(float(abs(whole[name] - again[name]).max()) for name in whole)
    assert moved < 0.1


@pytest.mark.skipif(not Path("/usr/include/libaio.h").exists(), reason="needs libaio's headers (libaio-dev)")
def test_state_on_a_disk_is_resumed_as_state_in_memory(tmp_path):
    """The first time DeepSpeed compiles what reads and writes, which takes minutes."""
    on_disk = {"offload_optimizer": "nvme", "nvme_path": str(tmp_path / "nvme")}
    for name, args, steps in (("memory", {}, [6]), ("disk", on_disk, [3, 6])):
        for max_steps in steps:
            path = write_job(
                tmp_path / "job.yaml",
                name=name,
                task="gpt",
                task_args={"layers": 4, "width": 256, "head_width": 32, "length": 32, "num_samples": 64},
                run_dir=str(tmp_path / "runs"),
                train={"epochs": 1, "batch_size_per_rank": 4, "max_steps": max_steps},
                optimizer={"name": "adamw"},
                strategy={"name": "deepspeed", "args": args},
                launch={"num_ranks": 2},
            )
            cli("run", str(path), cwd=tmp_path)

    in_memory, on_disk_too = exported(tmp_path, "memory"), exported(tmp_path, "disk")
    assert list((tmp_path / "nvme").rglob("exp_avg-*"))
    assert all((in_memory[name] == on_disk_too[name]).all() for name in in_memory)
