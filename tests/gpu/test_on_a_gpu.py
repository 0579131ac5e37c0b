"""What only a GPU shows. Skipped where there is none; docs/verified.md says where it was run."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from time import perf_counter

import pytest
import torch
from support.deferred import ADAMW, NUM_STEPS, SGD, WAYS, Task, assert_equal, everything, planned, replica_of
from support.launching import cli
from torch import nn

from horovod_train.checkpoint.store import list_checkpoints, read_checkpoint
from horovod_train.collectives.base import SingleRank
from horovod_train.config.schema import Data, Job
from horovod_train.data.shard import MicroBatch, PlannedStep, share_of_step
from horovod_train.errors import DeviceMemoryError
from horovod_train.frameworks.base import explained_by
from horovod_train.frameworks.torch.device import TorchBased
from horovod_train.frameworks.torch.framework import optimizer_of
from horovod_train.frameworks.torch.step.graphs import CudaRecorder
from horovod_train.frameworks.torch.step.replica import TorchReplica
from horovod_train.frameworks.torch.strategies.allreduce.strategy import SingleRankStrategy
from horovod_train.frameworks.torch.task import Placement, TorchReader

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
GPU = torch.device("cuda")
ALONE = SingleRank()


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def made(lag_steps, *, way="plain", optimizer=SGD, graph=False, task=None):
    recorder = CudaRecorder() if graph else None
    replica = replica_of(ALONE, lag_steps, optimizer=optimizer, task=task, device=GPU, **WAYS[way])
    if recorder is not None:
        replica.record_steps(recorder, only_if_faster=False)
    return replica


def step_of(number):
    step = planned(ALONE, number % 6)
    return PlannedStep(step.share, (batch.to(GPU) for _, batch in step))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_no_step_synchronizes(way, graph):
    """D6: the host used to wait for the GPU twice in each."""
    replica = made(2, way=way, graph=graph)
    steps = [step_of(number) for number in range(4 * NUM_STEPS)]
    batches = [PlannedStep(step.share, iter([b for _, b in step])) for step in steps]
    for number, step in enumerate(batches):
        is_warm = number > 2 * NUM_STEPS  # recording a graph synchronizes
        torch.cuda.set_sync_debug_mode("error" if is_warm else "default")
        try:
            replica.step(step, 0.1, want_norm=number % 2 == 0)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=lambda o: o[0])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_what_the_device_decides_is_what_the_host_decides(way, optimizer, graph):
    states = []
    for lag_steps, with_graph in ((0, False), (2, graph)):
        replica = made(lag_steps, way=way, optimizer=optimizer, graph=with_graph)
        # A rate that graphs, which read it in 32 bits, know exactly.
        readings = [replica.step(step_of(n), 0.125, want_norm=True) for n in range(2 * NUM_STEPS)]
        states.append((everything(replica), [r.outcome().loss for r in readings]))

    assert_equal(states[1][0], states[0][0])
    assert states[1][1] == states[0][1]


@pytest.mark.parametrize("mode", ["stop", "skip"])
def test_a_bad_step_is_left_out(mode):
    replica = replica_of(ALONE, 2, task=Task((3, 0)), device=GPU, health={"non_finite": mode})
    readings = [replica.step(step_of(n), 0.1, want_norm=True) for n in range(NUM_STEPS)]

    used = [reading.is_finite for reading in readings]
    assert used == [True, True, False, *([mode == "skip"] * (NUM_STEPS - 3))]
    assert replica.is_finite()


class Matrices(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize(("width", "depth", "rows"), [(4096, 6, 4096), (64, 40, 16)], ids=["GPU", "launches"])
def test_phases_are_the_time_that_steps_take(width, depth, rows):
    """D8: they were false by up to 60 %. A model that the GPU limits, and one that the host does."""
    job = Job.model_validate({"name": "phases", "task": "own:Task", "optimizer": {"name": "adamw"}})
    model = Matrices(width, depth).to(GPU)
    made = optimizer_of(job, Task(), model, 1)
    strategy = SingleRankStrategy()
    strategy.bind(model, made)
    replica = TorchReplica(
        model=model,
        optimizer=made,
        strategy=strategy,
        data_ranks=ALONE,
        train=job.train,
        task=Task(),
    )
    batch = torch.randn(rows, width, device=GPU)
    share = share_of_step(0, rows, batch_size=rows, accumulation_steps=1, rank=0, size=1)
    clocks = []

    def steps(count):
        readings = [
            replica.step(PlannedStep(share, iter([batch])), 1e-6, want_norm=False) for _ in range(count)
        ]
        torch.cuda.synchronize()
        clocks[:] = [reading.outcome().clock for reading in readings]

    steps(10)
    started = perf_counter()
    steps(50)
    wall_s = (perf_counter() - started) / 50

    typical_s = statistics.median(clock.total_s for clock in clocks)
    assert typical_s == pytest.approx(wall_s, rel=0.05)
    for clock in clocks:
        assert sum(clock.seconds.values()) == pytest.approx(clock.total_s, rel=0.05)
        assert clock.seconds["allreduce_wait"] < 0.05 * clock.total_s


def test_data_that_is_there_already_is_read():
    """D14."""
    reader = TorchReader(torch.arange(8.0, device=GPU), Data(), 0, Placement(GPU))
    (batch,) = reader.read(0, torch.arange(8).numpy(), [MicroBatch(0, 4, 1.0)])

    assert batch.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_out_of_memory_is_told_with_what_to_change():
    job = Job.model_validate({"name": "large", "task": "own:Task", "train": {"batch_size_per_rank": 64}})

    with pytest.raises(DeviceMemoryError) as told, explained_by(TorchBased(), job, 0):
        torch.empty(2**50, device=GPU)

    assert "rank 0's GPU is out of memory" in told.value.message
    assert "train.batch_size_per_rank: 32" in told.value.hint


def test_the_optimizer_is_fused_by_itself():
    job = Job.model_validate({"name": "j", "task": "own:Task", "optimizer": {"name": "adamw"}})

    assert optimizer_of(job, Task(), nn.Linear(2, 2).to(GPU), 1).param_groups[0]["fused"]


@pytest.mark.ranks
def test_the_engine_sums_through_nccl(tmp_path):
    """D13: all was well where NCCL could not start."""
    assert "all-reduce through NCCL works" in cli("engine", "check", cwd=tmp_path).stdout


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_two_ranks_on_one_gpu_sum_every_type(tmp_path, dtype):
    program = Path(__file__).parent / "sums.py"
    job = tmp_path / "sums.json"
    cli("run", "--script", str(program), "-n", "2", "--", dtype, str(job), cwd=tmp_path)

    assert json.loads(job.read_text()) == [3.0, 3.0]


@pytest.mark.ranks
def test_two_ranks_train_on_one_gpu_as_one(tmp_path):
    """D5: `make train` failed on a machine with one GPU."""
    fields = ["train.epochs=2", "train.device=cuda", "checkpoint.resume=never"]
    settings = [part for field in fields for part in ("--set", field)]
    done = cli("run", "digits", *settings, cwd=tmp_path)

    assert "share one GPU" in done.stdout or torch.cuda.device_count() > 1
    assert "accuracy" in done.stdout


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_steps_by_graphs_train_what_others_train(tmp_path, num_ranks):
    """Graphs are on a stream of their own, which has to wait for NCCL's sums."""
    losses = []
    for graph in ("false", "true"):
        folder = tmp_path / graph
        folder.mkdir()
        fields = [
            "train.device=cuda", f"train.cuda_graph={graph}", f"launch.num_ranks={num_ranks}",
            "train.epochs=2", "lr.base_lr=0.0625",
        ]  # fmt: skip
        cli("run", "digits", *(part for field in fields for part in ("--set", field)), cwd=folder)
        events = next((folder / "runs" / "digits").rglob("events.jsonl")).read_text().splitlines()
        losses.append([e["loss"] for e in map(json.loads, events) if e["kind"] == "progress"][-1])

    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.ranks
@pytest.mark.parametrize("graph", ["false", "true"])
def test_a_run_is_resumed_bit_for_bit(tmp_path, graph):
    fields = [
        "--set", "train.device=cuda", "--set", "train.deterministic=true", "--set", "launch.num_ranks=1",
        "--set", "checkpoint.every=7 steps", "--set", f"train.cuda_graph={graph}",
    ]  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, limits in ((whole, [30]), (parts, [11, 30])):
        folder.mkdir()
        for limit in limits:
            cli("run", "digits", *fields, "--set", f"train.max_steps={limit}", cwd=folder)

    def weights(folder):
        newest = list_checkpoints(folder / "runs" / "digits" / "checkpoints")[0]
        model = read_checkpoint(newest.path).arrays["model"]
        return newest.step, {name: bytes(blob.data) for name, blob in model.items()}

    assert weights(parts) == weights(whole)
