"""The training step does to the weights what it should, and nothing else."""

from __future__ import annotations

import copy
import math
import re
from functools import partial

import numpy as np
import pytest
import safetensors.torch
import torch
from support.worlds import on_ranks
from torch import nn

from horovod_train.checkpoint.inspect import export
from horovod_train.checkpoint.manager import CheckpointManager
from horovod_train.collectives.base import Mesh, SingleRank
from horovod_train.config.optimization import Ema
from horovod_train.config.schema import Checkpoint, Health, Job, Train
from horovod_train.data.shard import MicroBatch, PlannedStep, PlannedSteps, share_of_step
from horovod_train.errors import CheckpointError, UserError
from horovod_train.frameworks.torch.codecs import fp32
from horovod_train.frameworks.torch.framework import (
    TorchFramework,
    recompute_activations,
)
from horovod_train.frameworks.torch.step import watches as watches_module
from horovod_train.frameworks.torch.step.averages import Averaging
from horovod_train.frameworks.torch.step.replica import TorchReplica
from horovod_train.frameworks.torch.step.watches import Rotation, WeightWatch
from horovod_train.frameworks.torch.strategies.allreduce.strategy import AllreduceStrategy, SingleRankStrategy

MODEL = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
BATCH = torch.randn(6, 3)


class Task:
    """Its loss can be made to go wrong."""

    def __init__(self, poison=lambda loss: loss):
        self.poison = poison

    def loss(self, model, batch):
        return self.poison(model(batch).square().mean())


def replica(
    world=None, *, trained=None, task=None, optimizer=torch.optim.SGD, guard=False, averaging=None, **train
):
    model = copy.deepcopy(MODEL)
    parameters = list(trained(model) if trained else model.parameters())
    world = world or SingleRank()
    made = optimizer(parameters, lr=0.1)
    alone = world.size == 1
    strategy = SingleRankStrategy() if alone else AllreduceStrategy(world, codec=fp32(), bucket_size_bytes=16)
    strategy.bind(model, made)
    return TorchReplica(
        model=model,
        optimizer=made,
        strategy=strategy,
        data_ranks=world,
        train=Train(**train),
        task=task or Task(),
        health=Health(non_finite="skip" if guard else "stop"),
        averaging=averaging,
    )


def steps(made, count):
    size, rank = made.data_ranks.size, made.data_ranks.rank
    outcomes = []
    for _ in range(count):
        share = share_of_step(0, 6, batch_size=6, accumulation_steps=1, rank=rank, size=size)
        batches = (BATCH[micro.start : micro.stop] for micro in share.micro_batches)
        outcomes.append(made.step(PlannedStep(share, batches), 0.1, want_norm=True))
    return outcomes


def weights(made):
    return [p.detach().clone() for p in made.model.parameters()]


@pytest.mark.parametrize("size", [1, 2])
def test_what_the_optimizer_does_not_train_stays_and_never_piles_up(size):
    def rank(world):
        made = replica(world, trained=lambda model: model[2].parameters(), clip_grad_norm=1.0)
        norms = [outcome.grad_norm for outcome in steps(made, 40)]
        return norms, weights(made)

    for norms, after in on_ranks(size, rank):
        assert all(torch.equal(a, b) for a, b in zip(after[:4], list(MODEL.parameters())[:4], strict=True))
        assert norms[-1] < norms[0], "the gradient of what is trained falls; nothing else is in the norm"
        assert not torch.equal(after[4], list(MODEL.parameters())[4])


def test_an_optimizer_of_something_outside_the_model_is_refused():
    outside = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*MODEL.parameters(), outside], lr=0.1)

    with pytest.raises(UserError, match="not in the model"):
        SingleRankStrategy().bind(MODEL, optimizer)


def bad_gradient(loss):
    """A finite loss whose gradient is infinite: the square root at zero."""
    return loss * 0 + (loss - loss.detach()).abs().sqrt() + loss.detach()


