"""The gradient noise scale, against gradients of single samples; AdaScale with a known variance."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from programs.cases import BATCH_SIZE, data
from support.torch_threads import Task, on_torch_ranks, run_of
from support.training import Told
from torch import nn
from torch.nn import functional

from horovod_train.lr.scaling import gain
from horovod_train.training.hooks.steps import MeasureNoise
from horovod_train.training.loop import train
from horovod_train.training.noise import MAX_DECAY, NoiseMoments, StepMoments, step_moments

pytestmark = pytest.mark.usefixtures("one_thread")
TASK = "support.torch_threads:Task"
MEASURED = {"metrics": {"enabled": False, "noise_scale_every_steps": 1}}


class Sums(Task):
    """A loss that is a sum and a count: the mean over labels other than 0."""

    def loss(self, model, batch):
        inputs, labels = batch
        counted = labels != 0
        losses = functional.cross_entropy(self.scores(model, inputs), labels, reduction="none")
        return (losses * counted).sum(), counted.sum()


class Groups(Task):
    def param_groups(self, model):
        return [
            {"params": list(model.body.parameters())},
            {"params": [*model.head.parameters(), *model.never.parameters(), *model.sometimes.parameters()]},
        ]


def moments_of_steps(fields, size):
    """Return the weights before each step of a job, its samples by rank and micro-batch, and its moments."""
    Task(**fields.get("task_args", {})).model()

    def rank(world):
        _, run = run_of(world, fields)
        found, step_of = [], run.replica.step

        def step(planned, lr, *, want_norm):
            run.replica.noise.is_due = True
            weights = copy.deepcopy(run.replica.model.state_dict())
            parts = [(m.start, m.stop) for m in planned.share.micro_batches if m.share]
            outcome = step_of(planned, lr, want_norm=want_norm)
            found.append((weights, parts, step_moments(outcome.numbers, planned.share.num_samples)))
            return outcome

        run.replica.step = step
        train(run)
        return found

    results = on_torch_ranks(size, rank)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [
        (steps[0][0], [each[1] for each in steps], [each[2] for each in steps])
        for steps in zip(*results, strict=True)
    ]


def squared_norms(task, weights, samples, num_groups):
    """Return the squared norm of the mean gradient of samples by group, by PyTorch's autograd alone."""
    model = task.model()
    model.load_state_dict(weights)
    inputs, labels = data(50, 1)
    loss = task.loss(model, (inputs[samples], labels[samples]))
    loss, count = loss if isinstance(loss, tuple) else (loss * len(samples), len(samples))
    (loss / count).backward()
    groups = task.param_groups(model) if num_groups > 1 else [{"params": list(model.parameters())}]
    squares = [sum(float((p.grad**2).sum()) for p in g["params"] if p.grad is not None) for g in groups]
    return np.array(squares), float(count)


