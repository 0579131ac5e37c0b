"""ZeRO: ranks that update a part of the weights each train as one process does, and hold a part each."""

from __future__ import annotations

import copy
from time import sleep

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs.cases import ADAMW, Case
from support.reference import joint_batch_weights
from support.torch_threads import Task, on_torch_ranks, run_of, weights_of
from support.worlds import on_ranks
from torch import nn

from horovod_train.checkpoint.arrays import Entry, Piece, ReplicaState, StoredArrays
from horovod_train.checkpoint.manager import find_holders
from horovod_train.collectives.base import Mesh
from horovod_train.config.rules import broken_rules
from horovod_train.config.schema import Job
from horovod_train.data.shard import share_of_step
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.comm import buckets
from horovod_train.frameworks.torch.comm.collectives import TorchCommunicator
from horovod_train.frameworks.torch.state.optimizer import check_elementwise, check_separable
from horovod_train.frameworks.torch.strategies.zero import strategy as zero_module
from horovod_train.frameworks.torch.strategies.zero.strategy import Zero
from horovod_train.health.comparisons import check_replicas_identical
from horovod_train.registry import OPTIMIZERS
from horovod_train.training.loop import evaluate, train

TASK = "support.torch_threads:Task"
pytestmark = pytest.mark.usefixtures("one_thread")
DOUBLE = {"dtype": "float64"}


def zero(stage=2):
    return {"name": "zero", "args": {"stage": stage}}


CASES = [
    Case(f"{name}, stage {stage}", strategy=zero(stage), tolerance=1e-12, **case)
    for stage in (1, 2)
    for name, case in {
        "sgd momentum": {"task_args": DOUBLE},
        "adamw": {"task_args": DOUBLE, **ADAMW},
        "accumulation": {"task_args": DOUBLE, "accumulation": 3},
        "clipping": {"task_args": DOUBLE, "clip": 0.1, "optimizer_args": {"momentum": 0.9}},
        "all": {"task_args": {**DOUBLE, "partly_used": True}, "accumulation": 2, "clip": 0.2, **ADAMW},
        "one bucket": {"task_args": DOUBLE, "bucket_mib": 8.0},
        "adagrad": {"task_args": DOUBLE, "optimizer": "torch.optim:Adagrad", "optimizer_args": {}},
    }.items()
]


def run_on(case, size, then=lambda world, run: weights_of(run.replica.model), **more):
    Task(**case.task_args).model()

    def rank(world):
        _, run = run_of(world, case.job(TASK), **more)
        return then(world, run)

    return on_torch_ranks(size, rank)


def trained(world, run):
    train(run)
    check_replicas_identical(world, run.replica.state(copy=False), "at the end")
    return weights_of(run.replica.model), evaluate(run)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ranks_train_like_one_process_with_the_joint_batch(case, size):
    weights, metrics = joint_batch_weights(case, size)

    found = run_on(case, size, trained)

    for ours, own_metrics in found:
        assert float((ours - weights).abs().max()) <= case.tolerance
        assert own_metrics["accuracy"] == metrics["accuracy"]


class Wide(Task):
    """A model whose every weight is trained."""

    def model(self):
        return copy.deepcopy(WIDE)


WIDE = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


def held_bytes(world, run):
    """What a rank has of weights, of momenta, and of gradients between steps, in bytes."""
    train(run)
    state = run.replica.state(copy=False)
    gradients = {
        p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes()
        for group in run.replica.optimizer.param_groups
        for p in group["params"]
    }
    return (
        sum(len(blob.data) for blob in state.model.values()),
        sum(len(blob.data) for name, blob in state.optimizer.items() if "exp_avg" in name),
        sum(gradients.values())
        + sum(p.grad.nbytes for p in run.replica.model.parameters() if p.grad is not None),
    )


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_holds_its_part_of_optimizer_state_and_gradients(size):
    case = Case("memory", strategy=zero(), bucket_mib=0.008, **ADAMW)
    task = f"{__name__}:Wide"
    num_bytes = 4 * sum(p.numel() for p in WIDE.parameters())

    found = on_torch_ranks(size, lambda world: held_bytes(world, run_of(world, case.job(task))[1]))

    for weights, momenta, gradients in found:
        assert weights == num_bytes
        assert momenta <= 1.1 * 2 * num_bytes / size
        assert gradients <= 1.1 * num_bytes / size