@pytest.mark.parametrize("poison", [bad_gradient, lambda loss: loss * float("nan")])
def test_a_step_that_is_not_finite_leaves_weights_and_statistics_alone(poison):
    made = replica(task=Task(poison), guard=True)

    (outcome,) = steps(made, 1)

    assert not outcome.is_finite
    assert all(torch.equal(a, b) for a, b in zip(weights(made), MODEL.parameters(), strict=True))
    assert torch.equal(made.model[1].running_mean, MODEL[1].running_mean)
    assert made.is_finite()


def test_weights_that_are_not_finite_are_noticed():
    made = replica()
    with torch.no_grad():
        made.model[0].weight[0, 0] = float("inf")

    assert not made.is_finite()


def test_clipping_bounds_the_update():
    made = replica(clip_grad_norm=0.01)
    before = weights(made)

    (outcome,) = steps(made, 1)

    moved = torch.cat([(a - b).flatten() for a, b in zip(weights(made), before, strict=True)])
    assert outcome.grad_norm > 0.01
    assert float(moved.norm()) == pytest.approx(0.1 * 0.01, rel=1e-4)


def test_groups_have_rates_of_their_own():
    made = replica(
        trained=lambda model: [
            {"params": model[0].parameters()},
            {"params": model[2].parameters(), "lr_scale": 0.0},
        ]
    )
    before = weights(made)

    steps(made, 1)

    changed = [not torch.equal(a, b) for a, b in zip(weights(made), before, strict=True)]
    assert changed[0]
    assert changed[-2:] == [False, False]


class TestState:
    def test_a_copy_stays_while_training_goes_on(self):
        made = replica(optimizer=torch.optim.Adam)
        steps(made, 1)
        kept, live = made.state(copy=True), made.state(copy=False)
        before = {name: bytes(blob.data) for name, blob in kept.model.items()}

        steps(made, 1)

        assert {name: bytes(blob.data) for name, blob in kept.model.items()} == before
        assert {name: bytes(blob.data) for name, blob in live.model.items()} != before

    def test_goes_on_bit_for_bit_with_the_settings_of_the_job(self):
        made, other = replica(optimizer=torch.optim.Adam), replica(optimizer=torch.optim.Adam)
        steps(made, 2)
        other.optimizer.param_groups[0]["weight_decay"] = 0.25
        other.load_state(made.state(copy=True))

        assert other.optimizer.param_groups[0]["weight_decay"] == 0.25
        other.optimizer.param_groups[0]["weight_decay"] = 0
        steps(made, 2)
        steps(other, 2)
        assert all(torch.equal(a, b) for a, b in zip(weights(made), weights(other), strict=True))

    def test_goes_on_with_the_scale_that_its_losses_had(self):
        made, other = replica(precision="fp16"), replica(precision="fp16")
        made.scaler.load_state_dict({**made.scaler.state_dict(), "scale": 128.0, "_growth_tracker": 7})

        other.load_state(made.state(copy=True))

        assert other.scaler.state_dict() == made.scaler.state_dict()
        assert other.scaler.get_scale() == 128.0

    def test_without_a_loss_scale_begins_with_the_usual_one(self):
        """Trained in bf16 until now."""
        state = replica(precision="bf16").state(copy=False)
        other = replica(precision="fp16")
        usual = other.scaler.state_dict()

        other.load_state(state)

        assert state.scaler == {}
        assert other.scaler.state_dict() == usual

    def test_of_another_optimizer_is_refused(self):
        made, other = replica(optimizer=torch.optim.SGD), replica(optimizer=torch.optim.AdamW)
        steps(made, 1)

        with pytest.raises(CheckpointError, match="another model or optimizer"):
            other.load_state(made.state(copy=True))

    def test_buffers_become_equal_without_losing_anything(self):
        def rank(world):
            made = replica(world)
            made.model[1].running_mean.fill_(float(world.rank))
            made.model.register_buffer("mask", torch.tensor([0.0, -np.inf]))
            made.model.register_buffer("turn", torch.tensor([1 + 2j]))
            made.model.register_buffer("big", torch.tensor([2**60]))
            made.sync_buffers()
            return (
                made.model[1].running_mean[0].item(),
                made.model.mask.tolist(),
                made.model.turn.item(),
                made.model.big.item(),
            )

        assert on_ranks(2, rank) == [(0.5, [0.0, -np.inf], 1 + 2j, 2**60)] * 2

    @pytest.mark.parametrize(
        "own",
        [
            lambda rank: torch.tensor([1 + 2j * (rank + 1)]),
            lambda rank: torch.tensor([2**60 + rank]),
            lambda rank: torch.tensor([rank == 0]),
            lambda rank: torch.full((3,), 1.0 + rank * 2**-7, dtype=torch.bfloat16),
            lambda rank: torch.zeros(2 + rank),
        ],
        ids=["complex", "a large number", "a truth", "16 bits", "a shape"],
    )
    def test_a_buffer_that_differs_between_ranks_is_refused_unless_it_is_not_saved(self, own):
        def rank(world, persistent):
            made = replica(world)
            made.model.register_buffer("own", own(world.rank), persistent=persistent)
            made.sync_buffers()
            return made.model.own

        for found in on_ranks(2, partial(rank, persistent=True)):
            assert isinstance(found, UserError)
            assert "the buffer 'own' differs between ranks: rank 1 against rank 0" in str(found)
        kept = on_ranks(2, partial(rank, persistent=False))
        assert [torch.equal(found, own(number)) for number, found in enumerate(kept)] == [True, True]


