"""Gradients of several ranks become the gradient of the joint batch; ranks are threads here."""

from __future__ import annotations

import copy

import pytest
import torch
from support.worlds import on_ranks
from torch import nn
from torch.nn.utils import get_total_norm

from horovod_train.errors import UserError
from horovod_train.frameworks.torch.codecs import Dense
from horovod_train.frameworks.torch.comm.buckets import make_buckets
from horovod_train.frameworks.torch.state.local import OptimizedParameters, check_same_trained
from horovod_train.frameworks.torch.strategies.allreduce.strategy import AllreduceStrategy, SingleRankStrategy


class Given:
    """Parameters that are trained, as an optimizer would say it."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    def count(self):
        return len(self.parameters)

    def named(self):
        return {f"p{number}": parameter for number, parameter in enumerate(self.parameters)}


def reducer_of(optimized, ranks, *, wire_dtype=torch.float32, **options):
    strategy = AllreduceStrategy(ranks, codec=Dense(wire_dtype), **options)
    strategy.sum_gradients_of(optimized)
    return strategy


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
        reducer = reducer_of(Given(model.parameters()), world, bucket_size_bytes=bucket_size_bytes)
        loss = torch.zeros(())
        mine = pieces[world.rank]
        if len(mine):
            reducer.prepare_backward(is_last=True)
            loss = nn.functional.mse_loss(model(inputs[mine]), targets[mine]) * (len(mine) / 7)
            loss.backward()
        total = reducer.reduce(loss.detach())
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
        reducer = reducer_of(Given(model.parameters()), world, bucket_size_bytes=1)
        model(torch.ones(1, 4)).sum().backward()
        before = len(world.sent)
        reducer.prepare_backward(is_last=True)
        model(torch.ones(1, 4)).sum().backward()
        during = len(world.sent)
        reducer.reduce(torch.zeros(()))
        return before, during, len(world.sent), len(reducer.pipeline.buckets)

    ((before, during, after, num_buckets),) = on_ranks(1, rank)
    assert before == 0
    assert during == num_buckets - 1  # the last bucket carries the loss and waits for it
    assert after == num_buckets


def test_a_parameter_that_no_rank_used_has_no_gradient():
    def rank(world):
        used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
        reducer = reducer_of(Given([used, unused]), world, bucket_size_bytes=1)
        reducer.prepare_backward(is_last=True)
        used.sum().backward()
        reducer.reduce(torch.zeros(()))
        return used.grad, unused.grad

    for used, unused in on_ranks(2, rank):
        assert used.tolist() == [2, 2, 2]
        assert unused is None


def test_a_parameter_that_one_rank_used_has_its_gradient_on_all():
    def rank(world):
        always, sometimes = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
        reducer = reducer_of(Given([always, sometimes]), world, bucket_size_bytes=1)
        reducer.prepare_backward(is_last=True)
        (always.sum() + (sometimes.sum() if world.rank == 1 else 0)).backward()
        reducer.reduce(torch.zeros(()))
        return sometimes.grad

    assert [gradient.tolist() for gradient in on_ranks(3, rank)] == [[1, 1]] * 3


def test_steps_do_not_leak_into_each_other():
    def rank(world):
        model = make_model()
        reducer = reducer_of(Given(model.parameters()), world, bucket_size_bytes=64)
        found = []
        for value in (1.0, 3.0):
            model.zero_grad()
            reducer.prepare_backward(is_last=True)
            model(torch.full((1, 4), value)).sum().backward()
            reducer.reduce(torch.zeros(()))
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
        reducer = reducer_of(Given([parameter]), world, bucket_size_bytes=1)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            reducer.prepare_backward(is_last=True)
            parameter.sum().backward()
            reducer.reduce(torch.zeros(()))
        return parameter.grad.tolist()

    assert on_ranks(2, rank) == [[2, 2, 2]] * 2


def test_sparse_gradients_are_summed_densely():
    def rank(world):
        embedding = nn.Embedding(4, 2, sparse=True)
        reducer = reducer_of(Given(embedding.parameters()), world, bucket_size_bytes=1)
        reducer.prepare_backward(is_last=True)
        embedding(torch.tensor([world.rank])).sum().backward()
        reducer.reduce(torch.zeros(()))
        return embedding.weight.grad.tolist()

    assert on_ranks(2, rank) == [[[1, 1], [1, 1], [0, 0], [0, 0]]] * 2


def test_a_second_gradient_in_one_backward_is_refused():
    def rank(world):
        parameter, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        reducer = reducer_of(Given([parameter, other]), world, bucket_size_bytes=1)
        reducer.prepare_backward(is_last=True)
        parameter.sum().backward()
        parameter.sum().backward()

    assert isinstance(on_ranks(1, rank)[0], UserError)


def buckets_of(parameters, size_bytes, codec):
    named = {f"p{number}": parameter for number, parameter in enumerate(parameters)}
    return make_buckets(named, size_bytes, codec.message, len(named) + 2)


def test_buckets_keep_types_apart_and_the_last_one_wide():
    parameters = [
        nn.Parameter(torch.ones(10, dtype=d)) for d in (torch.float32, torch.float64, torch.bfloat16)
    ]

    buckets = buckets_of(parameters, 10**6, Dense(torch.float16))

    assert [b.gradients.dtype for b in buckets] == [torch.bfloat16, torch.float64, torch.float32]
    assert [b.message.body.dtype for b in buckets] == [torch.float16, torch.float64, torch.float32]
    assert len(buckets[-1].message.trailer) == len(parameters) + 2


def test_neighbours_of_one_type_share_a_bucket_whatever_came_before():
    dtypes = [torch.float64, torch.float64, torch.float32, torch.float64, torch.float32, torch.float32]
    parameters = [nn.Parameter(torch.ones(10, dtype=dtype)) for dtype in dtypes]

    buckets = buckets_of(parameters, 10**6, Dense(torch.float32))

    assert [[slot.index for slot in bucket.slots] for bucket in buckets] == [[5, 4], [3], [2], [1, 0]]


def test_a_bucket_is_full_with_its_size():
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(6)]

    for size_bytes, widths in ((16, [2, 2, 2]), (17, [3, 3]), (8, [1] * 6)):
        buckets = buckets_of(parameters, size_bytes, Dense(torch.float32))
        assert [len(bucket.slots) for bucket in buckets] == widths


class Model(nn.Module):
    """A head that trains from the start, and a body that is unfrozen later."""

    def __init__(self):
        super().__init__()
        make = torch.Generator().manual_seed(5)
        self.body = nn.Parameter(torch.randn(4, 3, generator=make), requires_grad=False)
        self.head = nn.Parameter(torch.randn(3, generator=make))

    def forward(self, inputs):
        return torch.tanh(inputs @ self.body) @ self.head


def loss_of(model, inputs, targets):
    return nn.functional.mse_loss(model(inputs), targets)


INPUTS = torch.randn(12, 4, generator=torch.Generator().manual_seed(6))
TARGETS = torch.randn(12, generator=torch.Generator().manual_seed(7))


def train(world, change, num_steps=6, accumulation=1):
    """Train with momentum; ``change`` may change what is trained before a step. Returns the weights."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reducer = reducer_of(OptimizedParameters(model, optimizer), world, bucket_size_bytes=16)
    pieces = torch.arange(12).chunk(world.size * accumulation)
    mine = pieces[world.rank * accumulation : (world.rank + 1) * accumulation]
    for step in range(num_steps):
        change(step, model, optimizer, world.rank)
        model.zero_grad()
        for piece in mine:
            if piece is mine[-1]:
                reducer.prepare_backward(is_last=True)
            (loss_of(model, INPUTS[piece], TARGETS[piece]) * len(piece) / 12).backward()
        reducer.reduce(torch.zeros(()))
        optimizer.step()
    reducer.close()
    return [p.detach().clone() for p in model.parameters()]


