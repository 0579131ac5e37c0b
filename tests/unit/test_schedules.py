"""Schedules of the learning rate and of the optimizer's arguments, against PyTorch's and formulas."""

from __future__ import annotations

import math

import pytest
import torch
from support.torch_threads import Task, on_torch_ranks, run_of
from torch.optim import lr_scheduler

from horovod_train.cli.plan import charts
from horovod_train.config.load import job_from
from horovod_train.config.optimization import LearningRate
from horovod_train.config.schema import Job
from horovod_train.errors import ConfigError, UserError
from horovod_train.lr.policy import LearningRatePolicy
from horovod_train.lr.schedules import CosineRestarts, Plateau, PlateauState, Position
from horovod_train.training.hooks.base import ScheduleArguments
from horovod_train.training.loop import train

TASK = "support.torch_threads:Task"
pytestmark = pytest.mark.usefixtures("one_thread")


def rates(epochs=10, num=100, batch=32, **fields):
    policy = LearningRatePolicy(LearningRate(base_lr=0.4, **fields), batch, epochs)
    return [policy.at(epochs * number / num) for number in range(num)]


def rates_of_torch(make, num=100):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    scheduler, found = make(optimizer), []
    for _ in range(num):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_one_cycle_is_that_of_pytorch():
    expected = rates_of_torch(
        lambda optimizer: lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.4, total_steps=101, pct_start=0.31 - 0.01, div_factor=25, final_div_factor=1e4
        )
    )
    # PyTorch's last step is number 100, and its rise ends one step earlier than its fraction.
    found = rates(
        decay="one_cycle",
        decay_args={"rise_fraction": (0.3 * 101 - 1) / 100, "start_factor": 1 / 25, "end_factor": 1 / 25e4},
    )

    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("factor", [1, 2])
def test_warm_restarts_are_those_of_pytorch(factor):
    expected = rates_of_torch(
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(
            optimizer, T_0=10, T_mult=factor, eta_min=0.04
        )
    )
    found = rates(
        decay="cosine_restarts", decay_args={"first_cycle": 1.0, "restart_factor": factor, "end_factor": 0.1}
    )

    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("restart", [0.1, 0.3, 0.7, 0.9, 1.1, 1.3])
@pytest.mark.parametrize("warmup", [0.0, 0.3])
@pytest.mark.parametrize("factor", [1, 2, 3])
def test_each_cycle_begins_with_the_whole_rate_also_at_fractions_of_epochs(restart, warmup, factor):
    schedule = CosineRestarts(first_cycle=restart, restart_factor=factor)
    begin = 0.0
    for cycle in range(6):
        at = round((warmup + begin) * 1000) / 1000  # samples of an epoch of 1000
        assert schedule.at(Position(at, warmup, 100.0)) == pytest.approx(1.0)
        begin += restart * factor**cycle


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("cooldown", [0, 2])
@pytest.mark.parametrize("patience", [0, 1, 3])
def test_a_plateau_reduces_the_rate_as_pytorch_does(mode, cooldown, patience):
    values = [abs(math.sin(n * n)) for n in range(60)]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = lr_scheduler.ReduceLROnPlateau(
        optimizer, mode=mode, factor=0.5, patience=patience, threshold=0.01, threshold_mode="abs",
        cooldown=cooldown, min_lr=0.01, eps=0,
    )  # fmt: skip
    rule = Plateau(
        metric="m",
        mode=mode,
        factor=0.5,
        patience=patience,
        min_delta=0.01,
        cooldown=cooldown,
        min_factor=0.01,
    )
    state = PlateauState()
    for value in values:
        scheduler.step(value)
        state = rule.after_evaluation(state, value)

        assert state.factor == optimizer.param_groups[0]["lr"]
    assert state.factor == 0.01 or patience == 3


def test_a_metric_that_is_not_finite_is_no_improvement():
    rule = Plateau(metric="m", mode="min", patience=0)

    assert rule.after_evaluation(PlateauState(best=1.0), float("nan")).factor == 0.1
    assert rule.after_evaluation(PlateauState(best=1.0), float("-inf")).factor == 0.1


def test_warm_up_stable_decay_has_three_phases():
    found = rates(
        epochs=10, num=10, warmup=2.0, decay="wsd", decay_args={"cooldown_fraction": 0.3}, warmup_start_lr=0.0
    )
    fall = [0.4 * (1 - math.sqrt(x / 3)) for x in range(3)]

    assert found == pytest.approx([0, 0.2, *[0.4] * 5, *fall])