def under_way(size, order_of=lambda _rank, layers: layers, slowness_s=0.0):
    """The most buckets that had memory at a time on each rank, and what each has received."""
    torch.manual_seed(3)
    model = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(12))

    def rank(world):
        mine = copy.deepcopy(model)
        job = Job(name="j", task="digits", allreduce={"bucket_size_mib": 0.001})
        strategy = Zero(Mesh.data_parallel(world), job)
        strategy.bind(mine, torch.optim.SGD(mine.parameters(), 0.1))
        strategy.begin(None)
        strategy.prepare_backward(is_last=True)
        most = 0
        for layer in order_of(world.rank, list(mine)):
            sleep(slowness_s * world.rank)
            (layer(torch.ones(1, 64)) * (world.rank + 1)).sum().backward()
            most = max(most, sum(m.body.untyped_storage().nbytes() > 0 for m in strategy._messages))
        strategy.reduce(torch.zeros(()))
        return most, torch.cat([g.flatten() for g in strategy.gradients()])

    return on_torch_ranks(size, rank)


def test_gradients_of_few_buckets_are_there_at_a_time_where_others_are_slow(monkeypatch):
    monkeypatch.setattr(zero_module, "KEPT_BYTES", 0)
    for most, received in under_way(2, slowness_s=0.01):
        assert most <= zero_module.MAX_IN_FLIGHT + 1
        assert set(received.tolist()) == {1.0 + 2.0}


def test_a_rank_that_is_slow_once_leaves_a_limit_to_the_buckets_in_flight(monkeypatch):
    monkeypatch.setattr(buckets, "MAX_WAIT_S", 0.0)
    monkeypatch.setattr(zero_module, "KEPT_BYTES", 0)
    answers = iter([False] * 5)  # the last bucket, which has the trailer, is sent by `reduce`
    monkeypatch.setattr(TorchCommunicator, "is_done", lambda *_: next(answers, True))

    [(most, _)] = under_way(1)

    assert zero_module.MAX_IN_FLIGHT + 1 <= most <= 2 * zero_module.MAX_IN_FLIGHT


def test_ranks_whose_gradients_come_in_other_orders_do_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(buckets, "MAX_WAIT_S", 0.05)
    found = under_way(2, order_of=lambda rank, layers: layers[::-1] if rank else layers)

    for _, received in found:
        assert set(received.tolist()) == {1.0 + 2.0}


@pytest.mark.parametrize("name", ["bf16", "fp32"])
def test_parameters_in_16_bits_are_summed_in_32(name):
    case = Case(name, strategy=zero(), task_args={"dtype": "bfloat16"}, lr=0.02, tolerance=3e-2, clip=0.5)
    weights, _ = joint_batch_weights(case, 2)

    for ours in run_on(case, 2, lambda world, run: trained(world, run)[0]):
        assert float((ours - weights).abs().max()) <= case.tolerance


