"""What is DeepSpeed's, as a checkpoint sees it; and what is refused before DeepSpeed is asked."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from horovod_train.collectives.base import Mesh, SingleRank
from horovod_train.config.schema import Job, Strategy
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.strategies.base import DevicePlacement
from horovod_train.plugins.deepspeed.strategy import DeepSpeed, FlatState, joined, own_part

PADDED = 8  # of seven numbers


def model():
    torch.manual_seed(3)
    return nn.Linear(3, 1, bias=False), nn.Linear(3, 1)  # of three numbers, of three and of one


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # which DeepSpeed sets when it is imported


def strategy(**args):
    job = Job(name="j", task="digits", strategy=Strategy(name="deepspeed"))
    return DeepSpeed(Mesh.data_parallel(SingleRank()), job, **args), DevicePlacement(
        torch.device("cpu"), job.train
    )


class TestIsRefused:
    def test_a_model_that_is_not_in_float32(self, matrix):
        reason = "DeepSpeed stores weights in 32 bits"
        matrix("equals an independent computation: 64 bits", "deepspeed", f"no: {reason}")
        made, move_to_device = strategy()

        with pytest.raises(UserError, match="'weight' is float64, and DeepSpeed keeps weights in float32"):
            made.wrap(nn.Linear(2, 1).double(), move_to_device)

    def test_an_optimizer_that_deepspeed_would_replace(self):
        made, _ = strategy()
        module = nn.Linear(2, 1)

        with pytest.raises(UserError, match="creates its own Adagrad"):
            made.bind(module, torch.optim.Adagrad(module.parameters()))

    def test_a_group_of_frozen_parameters_where_groups_are_joined(self):
        made, _ = strategy(stage=2)
        module = nn.ModuleList(model())
        module[0].requires_grad_(requires_grad=False)
        groups = [{"params": list(part.parameters())} for part in module]

        with pytest.raises(UserError, match="all parameters of group 0 are frozen, which stage 2"):
            made.bind(module, torch.optim.SGD(groups, lr=0.1))

    def test_an_environment_without_deepspeed(self, monkeypatch):
        made, move_to_device = strategy()
        monkeypatch.setitem(sys.modules, "deepspeed", None)
        with pytest.raises(UserError, match="the package deepspeed cannot be imported: ") as refused:
            made.wrap(nn.Linear(2, 1), move_to_device)
        assert "horovod_train[deepspeed]" in refused.value.hint


def cut_into_flat_groups(module, rank):
    """As stages 1 and 2 lay a group out for two ranks: one flat tensor, padded, cut in the middle."""
    parameters = list(module.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters] + [torch.zeros(1)])
    half = PADDED // 2
    part = flat[rank * half : (rank + 1) * half].clone()
    at = 0
    for parameter in parameters:
        first, last = max(at, rank * half), min(at + parameter.numel(), (rank + 1) * half)
        parameter._hp_mapping = first < last and SimpleNamespace(
            lp_fragment_address=SimpleNamespace(start=first - at, numel=last - first),
            hp_fragment_address=SimpleNamespace(start=first - rank * half, numel=last - first),
        )
        parameter._hp_mapping = parameter._hp_mapping or None
        at += parameter.numel()
    optimizer = torch.optim.AdamW([part], lr=0.1)
    made = SimpleNamespace(
        bit16_groups=[parameters],
        single_partition_of_fp32_groups=[part],
        parallel_partitioned_bit16_groups=[[part, part]],
        optimizer=optimizer,
    )
    return made, part, optimizer


def cut_one_by_one(module, rank):
    """As stage 3 lays parameters out for two ranks: each is cut in two, and padded."""
    parameters, parts, at, positions = list(module.parameters()), [], 0, {}
    for number, parameter in enumerate(parameters):
        length = -(-parameter.numel() // 2)
        padded = torch.cat([parameter.detach().flatten(), torch.zeros(2 * length - parameter.numel())])
        parameter.ds_tensor = padded[rank * length : (rank + 1) * length].clone()
        parameter.ds_numel, parameter.ds_shape = parameter.numel(), parameter.shape
        positions[number] = (0, at, length)
        parts.append(parameter.ds_tensor)
        at += length
    flat = torch.cat(parts)
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    optimizer = torch.optim.AdamW([flat], lr=0.1)
    made = SimpleNamespace(
        fp16_groups=[parameters],
        fp32_partitioned_groups_flat=[flat],
        sub_group_to_group_id={0: 0},
        grad_position=positions,
        get_param_id=lambda parameter: numbers[id(parameter)],
        fp16_partitioned_groups_flat=[flat],
        _partition_all_parameters=lambda: None,
        _swappable_optimizer_subgroup=lambda _: False,
        optimizer=optimizer,
    )
    return made, flat, optimizer


@pytest.mark.parametrize(("stage", "cut"), [(2, cut_into_flat_groups), (3, cut_one_by_one)])
class TestWhatARankHas:
    def on_both_ranks(self, stage, cut):
        found = []
        for rank in range(2):
            module = nn.ModuleList(model())
            made, flat, optimizer = cut(module, rank)
            flat.grad = flat * 2
            optimizer.step()
            names = {id(p): name for name, p in module.named_parameters()}
            found.append((FlatState(module, made, names, stage, rank), flat, optimizer))
        return found

    def test_is_together_each_number_once(self, stage, cut):
        ranks = self.on_both_ranks(stage, cut)
        shapes = {name: p.shape for name, p in nn.ModuleList(model()).named_parameters()}
        seen = {name: torch.zeros(shape.numel()) for name, shape in shapes.items()}
        for state, _, _ in ranks:
            for each in state.optimized():
                (start,) = each.local.part.start
                assert each.local.part.whole == tuple(shapes[each.name])
                seen[each.name][start : start + len(each.local.tensor)] += 1

        assert all(bool((count == 1).all()) for count in seen.values())

    def test_has_the_optimizers_state_beside_it(self, stage, cut):
        """AdamW's first step: its mean is a tenth of the gradient, which is twice the weight."""
        whole = dict(nn.ModuleList(model()).named_parameters())
        for state, _, _ in self.on_both_ranks(stage, cut):
            shown = state.optimizer()
            weights = [w for group in shown.param_groups for w in group["params"]]
            for each, weight in zip(state.optimized(), weights, strict=True):
                (start,) = each.local.part.start
                before = whole[each.name].detach().flatten()[start : start + len(weight)]
                assert torch.allclose(shown.state[weight]["exp_avg"], 0.1 * 2 * before)
                assert float(shown.state[weight]["step"]) == 1

    def test_is_taken_over_by_ranks_that_have_made_no_step(self, stage, cut):
        for rank, (state, flat, optimizer) in enumerate(self.on_both_ranks(stage, cut)):
            document = state.optimizer().state_dict()
            module = nn.ModuleList(model())
            made, new_flat, new = cut(module, rank)
            names = {id(p): name for name, p in module.named_parameters()}
            second = FlatState(module, made, names, stage, rank)

            shown = second.optimizer()
            shown.load_state_dict(document)
            second.update_from(shown)

            length = len(flat) - (rank if stage == 2 else 0)  # without the padding of the last rank
            assert len(flat) == len(new_flat)
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(new.state[new_flat][key][:length], optimizer.state[flat][key][:length])
            assert float(new.state[new_flat]["step"]) == 1