def test_the_inverse_square_root_is_that_of_the_transformer():
    """d^-0.5 min(n^-0.5, n w^-1.5), arXiv:1706.03762, equation 3, relative to its maximum at n = w."""
    found = rates(epochs=10, num=10, warmup=4.0, decay="inverse_sqrt", warmup_start_lr=0.0)
    expected = [0.4 * min(n**-0.5, n * 4**-1.5) * 4**0.5 if n else 0.0 for n in range(10)]

    assert found == pytest.approx(expected)


def test_points_are_joined_by_lines():
    found = rates(epochs=4, num=8, decay="points", decay_args={"points": [[1, 1.0], [3, 0.5], [3, 0.1]]})

    assert found == pytest.approx([0.4, 0.4, 0.4, 0.35, 0.3, 0.25, 0.04, 0.04])


@pytest.mark.parametrize(
    "fields",
    [
        {"decay": "wsd"},
        {"decay": "one_cycle"},
        {"decay": "cosine_restarts", "decay_args": {"first_cycle": 3.0}},
        {"decay": "points", "decay_args": {"points": [[0, 1.0], [10, 0.0]]}},
        {"decay": "inverse_sqrt", "warmup": 1.0},
        {"decay": "plateau", "decay_args": {"metric": "loss", "mode": "min"}},
    ],
)
@pytest.mark.parametrize("scaling", ["linear", "sqrt", "none"])
def test_every_schedule_follows_the_scaling_rule(fields, scaling):
    """The rate on k times the batch is the rate on the reference batch times the rule's factor."""
    factor = {"linear": 4.0, "sqrt": 2.0, "none": 1.0}[scaling]
    alone = rates(**fields, scaling=scaling)
    together = rates(**fields, scaling=scaling, batch=128)

    after_warmup = int(100 * fields.get("warmup", 0) / 10)
    assert together[after_warmup:] == pytest.approx([factor * rate for rate in alone[after_warmup:]])


class TestFunctionsOfTheUser:
    @pytest.fixture
    def folder(self, tmp_path):
        (tmp_path / "curves.py").write_text(
            "def curve(progress):\n    return 1 - progress ** 2\n"
            "def rule(k):\n    return k ** 0.75\n"
            "def negative(progress):\n    return 0.5 - progress\n"
            "def text(progress):\n    return 'high'\n"
        )
        return tmp_path

    def job(self, folder, **fields):
        return job_from({"name": "x", "task": "digits", **fields}, folder, "job.yaml", environ={})

    def test_are_found_beside_the_job_file(self, folder):
        job = self.job(folder, lr={"decay": "curves.py:curve", "scaling": "curves.py:rule", "base_lr": 1.0})
        policy = LearningRatePolicy(job.lr, 64, 1)

        assert [policy.at(epochs) for epochs in (0, 0.5, 1)] == pytest.approx([2**0.75, 0.75 * 2**0.75, 0])

    @pytest.mark.parametrize("name", ["negative", "text"])
    def test_are_refused_before_training_if_they_return_no_rate(self, folder, name):
        job = self.job(folder, lr={"decay": f"curves.py:{name}"})

        with pytest.raises(UserError, match=r"curves\.py:\w+ returns .* at progress"):
            LearningRatePolicy(job.lr, 64, 1).check()

    def test_must_exist(self, folder):
        with pytest.raises(ConfigError, match=r"(?s)lr\.decay .*no such file: .*nothing\.py"):
            self.job(folder, lr={"decay": "nothing.py:curve"})
        with pytest.raises(ConfigError, match=r"(?s)lr\.decay .*curves\.py does not define other"):
            self.job(folder, lr={"decay": "curves.py:other"})

    def test_of_equal_names_in_two_folders_are_both_used(self, folder, tmp_path):
        other = tmp_path / "other"
        other.mkdir()
        (other / "curves.py").write_text("def curve(progress):\n    return 7.0\n")
        lr = {"decay": "curves.py:curve", "base_lr": 1.0, "scaling": "none"}
        found = [LearningRatePolicy(self.job(f, lr=dict(lr)).lr, 64, 1).at(0.5) for f in (folder, other)]

        assert found == [0.75, 7.0]