def test_activations_are_recomputed_once_and_give_the_same_gradient():
    model, plain = nn.Sequential(), copy.deepcopy(MODEL)
    model.add_module("layers", copy.deepcopy(plain))
    calls = []
    model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    recompute_activations(model, ["layers*"])

    model(BATCH).sum().backward()
    plain(BATCH).sum().backward()

    assert len(calls) == 2, "once forward, once again backward; not once more for each level"
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_forward_pass_runs_in_the_precision_of_the_job(precision, dtype):
    seen = []
    made = replica(precision=precision)
    made.model[0].register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))

    steps(made, 1)

    assert seen == [dtype]
    assert all(parameter.dtype == torch.float32 for parameter in made.model.parameters())


def test_a_compiled_job_trains_the_compiled_model(tmp_path):
    graphs = []

    def note_graph(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    (tmp_path / "task_for_compiling.py").write_text(
        "import torch\n"
        "class T:\n"
        "    def model(self): return torch.nn.Linear(3, 2)\n"
        "    def train_data(self): return torch.utils.data.TensorDataset(torch.ones(6, 3))\n"
        "    def loss(self, model, batch): return model(batch[0]).square().mean()\n"
    )
    job = Job(
        name="x",
        task=f"{tmp_path / 'task_for_compiling.py'}:T",
        train=Train(compile={"backend": "noting"}, device="cpu"),
    )
    torch._dynamo.register_backend(note_graph, name="noting")

    made, reader, _ = TorchFramework().prepare(job, Mesh.data_parallel(SingleRank()))
    share = share_of_step(0, 6, batch_size=6, accumulation_steps=1, rank=0, size=1)
    (step,) = PlannedSteps([share], partial(reader.read, 0, np.arange(6)))
    made.step(step, 0.1, want_norm=False)

    assert len(graphs) == 1


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda loss: loss.expand(6), r"has shape \[6\], but has to be one number"),
        (lambda loss: loss.detach(), "does not depend on anything that is trained"),
        (lambda loss: loss.item(), "is a float, not a tensor"),
        (lambda loss: None, "is a NoneType, not a tensor"),
        (lambda loss: torch.complex(loss, loss), "is a complex number"),
    ],
)
def test_a_loss_of_which_no_gradient_can_be_taken_is_the_tasks_error(loss, says, size):
    for error in on_ranks(size, lambda world: steps(replica(world, task=Task(loss)), 1)):
        assert isinstance(error, UserError)
        assert error.exit_code == 2
        assert re.search(says, str(error))


