"""Who waited for whom: against a simulation that goes through all arrivals, and in a world of threads."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.training import Told, made
from support.worlds import on_ranks

from horovod_train.collectives.base import SingleRank
from horovod_train.frameworks.base import StepClock, StepOutcome
from horovod_train.telemetry.recorder import Recorder, attribute_waiting
from horovod_train.training.hooks import steps as steps_module
from horovod_train.training.hooks.base import PeriodicExchange
from horovod_train.training.hooks.steps import AttributeWaiting
from horovod_train.training.loop import train

SECONDS = st.floats(0.0, 10.0, allow_subnormal=False)


def simulated(wait_times_s):
    """From arrival to arrival: whoever is there waits, whoever is not is charged with its share of it."""
    num_ranks = len(wait_times_s)
    waiting, waited_for = [0.0] * num_ranks, [0.0] * num_ranks
    leaves = max(wait_times_s)  # all leave together; who waited longest came at 0
    arrivals = sorted((leaves - wait, rank) for rank, wait in enumerate(wait_times_s))
    for place, (begin, _) in enumerate(arrivals[:-1]):
        end = arrivals[place + 1][0]
        there = [rank for _, rank in arrivals[: place + 1]]
        missing = [rank for _, rank in arrivals[place + 1 :]]
        for rank in there:
            waiting[rank] += end - begin
        for rank in missing:
            waited_for[rank] += len(there) * (end - begin) / len(missing)
    return waiting, waited_for, leaves - arrivals[-1][0]


@given(st.lists(SECONDS, min_size=1, max_size=9))
def test_waiting_is_shared_out_as_arrivals_say(wait_times_s):
    waiting, waited_for, communication = attribute_waiting(np.array([wait_times_s]))
    expected = simulated(wait_times_s)

    assert waiting == pytest.approx(expected[0], abs=1e-9)
    assert waited_for == pytest.approx(expected[1], abs=1e-9)
    assert communication[0] == pytest.approx(expected[2], abs=1e-9)
    assert waited_for.sum() == pytest.approx(waiting.sum(), abs=1e-9)


def test_steps_are_judged_one_by_one():
    """Two ranks that are late in turn cost as much as one that always is; their sums alone do not show it."""
    waiting, waited_for, _ = attribute_waiting(np.array([[0.0, 1.0], [1.0, 0.0]]))

    assert waiting.tolist() == [1.0, 1.0]
    assert waited_for.tolist() == [1.0, 1.0]


def test_of_two_late_ranks_both_are_named():
    _, waited_for, _ = attribute_waiting(np.array([[0.1, 3.1, 0.1, 3.1]]))

    assert waited_for == pytest.approx([3.0, 0.0, 3.0, 0.0])


class Slowed:
    """A replica whose steps seem to take as long as a table says, and waits as others make it wait."""

    def __init__(self, replica, own_s, communication_s=0.0):
        self._replica = replica
        self._own_s = own_s  # [steps, ranks]
        self._communication_s = communication_s
        self._step = 0

    def __getattr__(self, name):
        return getattr(self._replica, name)

    def step(self, step, lr, *, want_norm):
        outcome = self._replica.step(step, lr, want_norm=want_norm)
        own = self._own_s[self._step % len(self._own_s)]
        rank = self._replica._world.rank
        self._step += 1
        wait_s = max(own) - own[rank] + self._communication_s
        clock = StepClock(_last=0.0)
        clock.seconds.update(data=own[rank] / 4, compute=own[rank] * 3 / 4, allreduce_wait=wait_s)
        clock._last = own[rank] + wait_s
        return StepOutcome(**{**fields_of(outcome), "clock": clock})


def fields_of(outcome):
    return {name: getattr(outcome, name) for name in outcome.__dataclass_fields__}


def recorded(recorder, name):
    return {
        sample.labels["rank"]: sample.value
        for family in recorder.registry.collect()
        for sample in family.samples
        if sample.name == f"horovod_train_{name}"
    }


def trained(own_s, monkeypatch, communication_s=0.0, epochs=20):
    """Train on as many threads as the table has ranks; return recorders and what rank 0 reported."""
    monkeypatch.setattr(steps_module, "times_interval_s", lambda _: 0.0)

    def rank(world):
        run, told = made(world, train={"epochs": epochs}), Told(world.rank)
        run.replica = Slowed(run.replica, own_s, communication_s)
        recorder = Recorder("line", "run", world, world.size)
        exchange = PeriodicExchange(world, clock=lambda: 0.3 * run.progress.step)
        hook = AttributeWaiting(world.size, world.rank, recorder, told.reporter)
        exchange.contributions.append(hook)
        run.hooks = [hook, Exchanging(exchange)]
        train(run)
        return run.progress.step, recorder, told.events("rank_times")

    return on_ranks(len(own_s[0]), rank)


class Exchanging:
    """What preemption does: exchange after each step that is due."""

    def __init__(self, exchange):
        self._exchange = exchange

    def __getattr__(self, name):
        return lambda *_, **__: None

    def on_step(self, run):
        self._exchange.after_step()


def test_each_rank_records_what_it_waited_and_what_it_was_waited_for(monkeypatch):
    own_s = [[0.1, 0.1, 0.5], [0.1, 0.3, 0.1]]
    ranks = trained(own_s, monkeypatch, communication_s=0.02)
    num_steps = ranks[0][0]
    expected = [simulated([max(own) - each + 0.02 for each in own]) for own in own_s]

    for rank, (_, recorder, _) in enumerate(ranks):
        sums = [
            recorded(recorder, f"{name}_seconds_total")[str(rank)]
            for name in ("waiting", "waited_for", "communication")
        ]
        # Of the last few steps nobody has told the others.
        for total, of_steps in zip(
            sums, ([e[0][rank] for e in expected], [e[1][rank] for e in expected], [e[2] for e in expected]),
            strict=True,
        ):  # fmt: skip
            mean = sum(of_steps) / 2
            assert (num_steps - 66) * mean - 1e-6 <= total <= num_steps * mean + max(of_steps) + 1e-6


def test_rank_0_reports_where_the_time_of_all_went(monkeypatch):
    ranks = trained([[0.1, 0.4]], monkeypatch)
    events = ranks[0][2]

    assert not ranks[1][2], "the others are silent"
    steps = sum(event["steps"][1] for event in events)
    assert steps == ranks[0][0]
    assert sum(event["step_s"][0] for event in events) == pytest.approx(0.4 * steps, abs=0.01)
    assert sum(event["phases_s"]["data"][1] for event in events) == pytest.approx(0.1 * steps, abs=0.01)
    assert sum(event["phases_s"]["allreduce_wait"][0] for event in events) == pytest.approx(
        0.3 * steps, abs=0.01
    )
    known = sum(event["waited_for_s"][1] for event in events)
    assert (steps - 66) * 0.3 <= known <= steps * 0.3 + 0.01
    assert sum(event["waited_for_s"][0] for event in events) == 0.0


def test_after_training_has_gone_back_steps_are_compared_with_those_of_the_same_number():
    """Rank 1 went back from step 5 to step 3: what it waited in the old steps 3 and 4 is not of these."""
    ranks = [AttributeWaiting(2, rank, Recorder("line", "run", SingleRank(rank, 2), 2), Told().reporter)
             for rank in range(2)]  # fmt: skip
    for rank, steps in enumerate(([(3, 0.0), (4, 0.0)], [(3, 9.0), (4, 9.0), (3, 0.25), (4, 0.25)])):
        for number, wait_s in steps:
            ranks[rank].on_result(None, reading_of(number, wait_s))
    payloads = [rank.payload() for rank in ranks]
    for rank in ranks:
        rank.on_gathered(payloads)

    assert recorded(ranks[0]._recorder, "waited_for_seconds_total")["0"] == pytest.approx(0.5)
    assert recorded(ranks[1]._recorder, "waiting_seconds_total")["1"] == pytest.approx(0.5)


def reading_of(step, wait_s):
    clock = SimpleNamespace(seconds={"allreduce_wait": wait_s}, total_s=wait_s + 0.1)
    return SimpleNamespace(
        step=step, outcome=SimpleNamespace(clock=clock), share=SimpleNamespace(num_local_samples=8)
    )


def test_an_event_tells_of_32_ranks_at_most():
    told = Told()
    hook = AttributeWaiting(70, 0, Recorder("line", "run", SingleRank(), 1), told.reporter)
    hook._of_ranks[:, 1] = 1
    hook._report()

    events = told.events("rank_times")
    assert [(event["first_rank"], len(event["steps"])) for event in events] == [(0, 32), (32, 32), (64, 6)]
    assert max(map(len, told.text.splitlines())) < 3500, "launchers cut lines of 4 KiB"


def test_where_waiting_is_not_known_nothing_is_said_of_it(monkeypatch):
    """As on a GPU, or in a graph that does everything at once."""
    monkeypatch.setattr(steps_module, "times_interval_s", lambda num_ranks: 0.03 * num_ranks)
    told = Told()
    run = made(SingleRank())
    recorder = Recorder("line", "run", SingleRank(), 1)
    hook = AttributeWaiting(1, 0, recorder, told.reporter)
    plain = run.replica.step

    def step(*args, **kwargs):
        outcome = plain(*args, **kwargs)
        outcome.clock.seconds.clear()
        return outcome

    run.replica.step = step
    exchange = PeriodicExchange(SingleRank(), clock=lambda: 1.0 * run.progress.step)
    exchange.contributions.append(hook)
    run.hooks = [hook, Exchanging(exchange)]
    train(run)

    assert not recorded(recorder, "waiting_seconds_total")
    assert told.events("rank_times")
    for event in told.events("rank_times"):
        assert event["phases_s"] == {}
        assert event["waited_for_s"] == ()
        assert event["step_s"][0] > 0


@pytest.mark.parametrize("size", [1, 2])
def test_an_exchange_gives_everybody_what_everybody_said(size):
    class Contribution:
        def __init__(self, payloads):
            self.payloads, self.heard = payloads, None

        def payload(self):
            return self.payloads

        def on_gathered(self, of_ranks):
            self.heard = list(of_ranks)

    def rank(world):
        now = [0.0]
        exchange = PeriodicExchange(world, clock=lambda: now[0])
        exchange.contributions += [
            Contribution(b"a" * world.rank),
            Contribution(b""),
            Contribution(bytes([world.rank])),
        ]
        now[0] = 1.0
        assert exchange.after_step()
        return [contribution.heard for contribution in exchange.contributions]

    ranks = range(size)
    expected = [[b"a" * rank for rank in ranks], [b""] * size, [bytes([rank]) for rank in ranks]]
    assert on_ranks(size, rank) == [expected] * size
