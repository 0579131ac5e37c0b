"""Ranks of several hosts whose collectives are PyTorch's, on the interface that the launch has chosen."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest
from safetensors.numpy import load_file
from support.cluster import NEEDS, cluster
from support.launching import BIN, PROGRAMS, cli, write_job
from support.namespaces import why_not
from support.slurm import slurm_on

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.campaign,
    pytest.mark.skipif(bool(why_not(*NEEDS)), reason=why_not(*NEEDS) or "all is there"),
]


def job(folder, name, strategy, launch, batch_size=2):
    return write_job(
        folder / f"{name}.yaml",
        name=name,
        task=f"{PROGRAMS / 'strategy_cases.py'}:FloatTask",
        run_dir=str(folder / "runs"),
        train={"epochs": 2, "batch_size_per_rank": batch_size},
        optimizer={"name": "sgd", "args": {"momentum": 0.9}},
        lr={"base_lr": 0.1, "scaling": "none"},
        strategy=strategy,
        launch={"num_ranks": 2, **launch},
    )


def exported(folder, name):
    cli("checkpoint", "export", str(folder / "runs" / name), str(folder / f"{name}.safetensors"), cwd=folder)
    return load_file(folder / f"{name}.safetensors")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline", "deepspeed"])
@pytest.mark.parametrize(
    ("launcher", "controller"),
    [*product(("horovodrun", "slurm"), ("mpi", "gloo")), ("mpirun", "mpi")],
)
def test_two_hosts_train_like_one_process(tmp_path, launcher, controller, strategy):
    global_batch = 2 if strategy == "pipeline" else 4  # stages read the same samples
    cli("run", str(job(tmp_path, "alone", "allreduce", {"num_ranks": 1}, global_batch)), cwd=tmp_path)
    (tmp_path / "cluster").mkdir()
    with cluster(tmp_path / "cluster", ("node1", "node2")) as hosts:
        launch = {"launcher": launcher, "controller": controller}
        with slurm_on(hosts) if launcher == "slurm" else nullcontext() as slurm:
            if slurm is None:
                launch |= {"hosts": ["node1:1", "node2:1"], "ssh": hosts.ssh}
            else:
                launch |= {"slurm": {"ranks_per_node": 1}}
            path = job(tmp_path, "hosts", strategy, launch)
            variables = slurm.variables if slurm else {}
            done = hosts.on_login(str(BIN / "horovod-train"), "run", str(path), cwd=tmp_path, env=variables)
        left = hosts.leftovers(within_s=5)

    assert done.returncode == 0, done.stdout + done.stderr
    assert left == []
    one, two = exported(tmp_path, "alone"), exported(tmp_path, "hosts")
    assert max(float(abs(one[name] - two[name]).max()) for name in one) <= 2e-6