class Chain:
    """A run that is saved, and goes on on another number of ranks or under another strategy."""

    CASE = Case("chain", task_args=DOUBLE, **ADAMW)
    GLOBAL_BATCH = 12

    def job(self, strategy, size, max_steps):
        job = self.CASE.job(TASK)
        job["train"] |= {"batch_size_per_rank": self.GLOBAL_BATCH // size, "max_steps": max_steps}
        return {**job, "strategy": strategy}

    def part(self, strategy, size, max_steps, before=None):
        """Train to a step; before: what each rank of a part before has held."""
        Task(**self.CASE.task_args).model()

        def rank(world):
            _, run = run_of(world, self.job(strategy, size, max_steps))
            if before is not None:
                state, progress = before
                run.replica.load_state(state)
                run.progress.restore(progress)
            train(run)
            return run.replica.state(copy=True), run.progress.to_json(), weights_of(run.replica.model)

        return on_torch_ranks(size, rank)


def joined(states):
    """The state of all ranks as a checkpoint gives it back: arrays that are put together when asked for."""

    def on_rank(world):
        return find_holders(world, states[world.rank])

    holders = on_ranks(len(states), on_rank)

    def section(name):
        pieces = []
        for state, found in zip(states, holders, strict=True):
            for key, blob in found.arrays_to_write(name, getattr(state, name)).items():
                entry = Entry(key, blob.dtype, blob.shape, 0, len(blob.data), blob.part, None)
                pieces.append(Piece(entry, lambda blob=blob: bytes(blob.data), "memory"))
        return StoredArrays(pieces)

    return ReplicaState(section("model"), section("optimizer"), holders[0].optimizer_tree, {})


def test_goes_on_on_another_number_of_ranks_and_under_another_strategy():
    chain = Chain()
    undisturbed = chain.part({}, 1, 13)[0][2]

    before = None
    for strategy, size, to_step in (
        (zero(), 4, 3),
        (zero(1), 2, 6),
        ({}, 3, 8),
        (zero(), 3, 10),
        ({}, 1, 11),
        (zero(), 2, 13),
    ):
        found = chain.part(strategy, size, to_step, before)
        states = [state for state, _, _ in found]
        before = joined(states if states[0].is_sharded else states[:1]), found[0][1]

    for _, _, weights in found:
        assert float((weights - undisturbed).abs().max()) <= 1e-12


class TestAnOptimizer:
    @pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "torch.optim:Adagrad", "torch.optim:NAdam"])
    @pytest.mark.parametrize("args", [{}, {"weight_decay": 0.1}])
    def test_that_updates_each_number_by_itself_can_be_split(self, name, args):
        location = OPTIMIZERS["torch"].rows.get(name, name)
        make = getattr(torch.optim, location.rpartition(":")[2])
        weights = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(4))]
        optimizer = make(weights, lr=1e-9, **args)
        before = copy.deepcopy(optimizer.state_dict())

        check_elementwise(optimizer, "zero")

        assert str(optimizer.state_dict()) == str(before)
        assert all(bool((weight == 1).all()) for weight in weights)
        for _ in range(3):  # and its steps combine no elements
            for weight in weights:
                weight.grad = torch.full_like(weight, 0.1)
            optimizer.step()

    @pytest.mark.parametrize("name", ["lars", "lamb"])
    def test_that_looks_at_whole_weights_is_refused(self, name):
        make = OPTIMIZERS["torch"].load(name)

        with pytest.raises(UserError, match="the optimizer L.* split: .*depends on others"):
            check_elementwise(make([nn.Parameter(torch.ones(2, 3))], lr=0.1), "zero")

    @pytest.mark.parametrize(("check", "of"), [(check_elementwise, "mean"), (check_separable, "stack")])
    def test_that_looks_at_whole_weights_late_is_refused_then(self, check, of):
        weights = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(4))]
        optimizer = LateLook(weights, lr=0.1)
        check(optimizer, "zero")

        def make_steps():
            for _ in range(99):
                optimizer.step()

        make_steps()
        with pytest.raises(UserError, match=rf"LateLook cannot be .*its step computes {of}"):
            make_steps()
        assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()

    def test_that_cannot_be_tried_is_refused(self):
        optimizer = torch.optim.LBFGS([nn.Parameter(torch.ones(2))])

        with pytest.raises(UserError, match="LBFGS cannot be split: TypeError"):
            check_elementwise(optimizer, "zero")


