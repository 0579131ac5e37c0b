"""Steps that are replayed come out as steps that are made: bit for bit, on one rank and on several."""

from __future__ import annotations

import math

import pytest
import torch
from support.graphs import CpuRecorder, is_recording
from support.late import (
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
from support.torch_threads import ThreadHvd
from torch import nn

from horovod_train.collectives.base import SingleRank
from horovod_train.data.planned_step import PlannedStep
from horovod_train.data.shard import share_of_step
from horovod_train.frameworks.torch.graphs import MAX_GRAPHS, MEASURED_STEPS, WARM_UP_STEPS

NUM_STEPS = 12


def trained(world, *, graphs, task=None, accumulation=1, recorder=None, rates=None, before=None, **fields):
    """Make twelve steps; return all that must not differ, what steps turned out to be, and the recorder."""
    replica = replica_of(world, 2, task=task, **fields)
    recorder = recorder or CpuRecorder()
    if graphs:
        replica.record_steps(recorder, only_if_faster=False)
    torch.manual_seed(5)
    readings = []
    for number in range(NUM_STEPS):
        if before is not None:
            before(number, replica)
        step = planned(world, number % 6, accumulation=accumulation)
        lr = 0.1 if rates is None else rates(number)
        readings.append(replica.step(step, lr, want_norm=number % 3 == 0))
    found = [(o.loss, o.grad_norm, o.is_finite, o.is_made) for o in (r.outcome() for r in readings)]
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
    assert_alike(size, rates=lambda number: 0.2 / (1 + number))


@pytest.mark.parametrize("size", [1, 2])
def test_accumulate_gradients(size):
    for *_, recorder in assert_alike(size, accumulation=2):
        # One graph of a micro-batch, and one update with the norm and one without.
        assert recorder.num_recorded == 3
        assert recorder.num_replayed == (NUM_STEPS - WARM_UP_STEPS) * 3


@pytest.mark.parametrize("mode", ["stop", "skip"])
@pytest.mark.parametrize("size", [1, 2])
def test_leave_out_what_is_not_finite(size, mode):
    """NaN comes with the data: what Python decides is not asked again."""

    class Tainted(Task):
        def loss(self, model, batch):
            return super().loss(model, batch) + batch.max() * 0

    kept = DATA.clone()

    def taint(number, replica):
        place = planned(replica._world, 3).share.micro_batches[0].start
        if replica._world.rank == 0:
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

        for *_, recorder in assert_alike(2, before=freeze, optimizer=("SGD", {"lr": 0.1})):
            assert recorder.num_recorded > 3

    def test_in_the_settings_of_the_optimizer_is_recorded_anew(self):
        def decay(number, replica):
            replica.optimizer.param_groups[0]["weight_decay"] = 0.5 if number >= 7 else 0.0

        assert_alike(1, before=decay)

    @pytest.mark.parametrize("size", [1, 2])
    def test_in_where_the_optimizers_state_lies_is_recorded_anew(self, size):
        """Training goes back to a checkpoint, and the state of that time is other memory."""
        kept = {}

        def go_back(number, replica):
            if number == 6:
                kept[replica._world.rank] = replica.state(copy=True)
            if number == 9:
                replica.load_state(kept[replica._world.rank])

        for *_, recorder in assert_alike(size, before=go_back, optimizer=ADAMW):
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

        for length in [BATCH_SIZE] * 4 + list(range(2, 2 + MAX_GRAPHS)):
            share = share_of_step(0, length, batch_size=length, accumulation_steps=1, rank=0, size=1)
            replica.step(PlannedStep(share, iter([DATA[:length]])), 0.1, want_norm=False)

        assert recorder.num_recorded == MAX_GRAPHS


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
        assert caplog.text.count("a step cannot be recorded (RuntimeError: operation not permitted") == 1

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
        assert "SGD cannot leave a step out on the device" in caplog.text


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