def test_a_loss_of_one_element_is_taken_for_a_number():
    (outcome,) = steps(replica(task=Task(lambda loss: loss.reshape(1, 1))), 1)

    assert outcome.is_finite


def test_no_step_walks_through_the_modules(monkeypatch):
    """D7: it took 2 ms of a step of ViT-B/16."""
    made = replica()
    walks = []
    train, zero_grad = nn.Module.train, nn.Module.zero_grad
    monkeypatch.setattr(nn.Module, "train", lambda self, *a: walks.append(self) or train(self, *a))
    monkeypatch.setattr(
        nn.Module, "zero_grad", lambda self, *a, **k: walks.append(self) or zero_grad(self, *a, **k)
    )

    steps(made, 3)
    in_the_first = len(walks)
    made.evaluate([(MicroBatch(0, len(BATCH), 0.0), BATCH)])
    after_evaluation = len(walks)
    assert not made.model.training
    steps(made, 3)

    assert in_the_first == 1 + len(list(MODEL))  # train() of the model, which calls that of its parts
    assert len(walks) == after_evaluation + in_the_first
    assert made.model.training


def test_a_parameter_that_comes_later_is_cleared_in_each_step():
    made = replica()
    added = nn.Parameter(torch.ones(2))
    made.model.register_parameter("added", added)
    made.task.loss = lambda model, batch: model(batch).square().mean() + (model.added * torch.ones(2)).sum()
    steps(made, 1)
    made.optimizer.add_param_group({"params": [added]})
    steps(made, 2)

    assert torch.equal(added.grad, torch.ones(2))


class TestWritesToWeights:
    @pytest.fixture
    def only_in_turn(self, monkeypatch):
        """As after the first steps."""
        monkeypatch.setattr(watches_module, "NUM_FIRST", 0)

    def written(self, weights, watches, write):
        for weight, watch in zip(weights, watches, strict=True):
            watch.begin([weight])
        write()
        return [watch.end() is not None for watch in watches]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
    def test_are_noticed_by_their_count(self, dtype):
        weight = nn.Parameter(torch.ones(4, dtype=dtype))
        watch = WeightWatch(None)

        def write():
            with torch.no_grad():
                weight[1].zero_()

        assert self.written([weight], [watch], lambda: None) == [False]
        assert self.written([weight], [watch], write) == [True]
        assert self.written([weight], [watch], lambda: None) == [False]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
    def test_without_a_count_are_noticed_when_it_is_their_turn(self, dtype, only_in_turn):
        rotation = Rotation()
        weights = [nn.Parameter(torch.ones(4, dtype=dtype)) for _ in range(3)]
        watches = [WeightWatch(rotation) for _ in weights]

        found = [self.written(weights, watches, lambda: weights[1].data.mul_(-1))[1] for _ in range(8)][2:]

        assert found.count(True) == 2, "in every third step"

    @pytest.mark.parametrize("calls", [1, 2])
    def test_each_has_its_turn(self, calls, only_in_turn):
        rotation = Rotation()
        weights = [nn.Parameter(torch.ones(4)) for _ in range(5)]
        watches = [WeightWatch(rotation) for _ in weights]
        order = [0] * calls + [1, 2, 3, 4]  # a unit may be called twice in a pass

        found = []
        for _ in range(6):
            noticed = set()
            for number in order:
                watches[number].begin([weights[number]])
                weights[number].data.add_(1)
                if watches[number].end() is not None:
                    noticed.add(number)
            found.append(noticed)

        assert set.union(*found[1:]) == {0, 1, 2, 3, 4}
        assert max(map(len, found[1:])) <= 2

    def test_of_small_groups_are_noticed_in_each_of_the_first_steps(self, monkeypatch):
        monkeypatch.setattr(watches_module, "SMALL", 8)
        monkeypatch.setattr(watches_module, "NUM_FIRST", 5)
        rotation = Rotation()
        weights = [nn.Parameter(torch.ones(num)) for num in (8, 9)]
        watches = [WeightWatch(rotation) for _ in weights]

        def write():
            for weight in weights:
                weight.data.mul_(-1)

        found = [self.written(weights, watches, write) for _ in range(7)]

        of_small, of_large = zip(*found, strict=True)
        assert all(of_small[:5])
        assert not all(of_small)
        assert not all(of_large[:5])

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bool])
    def test_to_weights_of_one_byte_are_noticed(self, dtype):
        weight = nn.Parameter(torch.ones(9).to(dtype), requires_grad=False)

        def write():
            weight.data.copy_(torch.zeros(9))

        assert self.written([weight], [WeightWatch(Rotation())], write) == [True]

    def test_to_a_weight_that_has_been_released_are_none(self):
        weight = nn.Parameter(torch.ones(4))
        watch = WeightWatch(Rotation())

        def release():
            weight.data = torch.empty(0)

        assert self.written([weight], [watch], release) == [False]

    def test_without_weights_take_no_turn(self, only_in_turn):
        rotation = Rotation()
        empty, watch = WeightWatch(rotation), WeightWatch(rotation)
        weight = nn.Parameter(torch.ones(4))

        found = []
        for _ in range(3):
            empty.begin([])
            assert empty.end() is None
            found += self.written([weight], [watch], lambda: weight.data.add_(1))

        assert found == [True] * 3

    def test_that_only_change_nan_are_none(self):
        weight = nn.Parameter(torch.full((3,), math.nan))
        watch = WeightWatch(Rotation())

        assert not any(self.written([weight], [watch], lambda: None)[0] for _ in range(4))


