"""A budget for activations: what a pass keeps, and which layers recompute."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from horovod_train.collectives.base import Mesh, SingleRank
from horovod_train.config.rules import broken_rules
from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.framework import TorchFramework, recompute_activations
from horovod_train.frameworks.torch.sizes import (
    SavedActivations,
    layers_to_recompute,
    saved_activations,
)

MIB = 2**20
WIDTH, BATCH = 256, 32


class Layer(nn.Module):
    """Keeps its input and one tensor four times as wide, and the sign of that."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Task:
    def model(self):
        return nn.Sequential(*(Layer() for _ in range(6)))

    def train_data(self):
        return TensorDataset(torch.ones(64, WIDTH))

    def loss(self, model, batch):
        return model(batch[0]).square().mean()


def kept_of(model):
    inputs = torch.randn(BATCH, WIDTH)
    return saved_activations(model, lambda: model(inputs).square().mean())


def test_what_is_kept_is_what_the_formula_says():
    """Backward of a linear layer needs its input, of tanh its result, of a square its argument."""
    kept = kept_of(Task().model())
    narrow, wide = 4 * BATCH * WIDTH, 4 * BATCH * 4 * WIDTH

    assert list(kept.layers) == [str(number) for number in range(6)]
    assert set(kept.layers.values()) == {narrow + wide}, "its input, and the result of tanh"
    assert kept.elsewhere == narrow
    assert [kept.inputs[name] for name in kept.layers] == [0] + [narrow] * 5, "data need no gradient"


def test_the_peak_is_of_what_is_left_and_one_layer_that_recomputes():
    kept = SavedActivations(10, {"a": 100, "b": 100, "c": 50}, {"a": 1, "b": 2, "c": 3})

    assert kept.peak(set()) == 10 + 250
    assert kept.peak({"a"}) == 10 + 1 + 100 + 50 + 100
    assert kept.peak({"a", "b"}) == 10 + 1 + 2 + 50 + 100
    assert kept.peak({"a", "b", "c"}) == 10 + 1 + 2 + 3 + 100


@pytest.mark.parametrize(
    ("budget_bytes", "expected"), [(260, []), (259, ["a", "b"]), (163, ["a", "b"]), (116, ["a", "b", "c"])]
)
def test_no_more_layers_recompute_than_have_to(budget_bytes, expected):
    kept = SavedActivations(10, {"a": 100, "b": 100, "c": 50}, {"a": 1, "b": 2, "c": 3})

    assert layers_to_recompute(kept, budget_bytes / MIB) == expected


def test_a_budget_that_cannot_be_kept_is_refused_with_the_least():
    kept = SavedActivations(0, {"a": 100 * MIB, "b": 100 * MIB}, {"a": 0, "b": 0})

    with pytest.raises(UserError, match="keeps 200 MiB, and 100 MiB if its 2 layers") as refused:
        layers_to_recompute(kept, 99)
    assert "train.batch_size_per_rank" in refused.value.hint


def job(**train):
    return Job.model_validate({"name": "j", "task": f"{__file__}:Task", "train": train})


def test_a_budget_and_patterns_are_not_both_given():
    (problem,) = broken_rules(job(activation_memory_mib=1, activation_checkpointing=["0"]))

    assert "cannot be combined with train.activation_checkpointing" in str(problem)


def peak_of_pass(model, inputs):
    """Bytes that a real pass keeps, by the hooks of its tensors: independent of layers."""
    seen = {}

    def pack(tensor):
        seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(inputs).square().mean()
    del loss
    return sum(size for place, size in seen.items() if place not in weights)


@pytest.mark.parametrize("budget_mib", [0.5, 0.7, 0.9])
def test_a_job_keeps_its_budget_and_trains_as_without(budget_mib):
    def replica(**train):
        with_seed = job(batch_size_per_rank=BATCH, **train)
        made, _, _ = TorchFramework().prepare(with_seed, Mesh.data_parallel(SingleRank()))
        return made

    plain, within = replica(), replica(activation_memory_mib=budget_mib)
    inputs = torch.randn(BATCH, WIDTH)
    gradients = []
    for each in (plain, within):
        each.model.train()
        loss = each.model(inputs).square().mean()
        loss.backward()
        gradients.append([p.grad for p in each.model.parameters()])
    largest_layer = 4 * BATCH * 5 * WIDTH

    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert peak_of_pass(plain.model, inputs) > budget_mib * MIB
    assert peak_of_pass(within.model, inputs) + largest_layer <= budget_mib * MIB


def test_layers_are_found_in_a_model_without_lists():
    model = nn.ModuleDict({"a": Layer(), "b": Layer()})
    inputs = torch.randn(BATCH, WIDTH)

    kept = saved_activations(model, lambda: model["b"](model["a"](inputs)).sum())
    again = copy.deepcopy(model)
    recompute_activations(again, ["a", "b"])

    assert set(kept.layers) == {"a", "b"}
    assert kept_again(again, inputs) < kept.peak(set())


def test_a_layer_that_is_called_twice_keeps_two_inputs():
    layer = nn.ModuleDict({"a": Layer()})
    inputs = torch.randn(BATCH, WIDTH, requires_grad=True)

    kept = saved_activations(layer, lambda: layer["a"](layer["a"](inputs)).sum())

    assert kept.inputs == {"a": 2 * 4 * BATCH * WIDTH}


def kept_again(model, inputs):
    kept = saved_activations(model, lambda: model["b"](model["a"](inputs)).sum())
    return kept.elsewhere + sum(kept.layers.values())
