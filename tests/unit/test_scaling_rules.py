"""Scaling rules, trust ratios and the global batch, against formulas in NumPy."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.torch_threads import Task, on_torch_ranks, run_of, weights_of
from torch import nn

from horovod_train.config.arguments import batch_size_at, batch_size_of_lr, for_ranks
from horovod_train.config.load import changed
from horovod_train.config.optimization import LearningRate
from horovod_train.config.rules import broken_rules
from horovod_train.config.schema import Job, Train
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.state.optimizer import optimizer_over, set_rates
from horovod_train.frameworks.torch.step.averages import averaging_of
from horovod_train.lr.policy import ArgumentScaling, EpochLength, LearningRatePolicy, policy_of_section
from horovod_train.training.loop import train

TASK = "support.torch_threads:Task"
pytestmark = pytest.mark.usefixtures("one_thread")


def job(**fields: Any) -> Job:
    return Job.model_validate({"name": "x", "task": TASK, **fields})


@pytest.mark.parametrize(
    ("optimizer", "rule"),
    [
        ("sgd", "linear"),
        ("lars", "linear"),
        ("mine:Averaged", "linear"),
        ("adamw", "sqrt"),
        ("lamb", "sqrt"),
        ("torch.optim:RMSprop", "sqrt"),
        ("keras.optimizers:Nadam", "sqrt"),
        ("optax:amsgrad", "sqrt"),
        ("mine:lambda_sgd", "linear"),
    ],
)
def test_the_rule_suits_the_optimizer_unless_the_job_names_one(optimizer, rule):
    assert job(optimizer={"name": optimizer}).lr.scaling == rule
    assert job(optimizer={"name": optimizer}, lr={"scaling": "none"}).lr.scaling == "none"
    assert changed(job(), {"optimizer.name": optimizer}, "test").lr.scaling == rule
    assert changed(job(lr={"scaling": "none"}), {"optimizer.name": optimizer}, "test").lr.scaling == "none"


def test_the_average_of_weights_spans_the_same_samples_with_each_batch():
    described = job(ema={"decay": 0.9}, train={"batch_size_per_rank": 8}, lr={"reference_batch_size": 8})
    fixed = job(ema={"decay": 0.9, "scale_decay": False}, lr={"reference_batch_size": 8})
    unscaled = job(ema={"decay": 0.9}, lr={"reference_batch_size": 8, "scaling": "none"})

    assert averaging_of(described, 4).decay_of(1, 8) == 0.9
    assert averaging_of(described, 4).decay_of(1, 32) == pytest.approx(0.9**4)
    assert averaging_of(described, 4).decay_of(10, 80) == 0.9, "an update follows ten steps"
    assert averaging_of(fixed, 4).decay_of(1, 32) == averaging_of(unscaled, 4).decay_of(1, 32) == 0.9
    assert averaging_of(job(), 4) is None
    adasum = job(ema={"decay": 0.9}, lr={"reference_batch_size": 8}, strategy="adasum")
    assert averaging_of(adasum, 4).decay_of(1, 32) == pytest.approx(0.9), "its rate follows a rank's batch"


def test_legw_has_the_same_number_of_warm_up_steps_on_every_batch():
    """Rate x sqrt(k), warm-up epochs x k (arXiv:1901.08256, section 3)."""
    section = LearningRate(base_lr=0.1, scaling="legw", warmup=0.5, warmup_start_lr=0.0)
    for k in (1, 2, 4, 8):
        policy = LearningRatePolicy(section, 32 * k, 10)
        steps_per_epoch = 3200 / (32 * k)
        expected = [0.1 * math.sqrt(k) * min(1.0, step / 50) for step in range(100)]
        found = [policy.at(step / steps_per_epoch) for step in range(100)]

        assert found == pytest.approx(expected, rel=1e-6)


def test_legw_refuses_a_warm_up_that_is_longer_than_the_training():
    section = LearningRate(scaling="legw", warmup=2.0)
    LearningRatePolicy(section, 32, 10).check()

    with pytest.raises(
        UserError, match="makes the warm-up 8 times as long.*16 epochs, and train.epochs is 10"
    ):
        LearningRatePolicy(section, 256, 10).check()


@pytest.mark.parametrize(
    ("fields", "instead"),
    [
        ({"decay": "step", "decay_args": {"milestones": [4.0]}}, "later first milestone"),
        (
            {"decay": "wsd", "decay_args": {"cooldown_fraction": 0.7}},
            "smaller lr.decay_args.cooldown_fraction",
        ),
    ],
)
def test_a_decay_that_begins_within_the_scaled_warm_up_is_refused(fields, instead):
    section = LearningRate(scaling="legw", warmup=2.0, **fields)
    LearningRatePolicy(section, 32, 10).check()

    with pytest.raises(UserError, match="reduces the rate before the warm-up of 4 epochs ends") as error:
        LearningRatePolicy(section, 64, 10).check()
    assert instead in error.value.hint


def test_a_batch_warm_up_from_above_the_global_batch_is_refused():
    train = Train(batch_warmup={"start": 64, "length": 2.0})
    LearningRatePolicy(LearningRate(), 64, 10, train).check()

    with pytest.raises(UserError, match="start 64 is above the global batch of 32"):
        LearningRatePolicy(LearningRate(), 32, 10, train).check()


class Adam:
    """Kingma and Ba, algorithm 1, with the constants of Malladi et al. for k times the batch."""

    def __init__(self, k: float, lr: float, betas: tuple[float, float], epsilon: float) -> None:
        self.lr, self.epsilon = lr * math.sqrt(k), epsilon / math.sqrt(k)
        self.betas = [1 - k * (1 - beta) for beta in betas]
        self.m = self.v = 0.0
        self.count = 0

    def step(self, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        self.count += 1
        b1, b2 = self.betas
        self.m, self.v = b1 * self.m + (1 - b1) * g, b2 * self.v + (1 - b2) * g**2
        m, v = self.m / (1 - b1**self.count), self.v / (1 - b2**self.count)
        return w - self.lr * m / (np.sqrt(v) + self.epsilon)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("args", [{}, {"betas": [0.95, 0.98], "eps": 1e-3}])
def test_adam_has_the_rate_betas_and_epsilon_of_the_square_root_rule(k, args):
    described = job(
        lr={"base_lr": 0.01, "scaling": "adam_sqrt", "reference_batch_size": 32},
        optimizer={"name": "adam", "args": args},
    )
    random = np.random.RandomState(0)
    start, gradients = random.randn(5), random.randn(20, 5)
    weight = torch.tensor(start, requires_grad=True)
    optimizer = optimizer_over(described, [weight], k)
    expected, reference = start, Adam(k, 0.01, tuple(args.get("betas", (0.9, 0.999))), args.get("eps", 1e-8))
    rate = LearningRatePolicy(described.lr, 32 * k, 1).at(0.5)
    for gradient in gradients:
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        expected = reference.step(expected, gradient)

    assert weight.detach().numpy() == pytest.approx(expected, rel=1e-6)


def test_a_beta_that_would_be_negative_is_refused_with_the_numbers():
    described = job(lr={"scaling": "adam_sqrt"}, optimizer={"name": "adam"})

    with pytest.raises(UserError, match=r"adam_sqrt requires .* < 1; it is 10 x 0\.1"):
        optimizer_over(described, [torch.zeros(1, requires_grad=True)], 10)


@pytest.mark.parametrize(
    ("lr", "optimizer", "message"),
    [
        ({"scaling": "adam_sqrt"}, {"name": "sgd"}, "lr.scaling: adam_sqrt: the optimizer has none of"),
        (
            {"scaling": "sqrt", "scale_weight_decay": True},
            {"name": "torch.optim:Rprop"},
            "none of the arguments",
        ),
    ],
)
def test_an_optimizer_without_the_argument_is_refused(lr, optimizer, message):
    with pytest.raises(UserError, match=message):
        optimizer_over(job(lr=lr, optimizer=optimizer), [torch.zeros(1, requires_grad=True)], 2)


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 1.0), ("sqrt", 2.0), ("none", 4.0)])
def test_rate_times_weight_decay_times_steps_of_an_epoch_is_constant(scaling, factor):
    described = job(
        lr={"scaling": scaling, "scale_weight_decay": True},
        optimizer={"name": "adamw", "args": {"weight_decay": 0.1}},
    )
    groups = [
        {"params": [torch.zeros(1, requires_grad=True)]},
        {"params": [torch.zeros(1, requires_grad=True)], "weight_decay": 0.5},
        {"params": [torch.zeros(1, requires_grad=True)], "weight_decay": 0.0},
    ]
    optimizer = optimizer_over(described, groups, 4)

    assert [group["weight_decay"] for group in optimizer.param_groups] == pytest.approx(
        [0.1 * factor, 0.5 * factor, 0.0]
    )
    policy = LearningRatePolicy(described.lr, 128, 1)
    assert policy.at(0) * 0.1 * factor / 4 == pytest.approx(0.01 * 0.1)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"beta_1": 0.9, "epsilon": 1e-7}, {"beta_1": 0.8, "epsilon": 5e-8}),
        ({"b1": 0.9, "b2": 0.99, "eps": 1e-8}, {"b1": 0.8, "b2": 0.98, "eps": 5e-9}),
        ({"beta1": 0.9, "wd": 0.2}, {"beta1": 0.8, "wd": 0.6}),
        ({"weight_decay": None, "momentum": 0.9}, {"weight_decay": None, "momentum": 0.9}),
    ],
)
def test_arguments_of_every_framework_are_scaled(args, expected):
    scaling = ArgumentScaling("adam_sqrt", one_minus_beta=2.0, epsilon=0.5, weight_decay=3.0)

    found = scaling.scaled(args)

    assert found == {k: v if v is None else pytest.approx(v) for k, v in expected.items()}


class TestTrustRatios:
    """The optimizers ``lars`` and ``lamb`` of each framework, by their papers' formulas."""

    START = np.random.RandomState(1).randn(4, 3)
    GRADIENTS = np.random.RandomState(2).randn(6, 4, 3)

    def of_torch(self, name, lr, args):
        weight = torch.tensor(self.START, requires_grad=True)
        described = job(lr={"base_lr": lr, "scaling": "none"}, optimizer={"name": name, "args": args})
        optimizer = optimizer_over(described, [weight], 1)
        for gradient in self.GRADIENTS:
            weight.grad = torch.tensor(gradient)
            optimizer.step()
        return weight.detach().numpy()

    def test_lars(self):
        """You et al., arXiv:1708.03888: local rate = eta |w| / (|g| + decay |w|), within momentum."""
        eta, momentum, decay, lr = 0.01, 0.9, 0.1, 0.5
        w, v = self.START.copy(), np.zeros_like(self.START)
        for g in self.GRADIENTS:
            norm_w, norm_g = np.linalg.norm(w), np.linalg.norm(g)
            local = eta * norm_w / (norm_g + decay * norm_w)
            v = momentum * v + local * (g + decay * w)
            w = w - lr * v

        found = self.of_torch(
            "lars", lr, {"trust_coefficient": eta, "momentum": momentum, "weight_decay": decay}
        )

        assert found == pytest.approx(w, rel=1e-6)

    def test_lamb(self):
        """You et al., arXiv:1904.00962, algorithm 2: Adam's update plus decay, with the weight's norm."""
        b1, b2, epsilon, decay, lr = 0.9, 0.999, 1e-6, 0.1, 0.02
        w, m, v = self.START.copy(), 0.0, 0.0
        for count, g in enumerate(self.GRADIENTS, 1):
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            r = m / (1 - b1**count) / (np.sqrt(v / (1 - b2**count)) + epsilon) + decay * w
            w = w - lr * np.linalg.norm(w) / np.linalg.norm(r) * r

        found = self.of_torch("lamb", lr, {"betas": [b1, b2], "eps": epsilon, "weight_decay": decay})

        assert found == pytest.approx(w, rel=1e-6)


