"""Gradients of several ranks become the gradient of the joint batch; ranks are threads here."""

from __future__ import annotations

import copy

import pytest
import torch
from support.worlds import on_ranks
from torch import nn

from horovod_train.errors import UserError
from horovod_train.frameworks.torch.reducer import GradientReducer, make_buckets


class ThreadWire:
    """Sums tensors over the threads of a world."""

    def __init__(self, world):
        self.world = world
        self.sent = []

    def start_sum(self, tensor, name):
        self.sent.append(name)
        return tensor, name

    def finish(self, handle):
        tensor, _ = handle
        pieces = self.world.gather(tensor.double().numpy().tobytes())
        total = sum(torch.frombuffer(bytearray(piece), dtype=torch.float64) for piece in pieces)
        tensor.copy_(total)


MODEL = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def make_model():
    """A copy for a rank: threads share the random generator, so they cannot each draw their own."""
    return copy.deepcopy(MODEL)


def joint_gradient(inputs, targets):
    model = make_model()
    nn.functional.mse_loss(model(inputs), targets).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("bucket_size_bytes", [1, 64, 10**6])
def test_uneven_ranks_get_the_gradient_of_the_joint_batch(size, bucket_size_bytes):
    inputs, targets = torch.randn(7, 4), torch.randn(7, 2)
    pieces = torch.tensor_split(torch.arange(7), size)

    def rank(world):
        model = make_model()
        reducer = GradientReducer(model.parameters(), ThreadWire(world), bucket_size_bytes=bucket_size_bytes)
        loss = torch.zeros(())
        mine = pieces[world.rank]
        if len(mine):
            reducer.expect_last()
            loss = nn.functional.mse_loss(model(inputs[mine]), targets[mine]) * (len(mine) / 7)
            loss.backward()
        total = reducer.finish(loss.detach())
        return float(total), [p.grad.clone() for p in model.parameters()]

    expected = joint_gradient(inputs, targets)
    expected_loss = float(nn.functional.mse_loss(make_model()(inputs), targets).detach())
    for loss, gradients in on_ranks(size, rank):
        assert loss == pytest.approx(expected_loss, abs=1e-6)
        for found, wanted in zip(gradients, expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


def test_only_the_last_micro_step_communicates():
    def rank(world):
        model = make_model()
        wire = ThreadWire(world)
        reducer = GradientReducer(model.parameters(), wire, bucket_size_bytes=1)
        model(torch.ones(1, 4)).sum().backward()
        before = len(wire.sent)
        reducer.expect_last()
        model(torch.ones(1, 4)).sum().backward()
        during = len(wire.sent)
        reducer.finish(torch.zeros(()))
        return before, during, len(wire.sent), len(reducer.buckets)

    ((before, during, after, num_buckets),) = on_ranks(1, rank)
    assert before == 0
    assert during == num_buckets - 1  # the last bucket carries the loss and waits for it
    assert after == num_buckets


def test_a_parameter_that_no_rank_used_has_no_gradient():
    def rank(world):
        used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
        reducer = GradientReducer([used, unused], ThreadWire(world), bucket_size_bytes=1)
        reducer.expect_last()
        used.sum().backward()
        reducer.finish(torch.zeros(()))
        return used.grad, unused.grad

    for used, unused in on_ranks(2, rank):
        assert used.tolist() == [2, 2, 2]
        assert unused is None


def test_a_parameter_that_one_rank_used_has_its_gradient_on_all():
    def rank(world):
        always, sometimes = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
        reducer = GradientReducer([always, sometimes], ThreadWire(world), bucket_size_bytes=1)
        reducer.expect_last()
        (always.sum() + (sometimes.sum() if world.rank == 1 else 0)).backward()
        reducer.finish(torch.zeros(()))
        return sometimes.grad

    assert [gradient.tolist() for gradient in on_ranks(3, rank)] == [[1, 1]] * 3


def test_steps_do_not_leak_into_each_other():
    def rank(world):
        model = make_model()
        reducer = GradientReducer(model.parameters(), ThreadWire(world), bucket_size_bytes=64)
        found = []
        for value in (1.0, 3.0):
            model.zero_grad()
            reducer.expect_last()
            model(torch.full((1, 4), value)).sum().backward()
            reducer.finish(torch.zeros(()))
            found.append([p.grad.clone() for p in model.parameters()])
        return found

    (steps,) = on_ranks(1, rank)
    for value, gradients in zip((1.0, 3.0), steps, strict=True):
        model = make_model()
        model(torch.full((1, 4), value)).sum().backward()
        for found, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_both_ways_of_clearing_gradients_work(set_to_none):
    def rank(world):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([parameter], lr=0)
        reducer = GradientReducer([parameter], ThreadWire(world), bucket_size_bytes=1)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            reducer.expect_last()
            parameter.sum().backward()
            reducer.finish(torch.zeros(()))
        return parameter.grad.tolist()

    assert on_ranks(2, rank) == [[2, 2, 2]] * 2


def test_sparse_gradients_are_summed_densely():
    def rank(world):
        embedding = nn.Embedding(4, 2, sparse=True)
        reducer = GradientReducer(embedding.parameters(), ThreadWire(world), bucket_size_bytes=1)
        reducer.expect_last()
        embedding(torch.tensor([world.rank])).sum().backward()
        reducer.finish(torch.zeros(()))
        return embedding.weight.grad.tolist()

    assert on_ranks(2, rank) == [[[1, 1], [1, 1], [0, 0], [0, 0]]] * 2


def test_a_second_gradient_in_one_backward_is_refused():
    def rank(world):
        parameter, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        reducer = GradientReducer([parameter, other], ThreadWire(world), bucket_size_bytes=1)
        reducer.expect_last()
        parameter.sum().backward()
        parameter.sum().backward()

    assert isinstance(on_ranks(1, rank)[0], UserError)


def test_buckets_keep_types_apart_and_the_last_one_wide():
    parameters = [
        nn.Parameter(torch.ones(10, dtype=d)) for d in (torch.float32, torch.float64, torch.bfloat16)
    ]

    buckets = make_buckets(parameters, 10**6, torch.float16)

    assert [b.gradients.dtype for b in buckets] == [torch.bfloat16, torch.float64, torch.float32]
    assert [b.packed.dtype for b in buckets] == [torch.float16, torch.float64, torch.float32]
    assert len(buckets[-1].extra) == len(parameters) + 1
