"""Steps that are replayed come out as steps that are made: bit for bit, on one rank and on several."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from support import deferred
from support.deferred import (
    ADAMW,
    BATCH_SIZE,
    DATA,
    SGD,
    WAYS,
    Task,
    assert_equal,
    everything,
    planned,
    replica_of,
    worlds,
)
from support.graphs import CpuRecorder, is_recording
from support.torch_threads import ThreadHvd
from torch import nn

from horovod_train.collectives.base import SingleRank
from horovod_train.data.shard import PlannedStep, share_of_step
from horovod_train.frameworks.torch.step import graphs as graphs_module
from horovod_train.frameworks.torch.step.graphs import MAX_GRAPHS, MEASURED_STEPS, WARM_UP_STEPS

NUM_STEPS = 12


def trained(
    world,
    *,
    graphs,
    task=None,
    accumulation=1,
    recorder=None,
    rates=None,
    before=None,
    steps=NUM_STEPS,
    **fields,
):
    """Make twelve steps; return all that must not differ, what steps turned out to be, and the recorder."""
    replica = replica_of(world, 2, task=task, **fields)
    recorder = recorder or CpuRecorder()
    if graphs:
        replica.record_steps(recorder, only_if_faster=False)
    torch.manual_seed(5)
    readings = []
    for number in range(steps):
        if before is not None:
            before(number, replica)
        step = planned(world, number % 6, accumulation=accumulation)
        lr = 0.125 if rates is None else rates(number)
        readings.append(replica.step(step, lr, want_norm=number % 3 == 0))
    found = [(o.loss, o.grad_norm, o.is_finite, o.was_executed) for o in (r.outcome() for r in readings)]
    return everything(replica), found, recorder


def assert_alike(size, **how):
    made = worlds(size, lambda world: trained(world, graphs=False, **how))
    replayed = worlds(size, lambda world: trained(world, graphs=True, **how))
    for (state, found, recorder), (wanted, wanted_found, _) in zip(replayed, made, strict=True):
        assert_equal(state, wanted)
        assert [str(each) for each in found] == [str(each) for each in wanted_found]
        assert recorder.num_replayed > 0
    return replayed


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=lambda o: o[0])
@pytest.mark.parametrize("way", WAYS)
def test_are_the_same(way, optimizer, size):
    assert_alike(size, optimizer=optimizer, **WAYS[way])


@pytest.mark.parametrize("size", [1, 2])
def test_follow_the_learning_rate(size):
    assert_alike(size, rates=lambda number: 0.5 ** (2 + number % 4))


@pytest.mark.parametrize("size", [1, 2])
def test_accumulate_gradients(size):
    for *_, recorder in assert_alike(size, accumulation=2):
        # One graph of a micro-batch, and one update with the norm and one without; each was made once before.
        assert recorder.num_recorded == 3
        assert recorder.num_replayed == (NUM_STEPS - WARM_UP_STEPS) * 3 - 3


@pytest.mark.parametrize("mode", ["stop", "skip"])
@pytest.mark.parametrize("size", [1, 2])
def test_leave_out_what_is_not_finite(size, mode):
    """NaN comes with the data: what Python decides is not asked again."""

    class Tainted(Task):
        def loss(self, model, batch):
            return super().loss(model, batch) + batch.max() * 0

    kept = DATA.clone()

    def taint(number, replica):
        place = planned(replica.data_ranks, 3).share.micro_batches[0].start
        if replica.data_ranks.rank == 0:
            DATA[place, 0] = math.nan if number == 9 else kept[place, 0]

    try:
        made = worlds(
            size,
            lambda world: trained(
                world, graphs=True, before=taint, task=Tainted(), health={"non_finite": mode}
            ),
        )
        never = worlds(
            size,
            lambda world: trained(
                world, graphs=False, before=taint, task=Tainted(), health={"non_finite": mode}
            ),
        )
    finally:
        DATA.copy_(kept)
    for (state, found, _), (wanted, wanted_found, _) in zip(made, never, strict=True):
        assert_equal(state, wanted)
        assert [str(each) for each in found] == [str(each) for each in wanted_found]
        used = [is_finite for _, _, is_finite, _ in found]
        assert used == [True] * 9 + ([False] * 3 if mode == "stop" else [False, True, True])


class Dropping(Task):
    def loss(self, model, batch):
        return nn.functional.dropout(model(batch), 0.5).square().mean()


def test_draw_new_numbers_each_time():
    _, found, _ = trained(SingleRank(), graphs=True, task=Dropping())

    assert len({loss for loss, *_ in found}) == NUM_STEPS
    assert_alike(1, task=Dropping())


def test_gradients_leave_when_the_graph_has_run_and_not_while_it_is_recorded(monkeypatch):
    during = []
    start = ThreadHvd.allreduce_async_

    def allreduce_async_(hvd, tensor, name, op):
        during.append(is_recording())
        return start(hvd, tensor, name, op)

    monkeypatch.setattr(ThreadHvd, "allreduce_async_", allreduce_async_)

    assert_alike(2, allreduce={"bucket_size_mib": 1e-5})  # several buckets

    assert during
    assert not any(during)


class TestWhatChanges:
    def test_in_what_is_trained_is_recorded_anew(self):
        def freeze(number, replica):
            if number in {7, 9}:
                replica.model[3].weight.requires_grad_(number == 9)

        for *_, recorder in assert_alike(2, before=freeze, steps=18, optimizer=("SGD", {"lr": 0.1})):
            assert recorder.num_recorded > 3

    def test_in_the_settings_of_the_optimizer_is_recorded_anew(self):
        def decay(number, replica):
            replica.optimizer.param_groups[0]["weight_decay"] = 0.5 if number >= 7 else 0.0

        assert_alike(1, before=decay)

    @pytest.mark.parametrize("size", [1, 2])
    def test_in_where_the_optimizers_state_lies_is_recorded_anew(self, size):
        """Training goes back to a checkpoint, and the state of that time is other memory."""
        kept = {}

        def restore_checkpoint(number, replica):
            if number == 6:
                kept[replica.data_ranks.rank] = replica.state(copy=True)
            if number == 9:
                replica.load_state(kept[replica.data_ranks.rank])

        for *_, recorder in assert_alike(size, before=restore_checkpoint, optimizer=ADAMW):
            assert recorder.num_recorded > 3

    def test_in_where_weights_lie_is_recorded_anew(self):
        def move(number, replica):
            if number == 8:
                replica.model[3].weight.data = replica.model[3].weight.data.clone()

        assert_alike(1, before=move)

    def test_in_shapes_has_a_graph_of_its_own_up_to_a_limit(self):
        replica = replica_of(SingleRank(), 2)
        recorder = CpuRecorder()
        replica.record_steps(recorder, only_if_faster=False)

        for length in [BATCH_SIZE] * 5 + [length for length in range(2, 2 + MAX_GRAPHS) for _ in range(2)]:
            share = share_of_step(0, length, batch_size=length, accumulation_steps=1, rank=0, size=1)
            replica.step(PlannedStep(share, iter([DATA[:length]])), 0.1, want_norm=False)

        assert recorder.num_recorded == MAX_GRAPHS


class TwoHeads(Task):
    """A batch is for one head or the other, as its data say."""

    def __init__(self, period):
        super().__init__()
        self.period = period

    def loss(self, model, batch):
        name, rows = batch
        head = model.first if name == "first" else model.second
        return head(model.body(rows)).square().mean()


class WithHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(5, 4)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=lambda o: o[0])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_a_step_does_not_use_is_left_alone(monkeypatch, size, optimizer, accumulation):
    """Neither momentum nor decay moves it, as without graphs; what is in one micro-batch alone is summed."""
    torch.manual_seed(1)
    monkeypatch.setattr(deferred, "MODEL", WithHeads())

    def rank(world, graphs):
        replica = replica_of(world, 2, optimizer=optimizer, task=TwoHeads(1))
        recorder = CpuRecorder()
        if graphs:
            replica.record_steps(recorder, only_if_faster=False)
        for number in range(16):
            step = planned(world, number % 6, accumulation=accumulation)
            name = "first" if number % 5 < 3 else "second"  # on all ranks alike
            names = [name, "second"] if accumulation == 2 else [name]
            batches = [(which, batch) for which, (_, batch) in zip(names, step, strict=True)]
            replica.step(PlannedStep(step.share, iter(batches)), 0.125, want_norm=False)
        return everything(replica), recorder.num_replayed

    for (found, num_replayed), (wanted, _) in zip(
        worlds(size, lambda world: rank(world, graphs=True)),
        worlds(size, lambda world: rank(world, graphs=False)),
        strict=True,
    ):
        assert_equal(found, wanted)
        assert num_replayed > 8


def test_gradients_of_what_the_optimizer_does_not_have_do_not_pile_up():
    replica = replica_of(SingleRank(), 2)
    extra = replica.model.extra = nn.Parameter(torch.ones(()))
    plain = replica.task.loss
    replica.task.loss = lambda model, batch: plain(model, batch) + 0.0 * extra + extra
    replica.record_steps(CpuRecorder(), only_if_faster=False)

    for number in range(8):
        replica.step(planned(SingleRank(), number % 6), 0.125, want_norm=False)

        assert extra.grad == 1.0


class TestWhatABatchHolds:
    def steps(self, batch_of, count=10):
        """Steps whose batches hold something besides a tensor."""

        class Holding(Task):
            def loss(self, model, batch):
                return super().loss(model, batch[0])

        replica = replica_of(SingleRank(), 2, task=Holding())
        recorder = CpuRecorder()
        replica.record_steps(recorder, only_if_faster=False)
        for number in range(count):
            step = planned(SingleRank(), number % 6)
            batches = [(batch, batch_of(number)) for _, batch in step]
            replica.step(PlannedStep(step.share, iter(batches)), 0.125, want_norm=False)
        return recorder

    def test_that_is_the_same_each_time_is_no_hindrance(self):
        assert self.steps(lambda _: {"names": ["a", None], "scale": 0.5}).num_recorded == 2

    def test_that_differs_is_another_kind_of_work(self):
        """An array's text is shortened; two that differ in the middle are not the same."""

        def mask(number):
            made = np.zeros(2000)
            made[1000] = number
            return made

        assert self.steps(mask).num_recorded == 1  # the update alone

    def test_that_differs_each_time_is_told(self, caplog, monkeypatch):
        monkeypatch.setattr(graphs_module, "MAX_KINDS", 4)
        self.steps(lambda number: f"{number}.png", 16)

        assert (
            caplog.text.count(
                "batches have more than 4 combinations of shapes and of values that are not tensors"
            )
            == 1
        )

    def test_that_cannot_be_compared_is_told(self, caplog):
        self.steps(lambda _: object())

        assert caplog.text.count("batches contain a object, and run without CUDA graphs") == 1