def train_alone(change, num_steps=6):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(num_steps):
        change(step, model, optimizer, 0)
        model.zero_grad()
        loss_of(model, INPUTS, TARGETS).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def unfreeze(step, model, optimizer, rank):
    model.body.requires_grad_(step >= 2)


def unfreeze_and_freeze_again(step, model, optimizer, rank):
    model.body.requires_grad_(2 <= step < 4)


def exchange_what_is_trained(step, model, optimizer, rank):
    model.body.requires_grad_(step >= 2)
    model.head.requires_grad_(step < 2)


def add_a_group(step, model, optimizer, rank):
    if step == 0:
        optimizer.param_groups[0]["params"] = [model.head]
    if step == 3:
        model.body.requires_grad_()
        optimizer.add_param_group({"params": [model.body], "lr": 0.05})


class TestWhatIsTrainedMayChange:
    @pytest.mark.parametrize(
        "change", [unfreeze, unfreeze_and_freeze_again, exchange_what_is_trained, add_a_group]
    )
    @pytest.mark.parametrize("size", [1, 2, 3])
    @pytest.mark.parametrize("accumulation", [1, 2])
    def test_and_ranks_train_like_one_process(self, change, size, accumulation):
        expected = train_alone(change)

        found = on_ranks(size, lambda world: train(world, change, accumulation=accumulation))

        for weights in found:
            for mine, theirs in zip(weights, expected, strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)
            assert all(torch.equal(a, b) for a, b in zip(weights, found[0], strict=True))
        start = Model()
        assert not torch.equal(found[0][0], start.body)

    def test_and_ranks_that_differ_are_told_by_name_on_all_of_them(self):
        def on_one_rank(step, model, optimizer, rank):
            model.body.requires_grad_(step >= 2 and rank == 1)

        for error in on_ranks(3, lambda world: train(world, on_one_rank)):
            assert isinstance(error, UserError)
            assert "rank 1 trains 'body' and ranks 0, 2 do not" in str(error)

    def test_and_an_optimizer_that_leaves_the_model_is_told_by_all(self):
        def leave(step, model, optimizer, rank):
            if step == 1 and rank == 0:
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})

        for error in on_ranks(2, lambda world: train(world, leave)):
            assert "rank 0: the optimizer trains parameters that are not in the model" in str(error)

    def test_and_what_is_new_is_in_the_norm_of_its_first_step(self):
        def rank(world):
            model = Model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            reducer = reducer_of(OptimizedParameters(model, optimizer), world, bucket_size_bytes=16)
            model.body.requires_grad_()
            reducer.prepare_backward(is_last=True)
            (loss_of(model, INPUTS, TARGETS) / world.size).backward()
            reducer.reduce(torch.zeros(()))
            return float(get_total_norm(reducer.gradients()))

        model = Model()
        model.body.requires_grad_()
        loss_of(model, INPUTS, TARGETS).backward()
        expected = float(get_total_norm([p.grad for p in model.parameters()]))
        assert on_ranks(2, rank) == pytest.approx([expected] * 2, rel=1e-6)

    def test_and_what_is_new_but_unused_has_no_gradient(self):
        """With a gradient of zeros, momentum and weight decay would move it."""

        def rank(world):
            used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2), requires_grad=False)
            head = nn.Parameter(torch.ones(3))
            used.requires_grad_(requires_grad=False)
            reducer = reducer_of(Given([head, used, unused]), world, bucket_size_bytes=1)
            for parameter in (used, unused):
                parameter.requires_grad_()
            reducer.prepare_backward(is_last=True)
            (head * used).sum().backward()
            reducer.reduce(torch.zeros(()))
            return used.grad.tolist(), unused.grad

        assert on_ranks(2, rank) == [([2, 2, 2], None)] * 2

    def test_but_not_to_nothing(self):
        def rank(world):
            parameter = nn.Parameter(torch.ones(2))
            reducer = reducer_of(Given([parameter]), world, bucket_size_bytes=16)
            parameter.requires_grad_(requires_grad=False)
            reducer.reduce(torch.zeros(()))

        assert all("no parameter requires a gradient" in str(error) for error in on_ranks(2, rank))