class LateLook(torch.optim.SGD):
    """Compares the mean of all weights with a limit, from the hundredth step on."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.num_steps = 0

    @torch.no_grad()
    def step(self):
        super().step()
        self.num_steps += 1
        weights = [weight for group in self.param_groups for weight in group["params"]]
        if self.num_steps >= 100:
            assert torch.stack([weight.mean() for weight in weights]).max() < 1e9


class Frozen(Task):
    """A model of which a part is not trained."""

    def model(self):
        model = super().model()
        model.never.requires_grad_(requires_grad=False)
        return model

    def param_groups(self, model):
        return [
            {"params": [*model.body.parameters(), *model.never.parameters()], "weight_decay": 0.1},
            {"params": [*model.head.parameters(), *model.sometimes.parameters()], "lr_scale": 0.5},
        ]


def test_groups_keep_their_settings_and_what_is_frozen_stays():
    """Also on a rank that has nothing of a group."""
    case = Case("groups", task_args=DOUBLE)
    job = {**case.job(f"{__name__}:Frozen"), "allreduce": {"bucket_size_mib": 0.0005}}
    Frozen(**case.task_args).model()

    def rank(world, strategy):
        _, run = run_of(world, {**job, "strategy": strategy})
        train(run)
        return weights_of(run.replica.model), run.replica.state(copy=True)

    ((alone, _), _) = on_torch_ranks(2, lambda world: rank(world, {}))
    found = on_torch_ranks(2, lambda world: rank(world, zero()))

    for weights, _ in found:
        assert float((weights - alone).abs().max()) <= 1e-12
    saved = joined([state for _, state in found])

    def goes_on(world):
        _, run = run_of(world, job)
        run.replica.load_state(saved)
        return run.replica.optimizer.param_groups

    for first, second in on_torch_ranks(2, goes_on):
        assert (first["weight_decay"], len(first["params"])) == (0.1, 6)
        assert (second["lr_scale"], len(second["params"])) == (0.5, 4)


def test_what_is_frozen_later_is_refused_on_all_ranks():
    case = Case("changes", strategy=zero())
    Task(**case.task_args).model()

    def rank(world):
        _, run = run_of(world, case.job(TASK))
        if world.rank == 1:
            run.replica.model.never.requires_grad_(requires_grad=False)
        train(run)

    for error in on_torch_ranks(2, rank):
        assert isinstance(error, UserError)
        assert "strategy zero: the set of trained parameters has changed" in str(error)


class Normalized(Task):
    """Batch normalization sees what passes, also what does not count."""

    def model(self):
        model = copy.deepcopy(NORMALIZED)
        return model.to(self.dtype)


NORMALIZED = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def test_batches_that_do_not_count_leave_statistics_as_they_are():
    """The last step of an epoch has six samples: one rank has two micro-batches, the other one."""
    job = Case("bn", task_args=DOUBLE, accumulation=2, epochs=1).job(f"{__name__}:Normalized")
    job["train"]["batch_size_per_rank"] = 3

    def rank(world, strategy):
        _, run = run_of(world, {**job, "strategy": strategy})
        train(run)
        return [buffer.tolist() for buffer in run.replica.model.buffers()]

    plain = on_torch_ranks(3, lambda world: rank(world, {}))
    padded = on_torch_ranks(3, lambda world: rank(world, zero()))

    np.testing.assert_allclose(
        np.concatenate([b for b in padded[0] if isinstance(b, list)]),
        np.concatenate([b for b in plain[0] if isinstance(b, list)]),
        rtol=0,
        atol=1e-12,
    )


@given(
    num_samples=st.integers(1, 60),
    batch_size=st.integers(1, 5),
    accumulation_steps=st.integers(1, 4),
    size=st.integers(1, 6),
)
def test_all_ranks_read_equally_many_micro_batches(num_samples, batch_size, accumulation_steps, size):
    num_samples = min(num_samples, batch_size * accumulation_steps * size)
    shares = [
        share_of_step(
            7,
            num_samples,
            batch_size=batch_size,
            accumulation_steps=accumulation_steps,
            rank=rank,
            size=size,
            equal_micro_batches=True,
        )
        for rank in range(size)
    ]

    assert len({len(share.micro_batches) for share in shares}) == 1
    assert 1 <= len(shares[0].micro_batches) <= accumulation_steps
    assert sum(share.num_local_samples for share in shares) == num_samples
    counted = [m for share in shares for m in share.micro_batches if m.share]
    assert sorted(place for m in counted for place in range(m.start, m.stop)) == list(
        range(7, 7 + num_samples)
    )
    for share in shares:
        assert all(0 < len(m) <= batch_size and m.stop <= 7 + num_samples for m in share.micro_batches)


@pytest.mark.parametrize(
    ("more", "path"),
    [
        ({"train": {"precision": "fp16"}}, "train.precision"),
        ({"train": {"channels_last": True}}, "train.channels_last"),
        ({"train": {"cuda_graph": "auto"}}, "train.cuda_graph"),
        ({"allreduce": {"wire_dtype": "bf16"}}, "allreduce.wire_dtype"),
        ({"allreduce": {"codec": {"name": "top-k", "args": {"keep": 0.1}}}}, "allreduce.codec"),
        ({"strategy": {"name": "zero", "args": {"stage": 3}}}, "strategy.args.stage"),
    ],
)
def test_what_it_cannot_be_combined_with_is_refused(more, path):
    job = Job.model_validate({"name": "j", "task": "digits", "strategy": "zero", **more})

    (problem,) = broken_rules(job)

    assert problem.path == path
    assert problem.hint or "must be" in problem.message