class TestTheGlobalBatch:
    @pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 4), (2, 2), (3, 2), (4, 1), (100, 1)])
    def test_determines_the_accumulation_steps(self, ranks, micro_batches):
        described = job(train={"global_batch_size": 100, "batch_size_per_rank": 25})

        assert for_ranks(described, ranks).train.accumulation_steps == micro_batches
        assert described.global_batch_size(ranks) == batch_size_of_lr(described, ranks) == 100

    def test_of_adasum_is_divided_by_the_ranks_for_the_rate(self):
        described = job(train={"global_batch_size": 100}, strategy="adasum")

        assert batch_size_of_lr(described, 4) == 25

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_has_the_samples_of_one_rank_on_any_number_of_ranks(self, size):
        """14 samples per step: not divisible by 3 ranks, and more than a micro-batch on one."""
        Task().model()
        fields = {
            "name": "x", "task": TASK, "optimizer": {"args": {"momentum": 0.9}},
            "train": {"epochs": 2, "global_batch_size": 14, "batch_size_per_rank": 5, "device": "cpu"},
            "task_args": {"dtype": "float64"}, "lr": {"base_lr": 0.1, "scaling": "none"},
        }  # fmt: skip

        def rank(world):
            _, run = run_of(world, fields)
            train(run)
            return weights_of(run.replica.model), run.progress.step

        (weights, steps), *_ = on_torch_ranks(size, rank)
        (alone, steps_alone), *_ = on_torch_ranks(
            1,
            lambda world: rank_alone(
                world, {**fields, "train": {**fields["train"], "batch_size_per_rank": 14}}
            ),
        )

        assert steps == steps_alone == 2 * math.ceil(50 / 14)
        assert weights == pytest.approx(alone, rel=1e-12, abs=1e-13)

    def test_cannot_be_given_with_accumulation_steps(self):
        (problem,) = broken_rules(job(train={"global_batch_size": 64, "accumulation_steps": 2}))

        assert problem.path == "train.accumulation_steps"


