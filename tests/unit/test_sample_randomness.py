"""Random numbers by sample: the same on any number of ranks, and of the right distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from programs.noisy import Images, model_of
from support.torch_threads import on_torch_ranks, run_of, weights_of
from torch import nn
from torch.nn import functional

from horovod_train.collectives.base import SingleRank
from horovod_train.config.rules import broken_rules
from horovod_train.config.schema import Job
from horovod_train.data.shard import MicroBatch
from horovod_train.errors import UserError
from horovod_train.frameworks.reader import NumpyReader, sample_seeds
from horovod_train.frameworks.torch import task as reader_module
from horovod_train.frameworks.torch.step import random
from horovod_train.frameworks.torch.step.random import SampleDraws, install
from horovod_train.frameworks.torch.task import Placement, TorchReader
from horovod_train.training.loop import evaluate, train

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
LSTM = nn.LSTM(3, 4, 2, dropout=0.5)
install()


def drawn(function, start=0, stop=8, *, seed=0, epoch=0):
    """Return what a function draws in the forward pass of a micro-batch."""
    draws = SampleDraws(seed, CPU)
    with draws.micro_batch(epoch, MicroBatch(start, stop, 1.0)), draws.forward():
        return function(stop - start)


DRAWS = {
    "dropout": lambda m: functional.dropout(torch.ones(m, 50), 0.3),
    "dropout2d": lambda m: functional.dropout2d(torch.ones(m, 40, 2, 2), 0.3),
    "rand": lambda m: torch.rand(m, 50),
    "rand of a size": lambda m: torch.rand((m, 50)),
    "randn": lambda m: torch.randn(m, 50, dtype=torch.float64),
    "rand_like": lambda m: torch.rand_like(torch.zeros(m, 50)),
    "randn_like": lambda m: torch.randn_like(torch.zeros(m, 50, dtype=torch.bfloat16)).float(),
    "randint": lambda m: torch.randint(3, 9, (m, 50)),
    "randint by keywords": lambda m: torch.randint(low=3, high=9, size=(m, 50)),
    "randint below": lambda m: torch.randint(0, high=1000, size=(m, 50)),
    "bernoulli of p": lambda m: torch.bernoulli(torch.zeros(m, 50), 0.4),
    "bernoulli method": lambda m: torch.full((m, 50), 0.4).bernoulli(),
    "uniform_ from": lambda m: torch.zeros(m, 50).uniform_(**{"from": 0.0, "to": 2.0}),
    "rand into out": lambda m: torch.rand((m, 50), out=torch.zeros(m, 50)),
    "bernoulli": lambda m: torch.bernoulli(torch.full((m, 50), 0.2)),
    "bernoulli_": lambda m: torch.zeros(m, 50).bernoulli_(0.2),
    "uniform_": lambda m: torch.zeros(m, 50).uniform_(-1, 3),
    "normal_": lambda m: torch.zeros(m, 50).normal_(2.0, 0.5),
    "exponential_": lambda m: torch.zeros(m, 50).exponential_(2.0),
    "gumbel_softmax": lambda m: functional.gumbel_softmax(torch.zeros(m, 50)),
    "attention": lambda m: functional.scaled_dot_product_attention(*torch.ones(3, m, 2, 9, 4), dropout_p=0.4),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_sample_has_the_same_numbers_in_every_micro_batch(name):
    whole = drawn(DRAWS[name], 0, 8)
    parts = torch.cat([drawn(DRAWS[name], *place) for place in ((0, 3), (3, 4), (4, 8))])

    assert torch.equal(whole, parts)
    assert not torch.equal(whole, drawn(DRAWS[name], epoch=1))
    assert not torch.equal(whole, drawn(DRAWS[name], seed=1))
    assert len({tuple(row.flatten().tolist()) for row in whole}) == 8  # no two samples have the same numbers


def test_two_calls_draw_different_numbers():
    found = torch.stack(drawn(lambda m: [torch.rand(m, 100, dtype=torch.float64) for _ in range(50)]))

    assert len(found.unique()) == 50 * 8 * 100


class TestDistributions:
    """Moments of 8 x 40,000 numbers; tolerances are six standard errors."""

    NUM = 320_000

    def check(self, numbers, mean, variance):
        numbers = numbers.double()
        assert numbers.numel() == self.NUM
        assert float(numbers.mean()) == pytest.approx(mean, abs=6 * math.sqrt(variance / self.NUM))
        assert float(numbers.var()) == pytest.approx(variance, rel=0.03)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_uniform(self, dtype):
        numbers = drawn(lambda m: torch.rand(m, 40_000, dtype=dtype))

        self.check(numbers, 1 / 2, 1 / 12)
        assert 0 <= float(numbers.min()) < float(numbers.max()) < 1
        counts = np.histogram(numbers.numpy(), bins=64, range=(0, 1))[0]
        chi = float(((counts - self.NUM / 64) ** 2 / (self.NUM / 64)).sum())
        assert 20 < chi < 130  # 63 degrees of freedom: mean 63, standard deviation 11

    def test_normal(self):
        numbers = drawn(lambda m: torch.randn(m, 40_000))

        self.check(numbers, 0, 1)
        assert float((numbers.abs() > 1.959964).float().mean()) == pytest.approx(0.05, abs=0.003)

    def test_exponential(self):
        self.check(drawn(lambda m: torch.zeros(m, 40_000).exponential_(2.0)), 1 / 2, 1 / 4)

    @pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
    def test_dropout_keeps_the_expectation(self, p):
        self.check(drawn(lambda m: functional.dropout(torch.ones(m, 40_000), p)), 1, p / (1 - p))

    def test_neighbours_are_not_correlated(self):
        rows = drawn(lambda m: torch.rand(m, 40_000)).double() - 0.5
        among = torch.corrcoef(rows) - torch.eye(8)
        of_next = (rows[:, 1:] * rows[:, :-1]).mean() * 12

        assert float(among.abs().max()) < 6 / math.sqrt(40_000)
        assert abs(float(of_next)) < 6 / math.sqrt(self.NUM)

    def test_everything_is_dropped_with_probability_one(self):
        assert not drawn(lambda m: functional.dropout(torch.ones(m, 5), 1.0)).any()


def test_attention_without_dropped_weights_is_that_of_pytorch():
    query, key, value = torch.randn(3, 8, 2, 9, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(9, 9, dtype=torch.bool).tril(2)
    for more in (
        {},
        {"is_causal": True},
        {"attn_mask": mask},
        {"attn_mask": mask.float().log()},
        {"scale": 0.3},
    ):
        expected = functional.scaled_dot_product_attention(query, key, value, **more)
        found = drawn(
            lambda _, more=more: functional.scaled_dot_product_attention(
                query, key, value, dropout_p=1e-12, **more
            )
        )

        torch.testing.assert_close(found, expected)


def test_attention_to_nothing_is_zero_as_in_pytorch():
    query, key, value = torch.ones(3, 8, 2, 9, 4)
    mask = torch.ones(9, 9, dtype=torch.bool)
    mask[0] = False
    found = drawn(
        lambda _: functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=0.5)
    )

    assert not found[:, :, 0].any()
    assert not found.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_of_few_bits_are_below_one_and_exponentials_are_finite(dtype):
    numbers, exponentials = drawn(
        lambda m: (torch.rand(m, 50_000, dtype=dtype), torch.zeros(m, 50_000, dtype=dtype).exponential_())
    )

    assert float(numbers.max()) < 1
    assert exponentials.isfinite().all()
    assert float(drawn(lambda m: torch.zeros(m, 500_000).exponential_()).min()) > 0


def test_filling_a_tensor_discards_the_gradient_of_its_former_values():
    x = torch.ones(8, 3, requires_grad=True)
    (drawn(lambda _: x.clone().normal_()) * 2).sum().backward()

    assert not x.grad.any()


def test_a_gradient_within_the_loss_does_not_recompute():
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

    def penalty(m):
        x = torch.ones(m, 4, requires_grad=True)
        out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return torch.autograd.grad(out.sum(), x, create_graph=True)[0].sum()

    with pytest.raises(UserError, match="dropout is called in the backward pass"):
        drawn(penalty)


def test_outside_of_a_forward_pass_pytorch_is_unchanged():
    SampleDraws(0, CPU)
    torch.manual_seed(5)
    first = torch.rand(3), functional.dropout(torch.ones(9), 0.5), torch.zeros(2).normal_()
    torch.manual_seed(5)
    second = torch.rand(3), functional.dropout(torch.ones(9), 0.5), torch.zeros(2).normal_()

    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m: torch.rand(m + 1, 4), r"rand of shape \[9, 4\] cannot be mapped to samples: its first"),
        (lambda _: torch.rand(()), r"rand of shape \[\] cannot be mapped"),
        (lambda _: functional.dropout(torch.ones(5, 8, 2)), r"dropout of shape \[5, 8, 2\] cannot be mapped"),
        (lambda m: torch.rand(m, generator=torch.Generator()), "rand is called with a generator"),
        (lambda m: torch.rand(m, 2, dtype=torch.cfloat), "rand of torch.complex64 is not supported"),
        (lambda _: torch.randperm(4), "draws random numbers that cannot be mapped to samples: randperm"),
        (lambda _: np.random.rand(), "draws random numbers that cannot be mapped to samples"),
        (
            lambda m: LSTM(torch.ones(7, m, 3)),
            "draws random numbers that cannot be mapped to samples: .*(dropout|bernoulli)",
        ),
    ],
)
def test_numbers_that_belong_to_no_sample_are_refused_with_their_name(function, message):
    state = np.random.get_state()
    try:
        with pytest.raises(UserError, match=message):
            drawn(function)
    finally:
        np.random.set_state(state)


def test_recomputation_in_the_backward_pass_is_refused():
    draws, layer = SampleDraws(0, CPU), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    with pytest.raises(UserError, match="dropout is called in the backward pass, as recomputation"):  # noqa: PT012, SIM117
        with draws.micro_batch(0, MicroBatch(0, 8, 1.0)):
            with draws.forward():
                out = torch.utils.checkpoint.checkpoint(layer, torch.ones(8, 4), use_reentrant=False)
            out.sum().backward()


def test_seeds_of_samples_differ():
    seeds = {
        int(each)
        for seed in range(3)
        for epoch in range(3)
        for each in sample_seeds(seed, epoch, range(1000))
    }
    assert len(seeds) == 9000


def fields_of(**more):
    return {
        "name": "noisy", "task": "programs.noisy:Noisy",
        "lr": {"base_lr": 0.1, "scaling": "none"}, "optimizer": {"args": {"momentum": 0.9}},
        **more,
        "train": {"epochs": 4, "global_batch_size": 6, "batch_size_per_rank": 4, "randomness": "sample",
                  "device": "cpu", "seed": 3, **more.get("train", {})},
    }  # fmt: skip


def weights_on(size, **more):
    model_of(more.get("task_args", {}).get("kind", "transformer"))

    def rank(world):
        _, run = run_of(world, fields_of(**more))
        train(run)
        assert run.progress.step >= 30
        return weights_of(run.replica.model)

    results = on_torch_ranks(size, rank)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results[0]


@pytest.fixture
def shared_generators(monkeypatch):
    """Threads share the default generators, which other ranks seed to read their samples."""
    monkeypatch.setattr(random, "_default_states", tuple)
    monkeypatch.setattr(reader_module, "_CheckedCollate", lambda collate: collate)


@pytest.mark.usefixtures("shared_generators")
class TestTraining:
    @pytest.mark.parametrize("kind", ["transformer", "convolution"])
    @pytest.mark.parametrize("strategy", ["allreduce", "zero"])
    @pytest.mark.parametrize("size", [2, 3])
    def test_gives_the_weights_of_one_rank(self, kind, strategy, size):
        alone = weights_on(1, task_args={"kind": kind})
        together = weights_on(size, task_args={"kind": kind}, strategy=strategy)

        assert float((together - alone).abs().max()) <= 2e-6

    def test_evaluates_with_the_same_numbers_on_any_ranks_and_each_time(self):
        model_of("transformer")

        def metrics_on(size, batch_size):
            def rank(world):
                fields = fields_of(task="programs.noisy:Evaluated")
                _, run = run_of(world, fields, evaluation={"batch_size_per_rank": batch_size})
                return [evaluate(run), evaluate(run)]

            first, second = on_torch_ranks(size, rank)[0]
            assert first == second
            return first

        alone = metrics_on(1, 50)

        for size, batch_size in ((1, 8), (2, 8), (3, 4)):
            assert metrics_on(size, batch_size) == pytest.approx(alone, rel=1e-5)

    def test_evaluates_with_a_warning_what_cannot_be_drawn_by_sample(self, caplog, monkeypatch):
        monkeypatch.undo()  # on one rank, no other thread shares the generators
        _, run = run_of(SingleRank(), fields_of(task="programs.noisy:EvaluatedOtherwise"))

        first, second = evaluate(run), evaluate(run)

        assert first["loss"] == second["loss"]
        assert first["latent"] != second["latent"]
        assert caplog.text.count("results depend on the number of ranks") == 1

    def test_gives_other_weights_by_rank(self):
        by_rank = {"train": {"randomness": "rank"}}

        assert float((weights_on(1, **by_rank) - weights_on(2, **by_rank)).abs().max()) > 1e-3

    def test_does_not_depend_on_how_samples_are_read(self):
        one, many = (weights_on(1, task_args={"data": data}) for data in ("crops", "many"))

        assert torch.equal(one, many)

    def test_verifies_strategies_with_the_same_numbers(self):
        """The plain model of the verification draws the numbers of the replica."""
        assert torch.isfinite(weights_on(2, strategy="zero", health={"verify_strategy": True})).all()


def test_numpy_data_is_augmented_by_sample():
    class Random:
        def __len__(self):
            return 10

        def __getitem__(self, index):
            return np.random.rand(2)

    def read(*pieces):
        reader = NumpyReader(Random(), Job(name="x", task="y").data, 0, by_sample=True)
        order = np.arange(10)[::-1].copy()
        return np.concatenate(list(reader.read(0, order, [MicroBatch(*piece, 0.1) for piece in pieces])))

    assert np.array_equal(read((0, 10)), read((0, 4), (4, 5), (5, 10)))


@pytest.mark.parametrize("draw", [np.random.rand, torch.rand, lambda _: __import__("random").random()])
def test_a_collate_that_draws_is_refused(draw):
    class Mixed(Images):
        def collate(self, samples):
            draw(1)
            return torch.utils.data.default_collate(samples)

    data = Job(name="x", task="y").data
    reader = TorchReader(Mixed(), data, 0, Placement(CPU), by_sample=True)

    with pytest.raises(UserError, match="collate draws random numbers"):
        list(reader.read(0, np.arange(50), [MicroBatch(0, 4, 1.0)]))


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"train": {"compile": {"backend": "aot_eager"}}}, "train.compile"),
        ({"train": {"activation_checkpointing": ["layers.*"]}}, "train.activation_checkpointing"),
        ({"strategy": "adasum"}, "train.randomness"),
        ({"framework": "tensorflow", "task": "m:T"}, "train.randomness"),
    ],
)
def test_what_cannot_draw_by_sample_is_refused(fields, path):
    job = Job.model_validate(
        {"name": "x", "task": "m:T", **fields, "train": {**fields.get("train", {}), "randomness": "sample"}}
    )
    (problem,) = broken_rules(job)

    assert problem.path == path