def test_a_kind_that_cannot_be_recorded_leaves_others_their_graphs(caplog):
    class Reading(Task):
        def loss(self, model, batch):
            loss = super().loss(model, batch)
            return loss if len(batch) != 3 or float(loss.detach()) > -1 else loss * 0

    replica = replica_of(SingleRank(), 2, task=Reading())
    recorder = CpuRecorder()
    replica.record_steps(recorder, only_if_faster=False)

    for length in [BATCH_SIZE] * 6 + [3] * 3 + [BATCH_SIZE] * 2:
        share = share_of_step(0, length, batch_size=length, accumulation_steps=1, rank=0, size=1)
        replica.step(PlannedStep(share, iter([DATA[:length]])), 0.125, want_norm=False)

    assert recorder.num_recorded == 2
    assert recorder.num_replayed == 2 * 2 + 3 + 2 * 2
    assert caplog.text.count("a step cannot be captured") == 1


def test_rates_are_those_of_graphs_in_all_steps():
    """Graphs read them in 32 bits, and a run that is resumed makes its first steps without."""
    replica = replica_of(SingleRank(), 2)
    replica.record_steps(CpuRecorder(), only_if_faster=False)
    replica.step(planned(SingleRank(), 0), 0.1, want_norm=False)

    assert replica.optimizer.param_groups[0]["lr"] == float(np.float32(0.1)) != 0.1