def rank_alone(world, fields):
    _, run = run_of(world, fields)
    train(run)
    return weights_of(run.replica.model), run.progress.step


class TestBatchWarmUp:
    FIELDS: ClassVar[dict[str, Any]] = {
        "name": "x", "task": TASK, "lr": {"base_lr": 0.1, "reference_batch_size": 4, "scaling": "sqrt"},
        "train": {"epochs": 3, "batch_size_per_rank": 12, "device": "cpu",
                  "batch_warmup": {"start": 4, "length": 2.0}},
    }  # fmt: skip

    def steps(self, size, **more):
        Task().model()

        def rank(world):
            _, run = run_of(world, {**self.FIELDS, **more})
            found, step_of, planned_steps = [], run.replica.step, run.planned_steps()

            def step(planned, lr, **rest):
                found.append((run.progress.epochs_passed, planned.share.num_samples, lr))
                return step_of(planned, lr, **rest)

            run.replica.step = step
            train(run)
            return found, planned_steps

        return on_torch_ranks(size, rank)[0]

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_grows_at_a_constant_rate_with_the_rate_of_each_batch(self, size):
        found, planned = self.steps(size)
        full = 12 * size

        for epochs, samples, lr in found:
            left = round((1 - epochs % 1) * 50)
            assert samples == min(left, full if epochs >= 2 else int(4 + (full - 4) * epochs / 2))
            nominal = batch_size_at(Train(**self.FIELDS["train"]), full, epochs)
            assert lr == pytest.approx(0.1 * math.sqrt(nominal / 4))
        assert sum(samples for _, samples, _ in found) == 150
        assert len(found) == planned

    def test_is_the_same_on_any_number_of_ranks_with_a_global_batch(self):
        train_section = {**self.FIELDS["train"], "global_batch_size": 24}
        one, three = (self.steps(size, train=train_section) for size in (1, 3))

        assert one == three

    def test_cannot_exceed_the_training(self):
        train_section = {"epochs": 1, "batch_warmup": {"start": 4, "length": 2.0}}
        (problem,) = broken_rules(job(train=train_section))

        assert problem.path == "train.batch_warmup.length"

    def test_that_starts_above_the_global_batch_has_no_effect(self):
        section = Train(batch_warmup={"start": 64, "length": 2.0})

        assert batch_size_at(section, 32, 0.0) == 32


