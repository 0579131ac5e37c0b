"""What a script does, as it is seen from outside: times, samples, and nothing of an evaluation."""

from __future__ import annotations

import logging
import math
import sys
import threading

import pytest
import torch

from horovod_train.scripts.meter import LOSS_INTERVAL_S, StepMeter
from horovod_train.scripts.torch_hooks import as_number, batch_size


class Told:
    """In place of recorder and reporter."""

    def __init__(self):
        self.steps, self.events = [], []

    def record(self, record):
        self.steps.append(record)

    def report(self, event):
        self.events.append(event)

    def of(self, kind):
        return [event for event in self.events if event.kind == kind]


@pytest.fixture
def now_s():
    return [100.0]


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def make(now_s, told):
    def made(rank=0, num_ranks=4, **options):
        meter = StepMeter("j", rank, num_ranks, told, told, clock=lambda: now_s[0], **options)
        meter.has_joined = True
        return meter

    return made


@pytest.fixture
def does(now_s):
    """Do something that takes so long, and return when it began."""

    def doing(seconds):
        begun_s = now_s[0]
        now_s[0] += seconds
        return begun_s

    return doing


def step(meter, does, loss=0.5, *, batch=8, reader="train"):
    meter.batch(does(0.01), batch, reader)
    does(0.02)
    meter.backward(does(0.04), loss)
    does(0.003)
    meter.add_wait_s(0.003)
    does(0.001)
    meter.step(0.1)


def test_time_goes_where_it_went(make, told, does):
    meter = make()
    step(meter, does)

    (record,) = told.steps
    phases = {"data": 0.01, "forward": 0.02, "backward": 0.04, "allreduce_wait": 0.003, "optimizer": 0.001}
    assert record.phase_seconds == pytest.approx(phases)
    assert record.seconds == pytest.approx(sum(phases.values()))
    assert record.own_seconds == pytest.approx(sum(phases.values()) - 0.003)
    assert (record.num_samples, record.lr, record.local_loss) == (8, 0.1, 0.5)


def test_what_is_between_steps_is_no_part_of_one(make, told, does):
    meter = make()
    step(meter, does)
    for _ in range(3):
        meter.batch(does(0.5), 100, "an evaluation that keeps gradients on")
        does(1.0)
    meter.exclude(does(0.1))  # the loader has ended
    does(5.0)
    step(meter, does)

    assert told.steps[1].seconds == pytest.approx(told.steps[0].seconds)
    assert told.steps[1].num_samples == 8


def test_an_evaluation_without_gradients_is_left_out_even_within_a_step(make, told, does):
    meter = make()
    meter.batch(does(0.01), 8, "train")
    meter.backward(does(0.04), 0.5)
    meter.exclude(does(0.5))
    meter.batch(does(0.01), 8, "train")
    meter.backward(does(0.04), 0.5)
    meter.step(0.1)

    assert told.steps[0].num_samples == 16
    assert told.steps[0].seconds == pytest.approx(0.1)


def test_what_was_before_the_first_step_is_no_part_of_it(make, told, does):
    meter = make()
    does(30.0)
    meter.add_wait_s(20.0)  # a broadcast
    begun_s = does(0.04)
    meter.sent(1000)  # within the backward pass
    meter.backward(begun_s, 0.5)
    meter.step(0.1)

    assert told.steps[0].seconds == pytest.approx(0.04)
    assert told.steps[0].numbers["sent_bytes"] == 1000
    assert told.steps[0].phase_seconds.get("allreduce_wait", 0.0) == 0.0


def test_two_loaders_may_feed_one_step(make, told, does):
    meter = make()
    for _ in range(2):
        meter.batch(does(0.01), 8, "images")
        meter.batch(does(0.03), 4, "texts")
        meter.backward(does(0.04), 0.5)
        meter.step(0.1)

    assert [record.num_samples for record in told.steps] == [12, 12]
    assert told.steps[1].phase_seconds["data"] == pytest.approx(0.04)


def test_a_thread_that_reads_ahead_takes_no_time_from_a_step(make, told, does):
    meter = make()
    step(meter, does)
    meter.batch(does(0.01), 8, "train")
    thread = threading.Thread(target=lambda: meter.batch(does(0.5), 8, "ahead"))
    thread.start()
    thread.join()
    meter.add_wait_s(0.5)
    meter.backward(does(0.04), 0.5)
    meter.step(0.1)

    assert told.steps[1].own_seconds >= 0
    assert told.steps[1].num_samples == 16