CASES = {
    "plain": {},
    "clipping": {"train": {"clip_grad_norm": 0.1}},
    "accumulation": {"train": {"accumulation_steps": 3}},
    "sum and count": {"task": "test_noise_scale:Sums", "train": {"accumulation_steps": 2}},
    "groups": {
        "task": "test_noise_scale:Groups",
        "metrics": {"enabled": False, "noise_scale_every_steps": 1, "noise_scale_groups": True},
    },
    "partly used": {"task_args": {"dtype": "float32", "partly_used": True}},
    "fp16 on the wire": {"allreduce": {"wire_dtype": "fp16"}},
    "zero, stage 1": {"strategy": {"name": "zero", "args": {"stage": 1}}, "train": {"accumulation_steps": 2}},
    "zero, stage 2": {"strategy": {"name": "zero", "args": {"stage": 2}}, "train": {"accumulation_steps": 2}},
    "zero, sum and count": {"task": "test_noise_scale:Sums", "strategy": "zero"},
    "zero, groups": {
        "task": "test_noise_scale:Groups",
        "strategy": "zero",
        "metrics": {"enabled": False, "noise_scale_every_steps": 1, "noise_scale_groups": True},
    },
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_norms_of_a_step_are_those_of_the_gradients_of_its_parts(name, size):
    fields = {
        "name": "noise",
        "task": TASK,
        "data": {"shuffle": False},
        "lr": {"base_lr": 0.1, "scaling": "none"},
        "checkpoint": {"resume": "never"},
        **MEASURED,
        **CASES[name],
        "train": {
            "epochs": 2,
            "batch_size_per_rank": BATCH_SIZE,
            "device": "cpu",
            **CASES[name].get("train", {}),
        },
    }
    is_by_micro_batch = "stage 2" in name or name == "zero, sum and count"
    task = {"Sums": Sums, "Groups": Groups}.get(fields["task"].rpartition(":")[2], Task)()
    if fields.get("task_args"):
        task = Task(**fields["task_args"])
    num_groups = 2 if "groups" in name else 1
    steps = moments_of_steps(fields, size)

    assert len(steps) > 3
    num_compared = 0
    for weights, parts_of_ranks, moments in steps:
        everything = [n for parts in parts_of_ranks for a, b in parts for n in range(a, b)]
        is_single = size == 1 and "zero" not in name
        if is_single:
            pieces = [list(range(*parts_of_ranks[0][0]))] if len(parts_of_ranks[0]) > 1 else []
        elif is_by_micro_batch:
            pieces = [list(range(a, b)) for parts in parts_of_ranks for a, b in parts]
        else:
            pieces = [[n for a, b in parts for n in range(a, b)] for parts in parts_of_ranks if parts]
        if not pieces:
            assert moments == [None]
            continue
        whole, total = squared_norms(task, weights, everything, num_groups)
        found = [squared_norms(task, weights, piece, num_groups) for piece in pieces]
        counts = [count for _, count in found]
        of_parts = sum(square * count for square, count in found) / sum(counts)
        inverse = 1 / counts[0] * total / len(everything) if is_single else len(pieces) / len(everything)
        tolerance = 2e-3 if "fp16" in name else 2e-5
        for each in moments:
            assert each.of_batch == pytest.approx(whole, rel=tolerance)
            assert each.of_parts == pytest.approx(of_parts, rel=tolerance)
            assert each.inverse_part == pytest.approx(inverse, rel=1e-5)
            num_compared += each.is_valid
    has_one_part = size == 1 and (name == "zero, stage 1" or "accumulation_steps" not in fields["train"])
    assert (num_compared == 0) if has_one_part else (num_compared > 2)


class Perceptron:
    """A model and its samples, whose gradients by sample are computed by PyTorch's vmap."""

    def __init__(self, kind):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(120, 1, 6, 6, generator=generator)
        self.y = torch.randint(3, (120,), generator=generator) // 2  # mostly 0, so that G is not small
        torch.manual_seed(5)
        self.model = {
            "perceptron": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.Tanh(), nn.Linear(12, 3)),
            "convolution": lambda: nn.Sequential(
                nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)
            ),
            "transformer": lambda: nn.Sequential(
                nn.Flatten(1, 2),
                nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True),
                nn.Flatten(),
                nn.Linear(36, 3),
            ),
        }[kind]()

    def moments(self):
        """Return S and |G|^2 of the samples, from the gradient of each."""
        gradients = []
        for x, y in zip(self.x, self.y, strict=True):
            self.model.zero_grad()
            functional.cross_entropy(self.model(x[None]), y[None]).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in self.model.parameters()]).double())
        stacked = torch.stack(gradients)
        covariance = float(stacked.var(dim=0, unbiased=True).sum())
        return covariance, float(stacked.mean(dim=0).square().sum()) - covariance / len(stacked)


@pytest.mark.parametrize("kind", ["perceptron", "convolution", "transformer"])
def test_the_average_over_steps_is_the_noise_scale_of_single_samples(kind):
    problem = Perceptron(kind)
    covariance, square_norm = problem.moments()
    moments, random = NoiseMoments(), np.random.RandomState(0)

    def square(samples):
        problem.model.zero_grad()
        functional.cross_entropy(problem.model(problem.x[samples]), problem.y[samples]).backward()
        return sum(float((p.grad**2).sum()) for p in problem.model.parameters())

    for _ in range(60):
        order = random.permutation(120)
        for at in range(0, 120, 24):
            batch = order[at : at + 24]
            parts = [batch[:10], batch[10:]]
            of_parts = sum(len(part) * square(part) for part in parts) / 24
            moments = moments.with_step(StepMoments([square(batch)], [of_parts], 2 / 24, 24), decay=1.0)

    assert moments.covariance == pytest.approx(covariance, rel=0.1)
    assert moments.noise_scale == pytest.approx(covariance / square_norm, rel=0.1)