def test_adascale_multiplies_the_whole_ramp():
    """The rate of a step is gain x lr(scale-invariant progress) (arXiv:2007.05105, algorithm 1)."""
    section = LearningRate(base_lr=0.1, scaling="adascale", warmup=2, warmup_start_lr=0.02)
    policy = LearningRatePolicy(section, 128, 10)

    found = [policy.at(epochs, gain=3.0) for epochs in (0, 1, 2, 5)]

    assert found == pytest.approx([3 * 0.02, 3 * 0.06, 3 * 0.1, 3 * 0.1])


@pytest.mark.parametrize(
    ("optimizer", "is_refused"),
    [
        ({"name": "adam"}, True),
        ({"name": "adamw", "args": {"weight_decay": 0.1}}, True),
        ({"name": "adam", "args": {"betas": [0.95, 0.99]}}, False),
        ({"name": "torch.optim:NAdam"}, False),  # its default is not known here
    ],
)
def test_a_beta_below_zero_is_refused_by_the_plan(optimizer, is_refused):
    lr = {"scaling": "adam_sqrt", "reference_batch_size": 32}
    job = Job.model_validate({"name": "x", "task": "digits", "optimizer": optimizer, "lr": lr})
    scaling = ArgumentScaling.of(job, 10)
    with pytest.raises(UserError, match=r"10 x 0\.1") if is_refused else nullcontext():
        scaling.check(job)