class TestWhatCannotBeRecorded:
    def test_is_made_without_and_told(self, caplog):
        class Reading(Task):
            def loss(self, model, batch):
                loss = super().loss(model, batch)
                return loss if float(loss.detach()) > -1 else loss * 0

        made = trained(SingleRank(), graphs=False, task=Reading())
        found = trained(SingleRank(), graphs=True, task=Reading())

        assert_equal(found[0], made[0])
        assert found[2].num_replayed == 0
        assert caplog.text.count("a step cannot be captured (RuntimeError: operation not permitted") == 1
        assert found[2].num_recorded == 0

    def test_in_the_middle_of_an_update_with_a_loss_scale(self, caplog):
        """Gradients are unscaled by then, as far as the scaler knows."""

        class Broken(CpuRecorder):
            def record(self, work):
                with pytest.MonkeyPatch.context() as patch:
                    if self.num_recorded:
                        patch.setattr(torch.optim.SGD, "step", broken)
                    return super().record(work)

        def broken(_):
            raise RuntimeError("out of graphs")

        fields = {"train": {"precision": "fp16"}}
        made = trained(SingleRank(), graphs=False, **fields)
        found = trained(SingleRank(), graphs=True, recorder=Broken(), **fields)

        assert_equal(found[0], made[0])
        assert "out of graphs" in caplog.text

    def test_is_an_optimizer_that_the_host_has_to_wait_for(self, caplog):
        replica = replica_of(SingleRank(), 2, optimizer=("SGD", {"lr": 0.1, "fused": False}))
        replica.record_steps(CpuRecorder(), only_if_faster=False)

        assert replica._graphs is None
        assert "SGD requires a decision of the host in each step" in caplog.text

    def test_is_a_strategy_that_asks_other_ranks_in_each_step(self, caplog):
        replica = replica_of(SingleRank(), 2, strategy={"name": "local_sgd", "args": {"every_steps": 2}})
        replica.record_steps(CpuRecorder(), only_if_faster=False)

        assert replica._graphs is None
        assert "LocalSgd requires a decision of the host in each step" in caplog.text


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("delay_s", "is_kept"), [(0.0, None), (0.05, False)])
def test_auto_keeps_what_is_faster_on_all_ranks_alike(caplog, size, delay_s, is_kept):
    def rank(world):
        replica = replica_of(world, 2)
        # One rank alone is slowed down by graphs.
        recorder = CpuRecorder(delay_s if world.rank == 0 else 0.0)
        replica.record_steps(recorder, only_if_faster=True)
        total = WARM_UP_STEPS + 2 * MEASURED_STEPS + 12
        for number in range(total):
            replica.step(planned(world, number % 6), 0.01, want_norm=False)
            if number == total - 5:
                before = recorder.num_replayed
        return recorder.num_replayed > before

    kept = worlds(size, rank)

    assert len(set(kept)) == 1
    assert is_kept is None or kept[0] is is_kept
    assert "ms a step without graphs" in caplog.text