def test_averages_forget_old_measurements():
    moments = NoiseMoments()
    for _ in range(500):
        moments = moments.with_step(StepMoments([10.0], [20.0], 0.5, 8), MAX_DECAY)
    for _ in range(500):
        moments = moments.with_step(StepMoments([1.0], [2.0], 0.5, 8), MAX_DECAY)

    assert moments.covariance == pytest.approx(1 / 0.375, rel=1e-3)


@pytest.mark.parametrize("numbers", [{}, {"noise_of_batch_0": 1.0}])
def test_a_step_that_was_not_measured_has_no_moments(numbers):
    assert step_moments(numbers, 8) is None


def test_numbers_that_are_not_finite_are_not_averaged():
    assert not StepMoments([float("nan")], [1.0], 0.5, 8).is_valid
    assert not StepMoments([1.0], [float("inf")], 0.5, 8).is_valid
    assert not StepMoments([1.0], [1.0], 1 / 8, 8).is_valid  # one part: the batch itself


class TestAdaScale:
    """On a quadratic with known variance: gradient w + noise, E|noise|^2 = S for each sample."""

    @pytest.mark.parametrize("k", [2, 4, 16])
    def test_the_gain_is_that_of_the_paper(self, k):
        """r = E[sigma^2 + mu^2] / E[sigma^2 / S + mu^2], with sigma^2 at scale 1 (section 3.2)."""
        reference, mu2, covariance = 8, 0.7, 5.6
        sigma2 = covariance / reference

        assert gain(covariance, mu2, k * reference, reference) == pytest.approx(
            (sigma2 + mu2) / (sigma2 / k + mu2)
        )

    @pytest.mark.parametrize("interval", [None, 1000])
    def test_a_job_has_the_gain_of_its_distribution_whatever_metrics_measure(self, interval):
        fields = {
            "name": "quadratic",
            "task": "test_noise_scale:Quadratic",
            "lr": {"base_lr": 1e-9, "reference_batch_size": 4, "scaling": "adascale"},
            "train": {"epochs": 2, "batch_size_per_rank": 4, "device": "cpu"},
            "metrics": {"enabled": False, "noise_scale_every_steps": interval},
        }

        def rank(world):
            _, run = run_of(world, fields)
            told = Told(world.rank)
            parts = SimpleNamespace(job=run.job, recorder=None, reporter=told.reporter)
            run.hooks.append(MeasureNoise.of(parts))
            train(run)
            return run.progress, run.lr_of(16), told.text

        results = on_torch_ranks(4, rank)

        (progress, lr, text) = results[0]
        sigma2, mu2 = Quadratic.DIMENSION * Quadratic.NOISE**2 / 4, 1.0
        expected = (sigma2 + mu2) / (sigma2 / 4 + mu2)
        assert lr / 1e-9 == pytest.approx(expected, rel=0.1)
        assert all(other[0] == progress for other in results)
        assert "the global batch of 16 is larger than the critical batch size of about 3 " in text
        assert not any(other[2] for other in results[1:])
        # The job trains until the scale-invariant progress is complete: more epochs than 2, at most 2 x 4.
        assert progress.scaled_epochs == pytest.approx(2, abs=expected * 4 / 2000)
        assert progress.epochs_passed == pytest.approx(2 * 4 / expected, rel=0.1)

    def test_without_a_measurement_the_gain_is_one(self):
        assert gain(0.0, 0.0, 64, 8) == 1.0

    def test_a_batch_below_the_reference_is_scaled_linearly(self):
        assert gain(1.0, 1.0, 4, 8) == 0.5


class Quadratic:
    """Loss |w - x|^2 / 2 at w = (1, 0, ...), with x normally distributed around 0: G = w, S = d noise^2."""

    DIMENSION, NOISE = 20, 0.4

    def model(self):
        model = nn.Linear(self.DIMENSION, 1, bias=False)
        with torch.no_grad():
            model.weight.zero_()[0, 0] = 1.0
        return model

    def train_data(self):
        return list(
            torch.randn(2000, self.DIMENSION, generator=torch.Generator().manual_seed(1)) * self.NOISE
        )

    def loss(self, model, batch):
        return ((model.weight - batch) ** 2).sum(dim=1).mean() / 2
