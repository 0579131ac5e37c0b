"""PowerSGD sums approximations of gradient matrices; what it does not send, it sends later."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.worlds import on_ranks
from torch import nn

from horovod_train.config.schema import Job
from horovod_train.config.support import JobSizes, Sizes, needs
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.codecs import BucketLayout
from horovod_train.frameworks.torch.strategies.allreduce.strategy import AllreduceStrategy
from horovod_train.plugins.powersgd.codec import PowerSgd, seeded

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPES = {"linear": (12, 8), "convolution": (6, 4, 3, 3), "bias": (7,), "scale": (), "small": (2, 2)}
MATRICES = {"linear": (12, 8), "convolution": (6, 36)}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=torch.float64)))


def bound(ranks, rank=2, size_bytes=10**6):
    model = Model()
    strategy = AllreduceStrategy(ranks, codec=PowerSgd(rank=rank), bucket_size_bytes=size_bytes)
    strategy.bind(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return strategy, model


def step(strategy, model, gradients, *, is_used=True):
    """Make a step with given gradients; return their sums."""
    strategy.prepare_backward(is_last=True)
    sum((torch.from_numpy(np.asarray(g)) * getattr(model, n)).sum() for n, g in gradients.items()).backward()
    strategy.reduce(torch.tensor(1.0))
    found = {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}
    strategy.after_update(is_used=is_used)
    model.zero_grad(set_to_none=True)
    return found


def random_gradients(num_steps, size, seed=0):
    make = np.random.RandomState(seed)
    return [
        [{name: np.asarray(make.randn(*shape)) for name, shape in SHAPES.items()} for _ in range(size)]
        for _ in range(num_steps)
    ]


def approximations(steps, rank):
    """Yield the sums of each step by the definition: projections of sums to the span of M Q."""
    names = list(MATRICES)
    factor = {name: seeded(name, MATRICES[name][1], rank).double().numpy() for name in names}
    left = {name: np.zeros(MATRICES[name]) for name in names}
    for of_ranks in steps:
        sums = {name: sum(g[name] for g in of_ranks) for name in SHAPES}
        for name in names:
            whole = sums[name].reshape(MATRICES[name]) + left[name]
            basis, _, _ = np.linalg.svd(whole @ factor[name], full_matrices=False)
            factor[name] = whole.T @ basis
            sums[name] = (basis @ factor[name].T).reshape(SHAPES[name])
            left[name] = whole - basis @ factor[name].T
        yield sums


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("rank", "size_bytes"), [(1, 1), (2, 10**6), (3, 400)])
def test_sums_are_projections_of_gradients_and_residuals(rank, size_bytes, size):
    steps = random_gradients(5, size)

    def train(world):
        strategy, model = bound(world, rank, size_bytes)
        return [step(strategy, model, gradients[world.rank]) for gradients in steps]

    for of_rank in on_ranks(size, train):
        for found, expected in zip(of_rank, approximations(steps, rank), strict=True):
            for name in SHAPES:
                np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, atol=1e-9)


def test_gradients_of_low_rank_are_exact():
    make = np.random.RandomState(1)
    steps = [
        [{"linear": np.outer(make.randn(12), make.randn(8)), "bias": make.randn(7)} for _ in range(2)]
        for _ in range(3)
    ]

    def train(world):
        strategy, model = bound(world, rank=2)
        return [step(strategy, model, gradients[world.rank]) for gradients in steps]

    for of_rank in on_ranks(2, train):
        for found, gradients in zip(of_rank, steps, strict=True):
            for name in ("linear", "bias"):
                np.testing.assert_allclose(found[name], sum(g[name] for g in gradients), atol=1e-12)


def residuals(strategy):
    return {name: t.numpy().copy() for name, t in strategy.rank_state().items() if "/" not in name}


def test_sent_parts_and_residuals_are_the_sum_of_gradients():
    """Also if steps are skipped, and parameters are frozen for some steps."""
    steps = random_gradients(7, 2, seed=2)

    def train(world):
        strategy, model = bound(world)
        sent = dict.fromkeys(MATRICES, 0.0)
        for number, gradients in enumerate(steps):
            model.linear.requires_grad_(requires_grad=number not in (2, 3))
            own = {n: g for n, g in gradients[world.rank].items() if getattr(model, n).requires_grad}
            is_used = number != 5
            found = step(strategy, model, own, is_used=is_used)
            for name in MATRICES.keys() & found.keys() if is_used else ():
                sent[name] = sent[name] + found[name]
        return sent, residuals(strategy)

    (sent, of_first), (same, of_second) = on_ranks(2, train)
    trained = {"linear": (0, 1, 4, 6), "convolution": (0, 1, 2, 3, 4, 6)}
    for name, numbers in trained.items():
        total = sum(steps[number][rank][name] for number in numbers for rank in (0, 1))
        kept = (of_first[name] + of_second[name]).reshape(SHAPES[name])
        np.testing.assert_allclose(sent[name] + kept, total, atol=1e-6)
        np.testing.assert_array_equal(sent[name], same[name])


def test_a_step_that_is_not_finite_changes_no_state():
    def train(world):
        strategy, model = bound(world)
        first, bad = random_gradients(2, 1)
        step(strategy, model, first[0])
        before = {name: t.clone() for name, t in strategy.rank_state().items()}
        step(strategy, model, {name: g * np.nan for name, g in bad[0].items()}, is_used=False)
        return before, strategy.rank_state()

    ((before, after),) = on_ranks(1, train)
    assert before["linear"].any()
    assert before["linear/factor"].any()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_resumed_on_fewer_ranks_sums_are_as_undisturbed():
    steps = random_gradients(6, 3, seed=3)

    def train(world):
        strategy, model = bound(world)
        sums, saved = [], None
        for number, gradients in enumerate(steps):
            if number == 3:
                saved = {name: t.clone() for name, t in strategy.rank_state().items()}
            sums.append(step(strategy, model, gradients[world.rank]))
        return sums, saved

    undisturbed = on_ranks(3, train)
    saved = [state for _, state in undisturbed]
    assert [any("/" in name for name in state) for state in saved] == [True, False, False]

    def resume(world):
        strategy, model = bound(world)
        strategy.load_rank_states(saved)
        for gradients in steps[3:]:
            first, second, third = gradients
            own = third if world.rank else {name: first[name] + second[name] for name in SHAPES}
            yield step(strategy, model, own)

    for of_rank in on_ranks(2, lambda world: list(resume(world))):
        for found, expected in zip(of_rank, undisturbed[0][0][3:], strict=True):
            for name in SHAPES:
                np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, atol=1e-9)


def test_a_message_has_the_bytes_of_the_formula():
    layout = BucketLayout(SHAPES, torch.float32, torch.device("cpu"), 7)

    for rank in (1, 2):
        matrices = sum(rank * (n + m) for n, m in MATRICES.values())
        assert PowerSgd(rank=rank).message(layout).size_bytes == 4 * (matrices + 7 + 1 + 4 + 7)


def test_ranks_that_compute_other_bits_are_refused():
    class Ranks:
        def allgather(self, data):
            return [data, data[::-1]]

    layout = BucketLayout(SHAPES, torch.float32, torch.device("cpu"), 7)
    with pytest.raises(UserError, match="QR factorizations of rank 1 and of rank 0 are not bitwise equal"):
        PowerSgd().check(Ranks(), [layout])


def job(args, **fields):
    codec = {"name": "powersgd", "args": args}
    return {"name": "j", "task": "digits", "allreduce": {"codec": codec}, **fields}


def test_a_job_states_the_ratio_of_compression():
    def train(world):
        strategy, model = bound(world)
        step(strategy, model, random_gradients(1, 2)[0][world.rank])
        return strategy.numbers()["compression_ratio"], strategy.sent_bytes

    elements = sum(int(np.prod(shape)) for shape in SHAPES.values())
    for ratio, sent_bytes in on_ranks(2, train):
        assert ratio == pytest.approx(8 * elements / sent_bytes)
        assert ratio > 2


def test_residuals_are_in_the_memory_plan():
    sizes = Sizes(*[1000] * 8, units=[100], process=10)
    with_codec = needs(JobSizes(Job.model_validate(job({"rank": 1})), 2, sizes))["allreduce"]
    without = needs(JobSizes(Job.model_validate({"name": "j", "task": "digits"}), 2, sizes))["allreduce"]

    assert with_codec.peak - without.peak == 2 * sizes.trained


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("is_used", [False, True])
def test_residuals_survive_a_step_in_which_the_trained_parameters_change(is_used, on_device):
    """A skipped step changes no residual; a used one none of other parameters, also on a device."""
    steps = random_gradients(3, 1, seed=4)

    def train(world):
        strategy, model = bound(world)
        model.convolution.requires_grad_(requires_grad=False)
        step(strategy, model, {n: g for n, g in steps[0][0].items() if n != "convolution"})
        before = residuals(strategy)
        model.convolution.requires_grad_()
        decision = torch.tensor(is_used) if on_device else is_used
        sums = step(strategy, model, steps[1][0], is_used=decision)
        return before, residuals(strategy), sums

    ((before, after, sums),) = on_ranks(1, train)
    gradient = steps[1][0]["linear"]
    expected = before["linear"] + (gradient - sums["linear"]).ravel() if is_used else before["linear"]
    np.testing.assert_allclose(after["linear"], expected, atol=1e-12)
    assert bool(after["convolution"].any()) == is_used