class TestArguments:
    """Momentum, betas and weight decay that follow schedules."""

    def seen(self, optimizer, size=1, **fields):
        """Train, and return the groups of each step."""
        Task().model()

        def rank(world):
            job = {"name": "x", "task": TASK, "optimizer": optimizer, "train": {"epochs": 2, "device": "cpu"}}
            _, run = run_of(world, job, **fields)
            run.hooks.append(ScheduleArguments())
            groups, step_of = [], run.replica.step

            def step(*args, **more):
                outcome = step_of(*args, **more)
                groups.append([dict(group, params=None) for group in run.replica.optimizer.param_groups])
                return outcome

            run.replica.step = step
            train(run)
            return groups

        return on_torch_ranks(size, rank)

    def test_momentum_and_weight_decay_have_the_values_of_their_points(self):
        schedules = {"momentum": [[0, 0.5], [2, 0.9]], "weight_decay": [[1, 0.0], [1, 0.1]]}
        (groups,) = self.seen({"args": {"momentum": 0.9}, "schedules": schedules})

        # 50 samples in steps of 32 and 18
        assert [g["momentum"] for (g,) in groups] == pytest.approx(
            [0.5, 0.5 + 0.2 * 0.64, 0.7, 0.7 + 0.2 * 0.64]
        )
        assert [g["weight_decay"] for (g,) in groups] == [0.0, 0.0, 0.1, 0.1]

    def test_betas_are_named_one_by_one(self):
        (groups,) = self.seen({"name": "adamw", "schedules": {"beta1": [[0, 0.5]], "beta2": [[0, 0.99]]}})

        assert {g["betas"] for (g,) in groups} == {(0.5, 0.99)}

    def test_groups_of_the_task_keep_their_ratio(self):
        (groups,) = self.seen(
            {"args": {"weight_decay": 0.1}, "schedules": {"weight_decay": [[0, 0.2]]}},
            task="test_schedules:Decayed",
        )

        assert [g["weight_decay"] for g in groups[0]] == pytest.approx([0.2, 0.0, 0.6])

    def test_an_argument_that_the_optimizer_lacks_is_refused(self):
        (error,) = self.seen({"schedules": {"beta1": [[0, 0.5]]}})

        assert "optimizer.schedules.beta1: SGD has no such argument" in str(error)

    def test_are_those_of_one_rank_under_zero(self):
        schedules = {"momentum": [[0, 0.5], [2, 0.9]]}
        optimizer = {"args": {"momentum": 0.9}, "schedules": schedules}
        alone, shared = self.seen(optimizer), self.seen(optimizer, 2, strategy="zero")

        assert [g["momentum"] for (g,) in shared[0]][:1] == [g["momentum"] for (g,) in alone[0]][:1]


class Decayed(Task):
    def param_groups(self, model):
        groups = [list(module.parameters()) for module in (model.body, model.head, model.never)]
        return [
            {"params": groups[0]},
            {"params": groups[1], "weight_decay": 0.0},
            {"params": [*groups[2], *model.sometimes.parameters()], "weight_decay": 0.3},
        ]


def test_a_plateau_is_found_on_all_ranks_and_lowers_the_rate():
    Task().model()

    def rank(world):
        job = {
            "name": "x", "task": TASK, "train": {"epochs": 5, "device": "cpu"},
            "lr": {"base_lr": 1e-12, "decay": "plateau",
                   "decay_args": {"metric": "loss", "mode": "min", "patience": 1, "min_delta": 0.1,
                               "factor": 0.5}},
        }  # fmt: skip
        _, run = run_of(world, job)
        found, step_of = [], run.replica.step

        def step(planned, lr, **more):
            found.append(lr)
            return step_of(planned, lr, **more)

        run.replica.step = step
        train(run)
        return found, run.progress.plateau

    (found, state), other = on_torch_ranks(2, rank)

    scaled = 1e-12 * 2
    assert found == pytest.approx([scaled] * 3 + [scaled / 2] * 2)
    assert (found, state) == other
    assert state.factor == 0.25


def test_the_plan_draws_what_is_scheduled():
    job = Job.model_validate(
        {
            "name": "x", "task": "digits", "lr": {"scaling": "adascale", "decay": "plateau",
            "decay_args": {"metric": "loss", "mode": "min"}},
            "optimizer": {"schedules": {"momentum": [[0, 0.5]]}},
            "train": {"epochs": 3, "batch_warmup": {"start": 8, "length": 1.0}},
        }
    )  # fmt: skip
    text = "\n".join(charts(job, 4))

    assert "AdaScale multiplies the base rate" in text
    assert "without reductions on a plateau" in text
    assert "the batch grows from 8 samples during 1 epoch" in text
    assert "# optimizer.schedules.momentum" in text
    assert "0.04 |████" in text
    assert "0.5 |████" in text
    assert all(line.startswith("# ") for line in text.splitlines())
