"""A pipeline in parts: the order of passes, where a model is cut, what a task is told and asked."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from horovod_train.collectives.base import SingleRank
from horovod_train.config.support import Axes
from horovod_train.errors import UserError
from horovod_train.plugins.pipeline.cut import best_cuts, cut_model
from horovod_train.plugins.pipeline.passes import Kind, Pass, _encode_specs, _kinds_of, bubble, order_of
from horovod_train.plugins.pipeline.strategy import keep_only
from horovod_train.plugins.pipeline.values import (
    ValuesRead,
    answered_with,
    drawing_by_stage,
    inputs_of_call,
)


def simulated(schedule, num_ranks, num_chunks, num_micro_batches):
    """When each pass ends, if it takes 1 / chunks (backward: twice as long) and messages no time at all."""
    orders = [
        order_of(
            schedule,
            rank=rank,
            num_ranks=num_ranks,
            num_chunks=num_chunks,
            num_micro_batches=num_micro_batches,
        )
        for rank in range(num_ranks)
    ]
    last_stage = num_ranks * num_chunks - 1
    ended: dict[tuple[str, int, int], float] = {}
    at, clock = [0] * num_ranks, [0.0] * num_ranks
    while any(at[rank] < len(orders[rank]) for rank in range(num_ranks)):
        moved = False
        for rank in range(num_ranks):
            while at[rank] < len(orders[rank]):
                each = orders[rank][at[rank]]
                stage = each.chunk * num_ranks + rank
                if each.kind == "forward":
                    needed = [("forward", stage - 1, each.micro_batch)] if stage else []
                else:
                    needed = [("forward", stage, each.micro_batch)]
                    needed += [("backward", stage + 1, each.micro_batch)] if stage < last_stage else []
                if not all(need in ended for need in needed):
                    break
                begun = max([clock[rank], *(ended[need] for need in needed)])
                took = (1 if each.kind == "forward" else 2) / num_chunks
                clock[rank] = ended[each.kind, stage, each.micro_batch] = begun + took
                at[rank] += 1
                moved = True
        assert moved, "ranks wait for each other for ever"
    return ended, max(clock), orders


SCHEDULES = st.sampled_from(["gpipe", "1f1b", "interleaved"])


class TestTheOrderOfPasses:
    @given(SCHEDULES, st.integers(1, 6), st.integers(2, 4), st.integers(1, 14))
    @settings(deadline=None)
    def test_makes_each_pass_once_and_ends(self, schedule, num_ranks, num_chunks, num_micro_batches):
        num_chunks = num_chunks if schedule == "interleaved" else 1
        ended, _, _ = simulated(schedule, num_ranks, num_chunks, num_micro_batches)

        assert len(ended) == 2 * num_ranks * num_chunks * num_micro_batches

    @pytest.mark.parametrize(
        ("schedule", "num_chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)]
    )
    @pytest.mark.parametrize("num_ranks", [2, 4])
    def test_lets_ranks_stand_idle_for_as_long_as_the_formula_says(self, schedule, num_chunks, num_ranks):
        num_micro_batches = 3 * num_ranks
        _, total, _ = simulated(schedule, num_ranks, num_chunks, num_micro_batches)

        assert 1 - 3 * num_micro_batches / total == pytest.approx(
            bubble(num_ranks, num_micro_batches, num_chunks)
        )

    @pytest.mark.parametrize(("schedule", "most"), [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1])])
    def test_keeps_as_many_activations_as_it_must(self, schedule, most):
        _, _, orders = simulated(schedule, 4, 1, 8)

        for order, expected in zip(orders, most, strict=True):
            kept = list(itertools.accumulate(1 if each.kind == "forward" else -1 for each in order))
            assert max(kept) == expected

    def test_of_one_rank_is_that_of_a_process_alone(self):
        order = order_of("1f1b", rank=0, num_ranks=1, num_chunks=1, num_micro_batches=2)

        assert order == [Pass(kind, 0, at) for at in (0, 1) for kind in ("forward", "backward")]


class TestWhereAModelIsCut:
    @given(
        st.lists(st.floats(0.1, 10), min_size=2, max_size=8),
        st.integers(2, 4),
        st.randoms(use_true_random=False),
    )
    @settings(deadline=None)
    def test_the_dearest_stage_is_about_as_cheap_as_can_be(self, costs, num_stages, chance):
        widths = {place: chance.choice([1, 1, 2]) for place in range(1, len(costs)) if chance.random() < 0.9}
        if len(widths) < num_stages - 1:
            with pytest.raises(UserError, match=f"can be cut into {len(widths) + 1} stages"):
                best_cuts(costs, widths, num_stages)
            return

        def dearest(cuts):
            bounds = [0, *cuts, len(costs)]
            return max(sum(costs[first:last]) for first, last in itertools.pairwise(bounds))

        found = best_cuts(costs, widths, num_stages)

        best = min(dearest(cuts) for cuts in itertools.combinations(sorted(widths), num_stages - 1))
        assert len(found) == num_stages - 1
        assert set(found) <= set(widths)
        assert dearest(found) <= 1.1 * best + 1e-9

    @given(st.lists(st.sampled_from([0.0, 1.0, 3.0]), min_size=3, max_size=8), st.integers(2, 4))
    @settings(deadline=None)
    def test_no_stage_is_without_parameters_if_that_can_be(self, costs, num_stages):
        places = range(1, len(costs))
        if len(places) < num_stages - 1:
            return

        def num_empty(cuts):
            return sum(sum(costs[a:b]) == 0 for a, b in itertools.pairwise([0, *cuts, len(costs)]))

        found = num_empty(best_cuts(costs, dict.fromkeys(places, 1), num_stages))

        assert found == min(map(num_empty, itertools.combinations(places, num_stages - 1)))

    def test_fewer_values_cross_where_that_costs_little(self):
        assert best_cuts([1.0, 0.1, 1.0], {1: 2, 2: 1}, 2) == [2]
        assert best_cuts([1.0, 1.0, 1.0, 1.0], {2: 2, 3: 1}, 2) == [2]


def cut(model, *example, num_stages=2, parts=None, balance="parameters"):
    names = [f"x{at}" for at in range(len(example))]
    inputs = dict(zip(names, example, strict=True))
    return cut_model(model, parts, lambda: inputs, num_stages, SingleRank(), balance)


def through(stages, *inputs):
    found = stages[0].call(**{f"x{at}": value for at, value in enumerate(inputs)})
    for stage in stages[1:]:
        # As messages bring it: numbers are tensors then.
        found = stage.call(*(torch.tensor(each) if isinstance(each, int) else each for each in found))
    return found


class Residual(nn.Module):
    """Looks at shapes, makes tensors from them, has a branch, and hands its input on to the end."""

    def __init__(self, mode=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("scale", torch.linspace(1, 2, 9))
        self.mode = mode

    def forward(self, x0, targets=None):
        batch, length, width = x0.size()
        assert length <= 9
        assert len(x0.shape) == 3
        y = x0 + self.scale[:length, None] + torch.arange(length)[:, None]
        for layer in self.layers:
            y = y + functional.dropout(layer(y), 0.5, self.training)
        if length > 6:
            y = y * 2
        if targets is not None:
            y = y - targets
        return (y + x0).view(batch * length, width)


class OtherInTraining(nn.Sequential):
    def forward(self, x0):
        return self[0](x0) if self.training else self[1](x0)


class ByContent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x0):
        return self.layers[0](x0) if x0.sum() > 0 else self.layers[1](x0)


class TestStages:
    @pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
    @pytest.mark.parametrize("balance", ["parameters", "time"])
    def test_one_after_the_other_are_the_model(self, num_stages, balance):
        model = Residual()
        stages = cut(model, torch.randn(1, 3, 4), num_stages=num_stages, balance=balance)

        assert len(stages) == num_stages
        model.eval()
        for shape in [(1, 3, 4), (5, 3, 4), (2, 6, 4)]:
            batch = torch.randn(shape)
            assert torch.equal(through(stages, batch), model(batch))
        model.train()
        torch.manual_seed(1)
        found = through(stages, batch)
        torch.manual_seed(1)
        assert torch.equal(found, model(batch))

    def test_have_the_models_own_parameters_by_their_names(self):
        model = Residual()
        stages = cut(model, torch.randn(1, 3, 4), num_stages=2)

        having = [
            [at for at, stage in enumerate(stages) if stage.owns(name)]
            for name, _ in model.named_parameters()
        ]
        assert having == [[0]] * 4 + [[1]] * 4
        assert stages[0].owns("scale")
        assert not stages[1].owns("scale")

    def test_of_an_encoder_are_its_layers(self):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)

        class Encoder(nn.Module):
            def __init__(self):
                super().__init__()
                self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

            def forward(self, x0):
                return self.encoder(x0)

        model = Encoder()
        stages = cut(model, torch.randn(1, 3, 8), num_stages=4)

        batch = torch.randn(5, 7, 8)
        assert torch.allclose(through(stages, batch), model(batch))
        for at, stage in enumerate(stages):
            assert stage.owns(f"encoder.layers.{at}.linear1.weight")

    def test_of_a_sequence_are_its_parts(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
        stages = cut(model, torch.randn(1, 4), num_stages=2)

        batch = torch.randn(3, 4)
        assert torch.equal(through(stages, batch), model(batch))
        assert [stage.owns("2.weight") for stage in stages] == [False, True]

    def test_are_made_of_the_parts_that_a_task_names(self):
        model = ByContent()
        stages = cut(model, torch.randn(1, 4), parts=list(model.layers), balance="time")

        batch = torch.randn(3, 4)
        assert torch.equal(through(stages, batch), model.layers[1](model.layers[0](batch)))

    @pytest.mark.parametrize(
        ("parts", "said"),
        [([], "returns nothing"), ([nn.Linear(1, 1)], "returns a Linear that is not a module")],
    )
    def test_are_not_made_of_what_is_no_part_of_the_model(self, parts, said):
        with pytest.raises(UserError, match=said):
            cut(ByContent(), torch.randn(1, 4), parts=parts)

    @pytest.mark.parametrize(
        ("model", "said"),
        [
            (ByContent(), "cannot be cut into stages"),
            (OtherInTraining(nn.Linear(4, 4), nn.Linear(4, 4)), None),
        ],
    )
    def test_cannot_be_of_a_model_that_does_what_nobody_can_know_before(self, model, said):
        if said is None:
            model.__class__.__bases__ = (nn.ModuleList,)  # no sequence any more
            said = "other modules in training than in evaluation"
        with pytest.raises(UserError, match=said) as caught:
            cut(model, torch.randn(1, 4))
        assert "pipeline_parts" in str(caught.value.hint)

    def test_refuse_a_batch_that_takes_another_branch(self):
        stages = cut(Residual(), torch.randn(1, 3, 4))

        with pytest.raises(UserError, match="takes another branch"):
            through(stages, torch.randn(1, 7, 4))

    def test_refuse_other_inputs_than_they_were_cut_with(self):
        stages = cut(Residual(), torch.randn(1, 3, 4))

        with pytest.raises(UserError, match="calls the model with x0, targets, and called it with x0"):
            stages[0].call(x0=torch.randn(1, 3, 4), targets=torch.zeros(()))

    def test_draw_nothing_and_move_no_statistic_when_they_are_cut(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.parts = nn.ModuleList(
                    [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)]
                )

            def forward(self, x0):
                for part in self.parts:
                    x0 = part(x0)
                return x0

        net = Net()
        before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        drawn = torch.get_rng_state()
        cut(net, torch.randn(2, 4, generator=torch.Generator().manual_seed(1)), balance="time")

        assert torch.equal(torch.get_rng_state(), drawn)
        assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


class TestWhatATaskIsGivenInTheModelsPlace:
    MODEL = Residual()

    @staticmethod
    def loss(model, batch):
        mask = torch.rand(3)
        noise = random.random() + np.random.random()
        assert not model.mode
        return (model(batch * mask, targets=mask) * noise).sum()

    def test_asks_for_the_inputs_and_gives_the_output_with_the_same_draws(self):
        batch = torch.ones(3)
        inputs = inputs_of_call(self.loss, self.MODEL, batch, seed=5)
        found = answered_with(self.loss, self.MODEL, batch, inputs["x0"], seed=5)

        assert list(inputs) == ["x0", "targets"]
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        assert float(found) == pytest.approx(
            float((torch.rand(3) * (random.random() + np.random.random())).sum())
        )

    def test_leaves_generators_as_they_were(self):
        before = torch.get_rng_state(), random.getstate()
        inputs_of_call(self.loss, self.MODEL, torch.ones(3), seed=5)

        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]

    def test_is_asked_though_a_task_catches_errors(self):
        def careful(model, batch):
            try:
                return model(batch)
            except Exception:  # noqa: BLE001
                return None

        assert list(inputs_of_call(careful, self.MODEL, torch.ones(3), 0)) == ["x0"]

    def test_has_to_be_called_once(self):
        with pytest.raises(UserError, match="without calling the model"):
            inputs_of_call(lambda model, batch: batch.sum(), self.MODEL, torch.ones(3), 0)
        with pytest.raises(UserError, match="calls the model 2 times"):
            answered_with(lambda model, batch: model(batch) + model(batch), self.MODEL, torch.ones(3), 1.0, 0)

    def test_takes_inputs_that_have_names(self):
        class Any(nn.Module):
            def forward(self, *inputs):
                return inputs

        with pytest.raises(UserError, match=r"Any.forward takes \*inputs"):
            inputs_of_call(lambda model, batch: model(batch), Any(), torch.ones(3), 0)


class TestWhatARankKeeps:
    def test_is_its_own_and_what_is_one_weight_stays_one(self):
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
        model["c"].weight = model["b"].weight
        kept = model["a"].weight

        keep_only(model, frozenset({"a.weight", "a.bias"}), torch.device("cpu"))

        assert model["a"].weight is kept
        assert model["b"].weight.is_meta
        assert model["b"].weight is model["c"].weight
        assert sum(p.numel() for p in model.parameters()) == 14


@given(
    st.lists(
        st.none()
        | st.builds(
            Kind,
            st.lists(st.integers(0, 9), max_size=5).map(tuple),
            st.sampled_from([torch.float64, torch.int64, torch.bool]),
            st.booleans(),
        ),
        max_size=9,
    )
)
def test_a_head_tells_kinds_of_tensors(kinds):
    assert _kinds_of(_encode_specs(kinds).tolist()) == kinds


class TestAxes:
    def test_are_as_many_ranks_as_there_are(self):
        assert Axes.of(8, pipeline=None) == Axes(1, pipeline=8)
        assert Axes.of(8, pipeline=2, tensor=None) == Axes(1, pipeline=2, tensor=4)
        assert Axes.of(12, pipeline=3, tensor=2) == Axes(2, pipeline=3, tensor=2)

    @pytest.mark.parametrize(
        ("size", "lengths", "said"),
        [
            (6, {"pipeline": 4}, "4 stages do not divide 6 ranks"),
            (2, {"pipeline": 4}, "4 stages do not divide 2 ranks"),
            (8, {"pipeline": 3, "tensor": 2}, "3 stages x 2 tensor ranks do not divide 8 ranks"),
            (2, {"pipeline": 4, "tensor": None}, "4 stages"),
        ],
    )
    def test_that_do_not_divide_the_ranks_are_refused(self, size, lengths, said):
        with pytest.raises(UserError, match=said):
            Axes.of(size, **lengths)

    def test_place_each_rank_once(self):
        axes = Axes(2, pipeline=3, tensor=2)

        assert [axes.rank(*axes.place(rank)) for rank in range(12)] == list(range(12))
        for groups in (axes.data_groups(), axes.pipelines()):
            assert sorted(rank for group in groups for rank in group) == list(range(12))
        assert math.prod((len(axes.pipelines()), 3)) == 12


def test_a_stage_that_begins_with_a_script_module_is_refused_while_it_is_verified():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.jit.script(torch.nn.Linear(2, 2)))

    with (
        pytest.raises(UserError, match="a stage begins with the ScriptModule '1'"),
        drawing_by_stage(model, [None, ("1", 0)]),
    ):
        pytest.fail("hooks of a ScriptModule do not exist")


class Settings:
    def __init__(self):
        self.tau, self.unread, self.name = 1.0, 0, "x"


CURRICULUM = {"kl": 0.1, "unread": 0}
LEVEL = 1


def reading_model(settings, schedule):
    """A model whose code between modules reads an object, a dict, global variables and a function."""
    scales = [1.0, 2.0]

    def scaled(value):
        return value * schedule["beta"]

    class Model(torch.nn.Module):
        factor = 1.0

        def __init__(self):
            super().__init__()
            self.layer, self.settings = torch.nn.Linear(2, 2), settings

        def forward(self, x):
            x = self.layer(x) / self.settings.tau * CURRICULUM["kl"] * LEVEL * self.factor
            return scaled(x) * scales[1]

    return Model(), Model, scales


class TestValuesThatTheCodeReads:
    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda model, each: setattr(each["settings"], "tau", 2.0), "settings.tau"),
            (lambda model, each: each["schedule"].update(beta=3.0), "schedule['beta']"),
            (lambda model, each: each["schedule"].clear(), "schedule['beta']"),
            (lambda model, each: each["scales"].__setitem__(1, 5.0), "scales[1]"),
            (lambda model, each: setattr(each["kind"], "factor", 3.0), "factor"),
            (lambda model, each: CURRICULUM.update(kl=0.2), "CURRICULUM['kl']"),
            (lambda model, each: globals().update(LEVEL=2), "LEVEL"),
            (lambda model, each: model.register_forward_hook(print), "the hooks of the model"),
            (lambda model, each: setattr(each["settings"], "unread", 7), None),
            (lambda model, each: CURRICULUM.update(unread=7), None),
            (lambda model, each: setattr(each["settings"], "tau", float("1.0")), None),
            (lambda model, each: model.layer.register_forward_hook(print), None),
        ],
    )
    def test_are_compared(self, change, says, monkeypatch):
        monkeypatch.setitem(globals(), "CURRICULUM", dict(CURRICULUM))
        monkeypatch.setitem(globals(), "LEVEL", 1)
        settings, schedule = Settings(), {"beta": 0.5}
        model, kind, scales = reading_model(settings, schedule)
        values = ValuesRead({"": model})
        assert values.changed() is None

        change(model, {"settings": settings, "schedule": schedule, "scales": scales, "kind": kind})

        found = values.changed()
        assert (found is None) == (says is None)
        assert says is None or says in found

    def test_are_those_of_methods_of_objects_and_of_replaced_ones(self):
        class Ramp:
            def __init__(self):
                self.num, self.sum = 0, 0.0

            def value(self):
                return min(1.0, self.num / 100)

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.ramp, self.weights, self.act = Ramp(), (1.0, 2.0), torch.relu
                self.meter = Ramp()

            def forward(self, x):
                return self.act(x.sum(1)) * self.ramp.value() * self.weights[0]

            def loss(self, x):  # not called by forward
                self.meter.sum += float(x)

        def changed(change):
            model = Model()
            values = ValuesRead({"": model})
            change(model)
            return values.changed()

        assert "ramp.num" in changed(lambda model: setattr(model.ramp, "num", 1))
        assert "ramp" in changed(lambda model: setattr(model, "ramp", Ramp()))
        assert "weights" in changed(lambda model: setattr(model, "weights", (3.0, 2.0)))
        assert "act" in changed(lambda model: setattr(model, "act", torch.tanh))
        assert changed(lambda model: model.loss(torch.ones(()))) is None
        assert changed(lambda model: setattr(model.meter, "num", 3)) is None
