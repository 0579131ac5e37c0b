"""Adasum on ranks that are threads: weights are those of the same algorithm, written down once more."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from programs.cases import BATCH_SIZE, NUM_SAMPLES, Case, data
from programs.strategy_references import joined_by_adasum, shares_of_step
from support.reference import FACTORIES
from support.torch_threads import Task, on_torch_ranks, run_of, weights_of
from support.training import Told, manager_of
from support.worlds import on_ranks
from torch import nn
from torch.nn.utils import clip_grad_norm_

from horovod_train.collectives.base import Mesh, SingleRank
from horovod_train.config.arguments import batch_size_of_lr
from horovod_train.config.schema import Job
from horovod_train.errors import NumericError, UserError
from horovod_train.plugins.adasum.strategy import Adasum
from horovod_train.training.hooks.base import Hook
from horovod_train.training.hooks.checks import CheckReplicasIdentical
from horovod_train.training.hooks.saving import SaveCheckpoints
from horovod_train.training.loop import train
from horovod_train.worker import resume

TASK = "support.torch_threads:Task"
pytestmark = pytest.mark.usefixtures("one_thread")
ADAMW = {"optimizer": "adamw", "optimizer_args": {"weight_decay": 0.05}, "lr": 2e-3}
MOMENTUM = {"optimizer_args": {"momentum": 0.9}}


def fields_of(case, **more):
    return {**case.job(TASK), "strategy": {"name": "adasum"}, **more}


def written_down_once_more(case, size):
    """Return the weights: a loop over models of all ranks, with an optimizer each."""
    models = [Task(**case.task_args).model() for _ in range(size)]
    optimizers = [
        FACTORIES[case.optimizer](m.parameters(), lr=case.lr, **case.optimizer_args) for m in models
    ]
    inputs, labels = data(NUM_SAMPLES, 1)
    batch = BATCH_SIZE * case.accumulation
    for _ in range(case.epochs):
        for start in range(0, NUM_SAMPLES, batch * size):
            step = torch.arange(start, min(start + batch * size, NUM_SAMPLES))
            before = copy.deepcopy(models[0])
            for model, optimizer, mine in zip(
                models, optimizers, shares_of_step(step, size, batch), strict=True
            ):
                optimizer.zero_grad()
                if not len(mine):
                    continue
                Task(**case.task_args).loss(model, (inputs[mine], labels[mine])).backward()
                if case.clip is not None:
                    clip_grad_norm_(model.parameters(), case.clip)
                optimizer.step()
            with torch.no_grad():
                for old, *new in zip(before.parameters(), *(m.parameters() for m in models), strict=True):
                    changes = [(p - old).double().flatten().numpy() for p in new]
                    change = torch.from_numpy(joined_by_adasum(changes)).view(old.shape)
                    for p in new:
                        p.copy_(old + change)
    return weights_of(models[0])


def trained(case, size, *hooks):
    Task(**case.task_args).model()

    def rank(world):
        _, run = run_of(world, fields_of(case))
        run.hooks = [CheckReplicasIdentical(), *hooks]
        train(run)
        state = run.replica.optimizer.state_dict()["state"]
        momenta = [t.double().flatten() for entry in state.values() for t in entry.values() if t is not None]
        return weights_of(run.replica.model), torch.cat(momenta) if momenta else None

    return on_torch_ranks(size, rank)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "case",
    [
        Case("momentum", **MOMENTUM),
        Case("adamw", **ADAMW),
        Case("clipped", clip=0.3),
        Case("accumulated", accumulation=3, task_args={"partly_used": True}),
    ],
    ids=lambda case: case.name,
)
def test_ranks_train_as_the_algorithm_says(case, size):
    expected = written_down_once_more(case, size)

    for weights, _ in trained(case, size):
        assert float((weights - expected).abs().max()) <= 2e-6


def test_optimizers_keep_the_state_of_their_own_gradients():
    (first, one), (second, other) = trained(Case("momentum", **MOMENTUM), 2)

    assert torch.equal(first, second)
    assert float((one - other).abs().max()) > 1e-3


def test_what_points_elsewhere_is_added_and_what_is_the_same_is_averaged():
    a, b = np.array([1.0, 0.0]), np.array([0.0, 2.0])

    assert joined_by_adasum([a, b]).tolist() == [1.0, 2.0]
    assert joined_by_adasum([a, a]).tolist() == [1.0, 0.0]


class TestResume:
    def test_is_exact(self, tmp_path):
        case = Case("adamw", epochs=2, **ADAMW)

        class Fall(Hook):
            def on_step(self, run):
                if run.progress.step == 6:
                    raise RuntimeError("killed")

        def rank(world, *, falls):
            framework, run = run_of(
                world, fields_of(case), checkpoint={"every": [1, "4 steps"], "background": False}
            )
            manager = manager_of(tmp_path, run)
            try:
                resume(run, manager, framework, Told().reporter)
                begun = run.progress.step
                run.hooks = [SaveCheckpoints(manager, framework), *([Fall()] if falls else [])]
                train(run)
            finally:
                manager.close()
            return begun, weights_of(run.replica.model)

        Task().model()
        undisturbed = trained(case, 2)
        on_torch_ranks(2, lambda world: rank(world, falls=True))

        for begun, weights in on_torch_ranks(2, lambda world: rank(world, falls=False)):
            assert begun == 4
            assert torch.equal(weights, undisturbed[0][0])

    def test_on_more_ranks_goes_on_from_the_first_ones_optimizer(self, tmp_path):
        case = Case("momentum", epochs=2, **MOMENTUM)

        def rank(world, *, epochs):
            framework, run = run_of(
                world,
                fields_of(case, train={**case.job(TASK)["train"], "epochs": epochs}),
                checkpoint={"background": False},
            )
            manager = manager_of(tmp_path, run)
            try:
                resume(run, manager, framework, Told().reporter)
                begun = [
                    entry["momentum_buffer"].clone()
                    for entry in run.replica.optimizer.state_dict()["state"].values()
                ]
                run.hooks = [SaveCheckpoints(manager, framework)]
                train(run)
            finally:
                manager.close()
            end = [e["momentum_buffer"] for e in run.replica.optimizer.state_dict()["state"].values()]
            return begun, end

        Task().model()
        (_, first), (_, second) = on_torch_ranks(2, lambda world: rank(world, epochs=1))
        found = on_torch_ranks(4, lambda world: rank(world, epochs=2))

        for (begun, _), expected in zip(found, [first, second, first, first], strict=True):
            assert all(torch.equal(one, other) for one, other in zip(begun, expected, strict=True))


def test_a_step_that_is_not_finite_on_one_rank_is_left_out_on_all():
    def rank(world, mode):
        _, run = run_of(world, fields_of(Case("sgd", epochs=1)), health={"non_finite": mode})
        seen = []
        loss = run.replica.task.loss

        def poisoned(model, batch):
            seen.append(weights_of(model))
            found = loss(model, batch)
            return found * float("nan") if world.rank == 1 and len(seen) == 2 else found

        run.replica.task.loss = poisoned
        train(run)
        return seen

    for seen in on_torch_ranks(2, lambda world: rank(world, "skip")):
        assert torch.equal(seen[1], seen[2])
        assert not torch.equal(seen[2], seen[3])
    for error in on_torch_ranks(2, lambda world: rank(world, "stop")):
        assert isinstance(error, NumericError)


class TestWhatItRefuses:
    JOB = Job(name="j", task="digits", strategy={"name": "adasum"})

    def test_is_a_number_of_ranks_that_are_no_pairs_of_pairs(self):
        errors = on_torch_ranks(6, lambda world: Adasum(Mesh.data_parallel(world), self.JOB))

        assert all("must be a power of two, and is 6" in str(error) for error in errors)
        assert all("start 4 or 8 ranks" in str(error.hint) for error in errors)

    def test_is_a_controller_without_it(self, monkeypatch):
        def rank(world):
            world.hvd.mpi_enabled = lambda: False
            Adasum(Mesh.data_parallel(world), self.JOB)

        assert all("only over MPI" in str(error) for error in on_torch_ranks(2, rank))

    def test_is_ranks_that_train_different_parameters(self):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

        def rank(world):
            mine = copy.deepcopy(model)
            mine[world.rank].requires_grad_(requires_grad=False)
            Adasum(Mesh.data_parallel(world), self.JOB).bind(mine, torch.optim.SGD(mine.parameters()))

        for error in on_torch_ranks(2, rank):
            assert isinstance(error, UserError)
            assert "trains" in str(error)


def test_the_learning_rate_follows_the_batch_of_one_rank():
    job = Job(name="j", task="digits", train={"batch_size_per_rank": 8, "accumulation_steps": 2})

    assert batch_size_of_lr(job, 4) == 64
    assert batch_size_of_lr(job.model_copy(update={"strategy": TestWhatItRefuses.JOB.strategy}), 4) == 16


def test_one_rank_alone_trains_as_ever():
    Adasum(Mesh.data_parallel(SingleRank()), TestWhatItRefuses.JOB)
    assert on_ranks(1, lambda world: world.size) == [1]