class TestComplexParameters:
    @pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
    @pytest.mark.parametrize("wire_dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_are_summed_like_in_one_process(self, dtype, wire_dtype, size):
        make = torch.Generator().manual_seed(2)
        start = [
            torch.randn(3, generator=make),
            torch.randn(5, 3, dtype=dtype, generator=make),
            torch.randn((), dtype=dtype, generator=make),
        ]
        inputs = torch.randn(6, 5, dtype=dtype, generator=make)

        def loss_of_part(parameters, part, share):
            real, matrix, factor = parameters
            found = (part @ matrix) * real * factor.conj()
            return found.abs().square().mean() * share

        def rank(world):
            parameters = [nn.Parameter(tensor.clone()) for tensor in start]
            reducer = reducer_of(Given(parameters), world, bucket_size_bytes=1, wire_dtype=wire_dtype)
            part = inputs.chunk(size)[world.rank]
            reducer.prepare_backward(is_last=True)
            loss = loss_of_part(parameters, part, len(part) / 6)
            loss.backward()
            reducer.reduce(loss.detach())
            return [p.grad.clone() for p in parameters], float(get_total_norm(reducer.gradients()))

        alone = [nn.Parameter(tensor.clone()) for tensor in start]
        loss_of_part(alone, inputs, 1.0).backward()
        norm = float(get_total_norm([p.grad.abs() for p in alone]))
        rounding = 1e-6 if wire_dtype == torch.float32 else 2e-3
        for gradients, found_norm in on_ranks(size, rank):
            assert found_norm == pytest.approx(norm, rel=10 * rounding)
            for mine, theirs in zip(gradients, (p.grad for p in alone), strict=True):
                assert mine.dtype == theirs.dtype
                torch.testing.assert_close(mine, theirs, rtol=rounding, atol=rounding * float(norm))


def test_sparse_gradients_of_one_process_are_dense_as_on_several_ranks():
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1, momentum=0.9)
    gradients = SingleRankStrategy()
    gradients.bind(embedding, optimizer)

    embedding(torch.tensor([1, 1])).sum().backward()
    gradients.reduce(torch.zeros(()))

    assert gradients.gradients()[0].tolist() == [[0, 0], [2, 2], [0, 0], [0, 0]]
    assert float(get_total_norm(gradients.gradients())) == pytest.approx(8**0.5)
    optimizer.step()


@pytest.mark.parametrize(
    ("everyone", "said"),
    [
        ([("", [["a", [2], "f"]]), ("", [["a", [3], "f"]])], "of different shapes, types or order"),
        ([("", [["a", [2], "f"], ["b", [1], "f"]]), ("", [["b", [1], "f"], ["a", [2], "f"]])], "or order"),
        (
            [("", [["a", [2], "f"]]), ("", []), ("", [["a", [2], "f"]])],
            "ranks 0, 2 train 'a' and rank 1 does not",
        ),
        ([("", []), ("not in the model", []), ("neither", [])], "rank 1: not in the model"),
    ],
)
def test_ranks_that_train_different_things_are_told_apart(everyone, said):
    with pytest.raises(UserError, match=said):
        check_same_trained(everyone)


def test_ranks_that_train_the_same_are_not_told_anything():
    check_same_trained([("", [["a", [2], "f"]])] * 3)
