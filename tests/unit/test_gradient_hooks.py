"""A hook of a gradient sees the gradient of the step, as in one process, on any number of ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from support.worlds import on_ranks
from torch import nn

from horovod_train.collectives.base import SingleRank
from horovod_train.config.schema import Allreduce, Train
from horovod_train.data.shard import PlannedStep, share_of_step
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.step.gradient_hooks import defer_hooks_after_accumulation
from horovod_train.frameworks.torch.step.replica import TorchReplica
from horovod_train.frameworks.torch.strategies.allreduce.strategy import make_allreduce

LIMIT, LR, NUM_SAMPLES = 0.01, 0.5, 12
MODEL = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
INPUTS = torch.randn(NUM_SAMPLES, 3, dtype=torch.float64)
COUNTS = torch.arange(1.0, NUM_SAMPLES + 1, dtype=torch.float64)


def mean(model, batch):
    return model(INPUTS[batch]).square().mean()


def sum_and_count(model, batch):
    return (model(INPUTS[batch]).square().sum(1) * COUNTS[batch]).sum(), COUNTS[batch].sum()


class Task:
    def __init__(self, loss):
        self.loss = loss


def clamped(gradient):
    return gradient.clamp(-LIMIT, LIMIT)


def clamp_in_place(parameter):
    parameter.grad.clamp_(-LIMIT, LIMIT)


def replace(parameter):
    parameter.grad = clamped(parameter.grad)


def discard(parameter):
    parameter.grad = None


HOOKS = {
    "clamps": lambda p: p.register_hook(clamped),
    "is removed": lambda p: p.register_hook(clamped).remove(),
    "clamps and doubles": lambda p: (p.register_hook(clamped), p.register_hook(lambda g: 2 * g)),
    "clamps after accumulation": lambda p: p.register_post_accumulate_grad_hook(clamp_in_place),
    "replaces after accumulation": lambda p: p.register_post_accumulate_grad_hook(replace),
    "discards after accumulation": lambda p: p.register_post_accumulate_grad_hook(discard),
}


def with_hooks(name):
    model = copy.deepcopy(MODEL)
    for parameter in model.parameters():
        HOOKS[name](parameter)
    return model


def of_one_process(name, loss):
    """The weights after a step of PyTorch alone."""
    model = with_hooks(name)
    value = loss(model, torch.arange(NUM_SAMPLES))
    (value[0] / value[1] if isinstance(value, tuple) else value).backward()
    torch.optim.SGD(model.parameters(), lr=LR).step()
    return [p.detach() for p in model.parameters()]


def of_ranks(world, name, loss, accumulation):
    model = with_hooks(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    defer_hooks_after_accumulation(model)
    strategy = make_allreduce(world, Allreduce())
    strategy.bind(model, optimizer)
    made = TorchReplica(
        model=model, optimizer=optimizer, strategy=strategy, data_ranks=world, train=Train(), task=Task(loss)
    )
    size = NUM_SAMPLES // world.size // accumulation
    share = share_of_step(
        0, NUM_SAMPLES, batch_size=size, accumulation_steps=accumulation, rank=world.rank, size=world.size
    )
    batches = iter([torch.arange(each.start, each.stop) for each in share.micro_batches])
    made.step(PlannedStep(share, batches), LR, want_norm=False)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("loss", [mean, sum_and_count], ids=["mean", "sum and count"])
@pytest.mark.parametrize(("size", "accumulation"), [(1, 1), (1, 3), (2, 1), (3, 2)])
@pytest.mark.parametrize("name", HOOKS)
def test_ranks_train_as_one_process_with_hooks(name, size, accumulation, loss):
    expected = of_one_process(name, loss)
    found = (
        [of_ranks(SingleRank(), name, loss, accumulation)]
        if size == 1
        else on_ranks(size, lambda world: of_ranks(world, name, loss, accumulation))
    )

    for weights in found:
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-15)
    is_trained = any(
        not torch.equal(a, b.detach()) for a, b in zip(expected, MODEL.parameters(), strict=True)
    )
    assert is_trained == (name != "discards after accumulation")


def test_a_hook_of_several_gradients_runs_within_the_backward_pass():
    seen = []

    def observed(world):
        model = copy.deepcopy(MODEL)
        torch.autograd.graph.register_multi_grad_hook(
            list(model.parameters()), lambda gradients: seen.append(len(gradients))
        )
        strategy = make_allreduce(world, Allreduce())
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        strategy.bind(model, optimizer)
        made = TorchReplica(
            model=model,
            optimizer=optimizer,
            strategy=strategy,
            data_ranks=world,
            train=Train(),
            task=Task(mean),
        )
        share = share_of_step(
            0, NUM_SAMPLES, batch_size=6, accumulation_steps=1, rank=world.rank, size=world.size
        )
        made.step(PlannedStep(share, iter([torch.arange(6)])), LR, want_norm=False)

    assert on_ranks(2, observed) == [None, None]
    assert seen == [4, 4]


def test_a_hook_that_the_loss_registers_is_refused():
    def registers(model, batch):
        model[0].weight.register_hook(clamped)
        return mean(model, batch)

    for error in on_ranks(2, lambda world: of_ranks(world, "is removed", registers, 1)):
        assert isinstance(error, UserError)
        assert "registers a hook of a parameter's gradient" in error.message