def test_steps_of_a_weight_without_dimensions_stay_one_number():
    """In a checkpoint they look like a part of the weight, which is one number, too."""
    module = nn.ModuleList(model())
    made, flat, _ = cut_into_flat_groups(module, 0)
    names = {id(p): name for name, p in module.named_parameters()}
    first, second = FlatState(module, made, names, 2, 0)._pieces
    entries = [
        (first, {"step": torch.tensor([4.0])}),
        (second, {"step": torch.tensor([4.0]), "exp_avg": torch.ones(1)}),
    ]

    state = joined(flat, entries)

    assert second.length == 1
    assert state["step"].shape == ()
    assert state["exp_avg"].tolist() == [0, 0, 0, 1]


def test_a_part_ends_where_the_parameter_does():
    parameter = SimpleNamespace(ds_tensor=torch.zeros(4), ds_numel=9)

    assert [own_part(parameter, rank) for rank in range(4)] == [(0, 4), (4, 4), (8, 1), (9, 0)]


def test_differing_numbers_of_steps_become_the_largest_and_it_is_said(caplog):
    module = nn.ModuleList(model())
    made, flat, _ = cut_into_flat_groups(module, 0)
    names = {id(p): name for name, p in module.named_parameters()}
    first, second = FlatState(module, made, names, 2, 0)._pieces
    entries = [
        (first, {"step": torch.tensor(3.0), "exp_avg": torch.ones(first.length)}),
        (second, {"step": torch.tensor(5.0), "exp_avg": torch.ones(second.length)}),
    ]

    with caplog.at_level(logging.WARNING):
        state = joined(flat, entries)

    assert float(state["step"]) == 5
    assert "differing 'step'" in caplog.text
    assert state["exp_avg"].tolist() == [1.0] * 4