def test_a_users_own_loop_has_no_measured_rules():
    with pytest.raises(UserError, match="depend on measurements of a job"):
        policy_of_section(LearningRate(scaling="adascale"), 32, 1, EpochLength(10, 320))
    policy = policy_of_section(LearningRate(scaling="legw"), 32, 1, EpochLength(10, 320))
    assert policy.at(0.5) == 0.01


class TestGroupsOfTheTask:
    def made(self, groups, **sections):
        fields = {"name": "j", "task": "digits", "lr": {"base_lr": 0.1, "scaling": "none"}, **sections}
        optimizer = optimizer_over(Job.model_validate(fields), groups, 1)
        set_rates(optimizer, 0.1, float)
        return optimizer

    def test_are_followed_when_they_change(self):
        groups = [{"params": [nn.Parameter(torch.ones(2))], "weight_decay": 0.5} for _ in range(2)]
        optimizer = self.made(groups)
        parameters = [list(group["params"]) for group in optimizer.param_groups]

        groups[1]["weight_decay"] = 0.25
        groups[1]["lr"] = 0.05
        set_rates(optimizer, 0.2, float)

        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.25]
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.1])
        assert [group["params"] for group in optimizer.param_groups] == parameters
        assert "lr_scale" not in groups[1]

    def test_may_be_fewer_than_those_of_the_optimizer(self):
        groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": 0.01, "lr_scale": 0.5}]
        optimizer = self.made(groups)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})

        groups[0]["lr_scale"] = 0.25
        set_rates(optimizer, 0.1, float)

        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.0025, 0.1])

    def test_that_do_not_change_leave_what_a_schedule_or_a_checkpoint_has_set(self):
        groups = [{"params": (p for p in [nn.Parameter(torch.ones(2))]), "momentum": 0.9}]
        optimizer = self.made(groups)

        optimizer.param_groups[0]["momentum"] = 0.5
        set_rates(optimizer, 0.1, float)

        assert optimizer.param_groups[0]["momentum"] == 0.5

    def test_scale_with_the_batch_as_at_the_start(self):
        groups = [{"params": [nn.Parameter(torch.ones(2))], "weight_decay": 0.1}]
        lr = {"base_lr": 0.1, "scaling": "none", "scale_weight_decay": True, "reference_batch_size": 8}
        optimizer = self.made(groups, optimizer={"name": "adamw"}, lr=lr)
        assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.4)

        groups[0]["weight_decay"] = 0.2
        set_rates(optimizer, 0.1, float)

        assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.8)