def test_auto_goes_on_without_on_all_ranks_where_one_cannot_record(caplog):
    class Broken(CpuRecorder):
        def record(self, work):
            raise RuntimeError("out of memory")

    def rank(world):
        replica = replica_of(world, 2)
        recorder = Broken() if world.rank == 1 else CpuRecorder()
        replica.record_steps(recorder, only_if_faster=True)
        before = 0
        for number in range(WARM_UP_STEPS + 2 * MEASURED_STEPS + 12):
            replica.step(planned(world, number % 6), 0.01, want_norm=False)
            if number == WARM_UP_STEPS + 2 * MEASURED_STEPS + 7:
                before = recorder.num_replayed
        return recorder.num_replayed - before

    assert worlds(2, rank) == [0, 0]
    assert "not possible with: training continues without graphs" in caplog.text


def test_auto_is_not_misled_by_what_lies_between_steps(caplog, monkeypatch):
    """An evaluation, a checkpoint: neither belongs to how steps are made. The clock is the test's own."""
    now_s = 0.0
    monkeypatch.setattr(graphs_module, "perf_counter", lambda: now_s)
    replica = replica_of(SingleRank(), 2)
    replica.record_steps(CpuRecorder(), only_if_faster=True)
    for number in range(WARM_UP_STEPS + 2 * MEASURED_STEPS + 6):
        measured = number - WARM_UP_STEPS - MEASURED_STEPS
        now_s += 0.3 if measured in {5, 8} else 0.004  # two evaluations
        replica.step(planned(SingleRank(), number % 6), 0.01, want_norm=False)

    found = re.search(r"([\d.]+) ms a step without graphs, ([\d.]+) ms with", caplog.text)
    assert found.groups() == ("4.00", "4.00")