@pytest.mark.parametrize("num_backward", [1, 3])
def test_samples_that_cannot_be_seen_are_those_that_were_given_for_each_backward_pass(
    make, told, does, num_backward
):
    meter = make(samples_per_batch=32)
    for _ in range(num_backward):
        meter.batch(does(0.01), 7, "train")
        meter.backward(does(0.01), 0.5)
    meter.step(0.1)

    assert told.steps[0].num_samples == 32 * num_backward


def test_of_a_step_without_a_backward_pass_too(make, told, does):
    meter = make(samples_per_batch=32)
    does(0.01)
    meter.step(0.1)

    assert told.steps[0].num_samples == 32


def test_the_speed_is_that_of_all_ranks_and_the_last_step_is_told(make, told, does, monkeypatch):
    seconds = [10.0]
    monkeypatch.setattr("horovod_train.scripts.meter.monotonic", lambda: seconds[0])
    meter = make(num_ranks=4)
    for _ in range(5):
        step(meter, does)
        seconds[0] += 0.5
    seconds[0] -= 0.4
    step(meter, does, loss=0.25)
    meter.end()

    first, *_, before, last = told.of("progress")
    assert first.samples_per_s is None
    assert before.samples_per_s == pytest.approx(8 * 4 / 0.5)
    assert (last.step, last.loss, last.samples_per_s) == (6, 0.25, before.samples_per_s)
    assert last.loss_is_local


def test_other_ranks_tell_no_progress(make, told, does):
    meter = make(rank=1)
    step(meter, does)
    meter.end()

    assert not told.of("progress")
    assert told.of("rank_times")[0].first_rank == 1


def test_samples_that_nobody_knows_are_not_zero(make, told, does):
    meter = make()
    meter.backward(does(0.01), 0.5)
    meter.step(0.1)
    meter.end()

    assert told.steps[0].num_samples is None
    assert told.of("rank_times")[0].samples == ()


def test_a_loss_that_is_not_finite_is_counted_and_told_once(make, told, does):
    meter = make()
    for loss in (0.5, math.nan, math.nan):
        does(LOSS_INTERVAL_S)
        step(meter, does, loss)

    assert [record.is_finite for record in told.steps] == [True, False, False]
    (notice,) = told.of("notice")
    assert "in step 2 this rank's loss is nan" in notice.text
    assert "in step 1 it was finite" in notice.text


def test_a_loss_that_was_not_looked_at_is_neither(make, told, does):
    meter = make()
    step(meter, does, loss=None)

    assert told.steps[0].is_finite is None


@pytest.mark.parametrize(
    ("num_ranks", "has_joined", "is_told"), [(2, False, True), (2, True, False), (1, False, False)]
)
def test_ranks_that_train_alone_are_told_of(make, told, num_ranks, has_joined, is_told, monkeypatch):
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    meter = make(num_ranks=num_ranks)
    meter.has_joined = has_joined
    meter.begin_training(10, 1, "cpu")

    assert [("hvd.init()" in event.text) for event in told.of("notice")] == [True] * is_told


def test_an_error_in_measuring_ends_that_and_nothing_else(make, caplog):
    meter = make()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with meter.watching:
                raise ValueError("a learning rate that is none")

    assert meter.is_off
    assert [each.message for each in caplog.records] == [
        "measurement of the script has stopped: ValueError: a learning rate that is none"
    ]


def test_what_the_script_is_interrupted_with_goes_on(make):
    with pytest.raises(KeyboardInterrupt), make().watching:
        raise KeyboardInterrupt


IMAGES = tuple(torch.zeros(3, 4, 4) for _ in range(5))


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.zeros(7, 3), 7),
        ([torch.zeros(7, 3), torch.zeros(7)], 7),
        ({"ids": torch.zeros(6, 2), "n": 3}, 6),
        ({"meta": {"x": [1, 2]}, "ids": torch.zeros(6)}, 6),
        ((IMAGES, tuple({"boxes": torch.zeros(n, 4)} for n in range(5))), 5),
        (torch.tensor(1.0), None),
        (["a", 1, None], None),
        ([list(range(2048)) for _ in range(64)], None),
        ([], None),
    ],
)
def test_a_batch_has_as_many_samples_as_its_first_tensor_or_row(batch, expected):
    assert batch_size(batch) == expected


@pytest.mark.parametrize(
    ("lr", "expected"),
    [(0.1, 0.1), (torch.tensor(0.5), 0.5), ((0.1, 0.2), None), (None, None), (torch.ones(2), None)],
)
def test_a_learning_rate_may_be_anything(lr, expected):
    assert as_number(lr) == expected