@pytest.mark.parametrize("is_evaluated", [True, False])
def test_an_export_contains_the_weights_that_are_evaluated(tmp_path, is_evaluated):
    made = replica(averaging=Averaging(Ema(decay=0.5, evaluate=is_evaluated)))
    steps(made, 3)
    with made.averaged.shown():
        evaluated = made.model.state_dict()["0.weight"].clone()
    trained = made.model.state_dict()["0.weight"].clone()
    assert torch.equal(evaluated, trained) is not is_evaluated
    checkpoints = CheckpointManager(
        tmp_path / "run", Checkpoint(), SingleRank(), {"name": "job"}, lambda _: None
    )
    checkpoints.save(
        3,
        take_state=lambda copy: made.state(copy=copy),
        rng=b"generators",
        progress={"step": 3},
        summary={"epochs": 1.0, "metrics": {}, "unix_time_s": 0.0},
        wait=True,
    )
    checkpoints.close()

    exported = {}
    for averaged in (None, True, False):
        file = tmp_path / f"{averaged}.safetensors"
        _, _, is_averaged = export(tmp_path / "run", file, averaged=averaged)
        assert is_averaged is (is_evaluated if averaged is None else averaged)
        exported[averaged] = safetensors.torch.load_file(file)["0.weight"]
    assert torch.equal(exported[None], evaluated)
    assert torch.equal(exported[False], trained)
    assert not torch.equal(exported[True], trained)


@pytest.mark.parametrize("every_steps", [1, 3])
@pytest.mark.parametrize(("samples", "decay"), [(6, 0.9), (3, 0.81), (12, 0.9**0.5)])
def test_the_decay_of_an_average_follows_the_samples_of_a_step(samples, decay, every_steps):
    """Steps have six samples."""
    scaled = replica(averaging=Averaging(Ema(decay=0.9, every_steps=every_steps), samples))
    expected = replica(averaging=Averaging(Ema(decay=decay, every_steps=every_steps)))

    for made in (scaled, expected):
        steps(made, 8)

    for name, average in expected.averaged.tensors().items():
        torch.testing.assert_close(scaled.averaged.tensors()[name].tensor, average.tensor)
