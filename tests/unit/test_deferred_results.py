"""Steps that are decided on the device and read later: nothing waits, and nothing comes out otherwise.

A CPU plays the device: it is made to read late, and PyTorch's fused optimizers for CPUs take the decision as
those for GPUs do.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.deferred import (
    ADAMW,
    BATCH_SIZE,
    DATA,
    MODEL,
    NUM_STEPS,
    SGD,
    WAYS,
    Task,
    assert_equal,
    everything,
    planned,
    replica_of,
    trained,
    worlds,
)
from support.torch_threads import on_torch_ranks
from support.worlds import Board, ThreadCommunicator
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import horovod_train
from horovod_train.collectives.base import DeviceWork, Mesh, SingleRank
from horovod_train.config.schema import Job
from horovod_train.errors import NumericError, UserError
from horovod_train.frameworks.torch.step import deferred
from horovod_train.frameworks.torch.step.deferred import DeferredOutcome, DeviceClock, HostTimer, pack
from horovod_train.frameworks.torch.step.replica import TorchReplica
from horovod_train.frameworks.torch.step.update import UpdateOnDevice, UpdateOnHost, can_be_masked
from horovod_train.frameworks.torch.strategies.base import make_strategy
from horovod_train.training import loop
from horovod_train.training.hooks.base import Hook
from horovod_train.worker import make_run

PACKAGE = str(Path(horovod_train.__file__).parent)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("optimizer", [SGD, ADAMW, ("Adagrad", {"lr": 0.1})], ids=lambda o: o[0])
@pytest.mark.parametrize("way", WAYS)
def test_steps_decided_on_the_device_are_those_the_host_decides(way, optimizer, size):
    def rank(world, lag_steps):
        replica = replica_of(world, lag_steps, optimizer=optimizer, **WAYS[way])
        found = [reading.outcome() for reading in trained(replica, world)]
        return everything(replica), [(o.loss, o.local_loss, o.grad_norm, o.is_finite) for o in found]

    on_host = worlds(size, lambda world: rank(world, 0))
    on_device = worlds(size, lambda world: rank(world, 2))

    for (state, outcomes), (wanted, wanted_outcomes) in zip(on_device, on_host, strict=True):
        assert_equal(state, wanted)
        assert outcomes == wanted_outcomes


def test_accumulated_gradients_and_64_bits_too():
    world = SingleRank()
    states = []
    for lag_steps in (0, 3):
        replica = replica_of(
            world, lag_steps, dtype=torch.float64, optimizer=ADAMW, train={"clip_grad_norm": 0.1}
        )
        for reading in trained(replica, world, dtype=torch.float64, accumulation=2):
            assert reading.is_finite
        states.append(everything(replica))

    assert_equal(states[1], states[0])


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("step", [1, 2, NUM_STEPS])
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=lambda o: o[0])
@pytest.mark.parametrize(
    ("precision", "at"),
    [(precision, at) for precision in ("fp32", "bf16", "fp16") for at in ("loss", "gradient")],
)
class TestABadStep:
    def test_that_is_skipped_never_was(self, size, step, optimizer, precision, at):
        fields = {"train": {"precision": precision}, "health": {"non_finite": "skip"}}

        def rank(world, poison):
            task = Task((step, world.size - 1) if poison else (0, 0), at=at)
            replica = replica_of(world, 2, task=task, optimizer=optimizer, **fields)
            readings = trained(replica, world, skipping=0 if poison else step)
            return everything(replica), [reading.is_finite for reading in readings]

        for (found, used), (wanted, _) in zip(
            worlds(size, lambda world: rank(world, poison=True)),
            worlds(size, lambda world: rank(world, poison=False)),
            strict=True,
        ):
            assert used == [number != step for number in range(1, NUM_STEPS + 1)]
            for name in ("scale", "_growth_tracker") if precision == "fp16" and at == "gradient" else ():
                found[name] = wanted[name]  # an overflow, as far as the loss scale can tell
            assert_equal(found, wanted)

    def test_that_ends_training_is_the_last(self, size, step, optimizer, precision, at):
        def rank(world):
            replica = replica_of(
                world, 2, task=Task((step, 0), at=at), optimizer=optimizer, train={"precision": precision}
            )
            before = []
            readings = []
            for number in range(NUM_STEPS):
                before.append([p.detach().clone() for p in replica.model.parameters()])
                readings.append(replica.step(planned(world, number), 0.1, want_norm=True))
            after = [p.detach().clone() for p in replica.model.parameters()]
            return (
                before[step - 1],
                after,
                [(o.is_finite, o.was_executed) for o in (r.outcome() for r in readings)],
            )

        if precision == "fp16" and at == "gradient":
            # An overflow, as far as anybody can tell: the search of the loss scale goes on.
            assert [used for *_, used in worlds(size, rank)] == [
                [(n != step, True) for n in range(1, NUM_STEPS + 1)]
            ] * size
            return
        for before, after, outcomes in worlds(size, rank):
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
            wanted = [(n < step, n <= step) for n in range(1, NUM_STEPS + 1)]
            assert outcomes == wanted


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("lag_steps", [0, 2])
def test_a_step_that_is_skipped_leaves_what_a_codec_keeps_back_as_it_was(size, lag_steps):
    codec = {"codec": {"name": "top-k", "args": {"keep": 0.4}}}

    def rank(world, poison):
        task = Task((3, world.size - 1) if poison else (0, 0), at="gradient")
        replica = replica_of(world, lag_steps, task=task, health={"non_finite": "skip"}, allreduce=codec)
        used = [reading.is_finite for reading in trained(replica, world, skipping=0 if poison else 3)]
        assert used.count(False) == poison
        return everything(replica), {
            name: kept.clone() for name, kept in replica.strategy.rank_state().items()
        }

    for (found, found_kept), (wanted, wanted_kept) in zip(
        worlds(size, lambda world: rank(world, poison=True)),
        worlds(size, lambda world: rank(world, poison=False)),
        strict=True,
    ):
        assert_equal(found, wanted)
        assert_equal(found_kept, wanted_kept)
        assert any(kept.any() for kept in found_kept.values())


def test_too_many_bad_steps_in_a_row_end_training_on_the_device_too():
    class Worse(Task):
        def loss(self, model, batch):
            return super().loss(model, batch) * (math.nan if self.num_steps in {1, 3, 4, 5} else 1.0)

    world = SingleRank()
    replica = replica_of(world, 2, task=Worse(), health={"non_finite": "skip", "max_skipped_steps": 2})
    found = [reading.outcome() for reading in trained(replica, world)]

    assert [(o.is_finite, o.was_executed) for o in found] == [
        (False, True), (True, True), (False, True), (False, True), (False, True), (False, False),
    ]  # fmt: skip


def test_who_goes_on_after_the_error_may_skip_as_many_steps_as_at_first():
    class Worse(Task):
        def loss(self, model, batch):
            return super().loss(model, batch) * (math.nan if self.num_steps < 4 else 1.0)

    world = SingleRank()
    replica = replica_of(world, 2, task=Worse(), health={"non_finite": "skip", "max_skipped_steps": 1})
    outcomes = []
    for number in range(4):
        if number == 2:
            replica.resume_updates()
        outcomes.append(replica.step(planned(world, number), 0.1, want_norm=False).outcome())

    assert [(o.is_finite, o.was_executed) for o in outcomes[2:]] == [(False, True), (True, True)]


def test_who_goes_on_after_the_error_trains_again():
    world = SingleRank()
    replica = replica_of(world, 2, task=Task((1, 0)))
    assert not replica.step(planned(world, 0), 0.1, want_norm=False).is_finite
    before = replica.model[0].weight.detach().clone()
    replica.step(planned(world, 1), 0.1, want_norm=False)
    assert torch.equal(replica.model[0].weight, before)

    replica.resume_updates()
    replica.step(planned(world, 2), 0.1, want_norm=False)

    assert not torch.equal(replica.model[0].weight, before)


class TestWhichOptimizers:
    def test_leave_everything_as_it_is_where_they_are_told(self):
        parameters = [nn.Parameter(torch.ones(2))]
        good = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)

        class Own(torch.optim.AdamW):
            pass

        assert can_be_masked(good)
        assert not can_be_masked(torch.optim.SGD(parameters, lr=0.1))
        assert not can_be_masked(torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.1, fused=True))
        assert not can_be_masked(torch.optim.RMSprop(parameters))
        assert not can_be_masked(Own(parameters, fused=True))

    def test_run_somebodys_code_with_each_step_and_so_cannot(self):
        made = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, fused=True)
        handles = [
            made.register_step_pre_hook(lambda *_: None),
            made.register_step_post_hook(lambda *_: None),
            register_optimizer_step_post_hook(lambda *_: None),
        ]
        for handle in handles:
            assert not can_be_masked(made)
            handle.remove() if handle is not handles[-1] else None
        handles[-1].remove()

        assert can_be_masked(made)

    @pytest.mark.parametrize("optimizer", [("RMSprop", {"lr": 0.01}), ("SGD", {"lr": 0.1, "fused": False})])
    def test_cannot_and_are_waited_for(self, optimizer):
        if optimizer[0] == "RMSprop":
            optimizer = ("RMSprop", {"lr": 0.01, "fused": None})
            pytest.importorskip("torch")
        world = SingleRank()
        name, args = optimizer
        model = copy.deepcopy(MODEL)
        made = getattr(torch.optim, name)(
            model.parameters(), **{k: v for k, v in args.items() if v is not None}
        )
        job = Job(name="late", task="own:Loop")
        strategy = make_strategy(job, Mesh.data_parallel(world))
        strategy.bind(model, made)
        replica = TorchReplica(
            model=model, optimizer=made, strategy=strategy, data_ranks=world, train=job.train,
            task=Task((2, 0)), lag_steps=2,
        )  # fmt: skip
        readings = trained(replica, world)

        assert isinstance(replica._update, UpdateOnHost)
        assert [(reading.is_finite, reading.was_executed) for reading in readings] == [
            (True, True), (False, True), *[(False, False)] * 4,
        ]  # fmt: skip
        before = [p.detach().clone() for p in model.parameters()]
        replica.resume_updates()
        assert trained(replica, world)[0].is_finite
        assert not all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))

    def test_that_are_waited_for_skip_as_many_as_others(self):
        class Worse(Task):
            def loss(self, model, batch):
                return super().loss(model, batch) * (math.nan if self.num_steps in {1, 3, 4, 5} else 1.0)

        outcomes = []
        for fused in (True, False):
            replica = replica_of(
                SingleRank(),
                2,
                task=Worse(),
                optimizer=("SGD", {"lr": 0.1, "fused": fused}),
                health={"non_finite": "skip", "max_skipped_steps": 2},
            )
            found = [reading.outcome() for reading in trained(replica, SingleRank())]
            outcomes.append([(o.is_finite, o.was_executed) for o in found])

        assert outcomes[0] == outcomes[1]

    def test_are_asked_again_in_each_step(self):
        replica = replica_of(SingleRank(), 2)
        assert isinstance(replica._update, UpdateOnDevice)
        handle = replica.optimizer.register_step_post_hook(lambda *_: None)
        assert isinstance(replica._update, UpdateOnHost)
        handle.remove()
        assert isinstance(replica._update, UpdateOnDevice)


def test_a_parameter_whose_first_gradient_comes_late_has_the_momentum_of_the_others():
    """PyTorch's own fused SGD stumbles over it."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.later = nn.Linear(3, 2), nn.Linear(3, 2)
            self.num_calls = 0

        def forward(self, x):
            self.num_calls += 1
            return self.always(x) + (self.later(x) if self.num_calls > 2 else 0)

    with torch.random.fork_rng():
        torch.manual_seed(1)
        start = Branches()
    weights = []
    for lag_steps, fused in ((0, False), (2, True)):
        model = copy.deepcopy(start)
        made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
        job = Job(name="late", task="own:Loop")
        strategy = make_strategy(job, Mesh.data_parallel(SingleRank()))
        strategy.bind(model, made)
        replica = TorchReplica(
            model=model, optimizer=made, strategy=strategy, data_ranks=SingleRank(), train=job.train,
            task=Task(), lag_steps=lag_steps,
        )  # fmt: skip
        trained(replica, SingleRank())
        weights.append([p.detach().clone() for p in model.parameters()])

    for found, wanted in zip(weights[1], weights[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


# -- whole runs


class Recorded(Hook):
    def __init__(self):
        self.steps = []

    def on_result(self, run, report):
        found = report.outcome
        self.steps.append((report.step, report.epochs_passed, report.lr, found.loss, found.is_finite))


class WholeTask(Task):
    def model(self):
        return copy.deepcopy(MODEL)

    def train_data(self):
        return DATA

    def eval_data(self):
        return DATA[:7]

    def metrics(self, model, batch):
        return {"loss": model(batch).square().mean(1)}


def whole_run(world: Any, monkeypatch: Any, lag_steps: int, task: Any, **fields: Any) -> Any:
    from horovod_train.frameworks.torch import framework as module

    monkeypatch.setattr(deferred, "lag_steps_of", lambda _: lag_steps)
    monkeypatch.setattr(module, "load_task", lambda *_: task())
    job = Job.model_validate(
        {
            "name": "late",
            "task": "own:Loop",
            "train": {"epochs": 2, "batch_size_per_rank": BATCH_SIZE // world.size},
            "optimizer": {"name": "sgd", "args": {"momentum": 0.9, "fused": True}},
            "data": {"shuffle": False},
            **fields,
        }
    )
    mesh = Mesh(world, world)
    replica, train_reader, eval_reader = module.TorchFramework().prepare(job, mesh)
    replica.task.rank = world.rank
    run = make_run(job, mesh, replica, train_reader, eval_reader)
    run.hooks.append(Recorded())
    return run


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("mode", ["stop", "skip"])
@pytest.mark.parametrize("step", [0, 1, 4, 11])
def test_what_is_recorded_does_not_depend_on_the_lag(monkeypatch, size, mode, step):
    """Of 12 steps; 0: none is bad."""

    def rank(world, lag_steps):
        run = whole_run(
            world,
            monkeypatch,
            lag_steps,
            lambda: WholeTask((step, world.size - 1)),
            health={"non_finite": mode},
        )
        said = ""
        try:
            loop.train(run)
        except NumericError as error:
            said = error.message
        weights = [p.detach().clone() for p in run.replica.model.parameters()]
        return said, [str(s) for s in run.hooks[-1].steps], weights  # as text: NaN equals NaN

    wanted = worlds(size, lambda world: rank(world, 0))
    ends = mode == "stop" and step
    assert wanted[0][0] == (f"step {step}: the loss is nan because of rank {size - 1}" if ends else "")
    assert len(wanted[0][1]) == (step - 1 if ends else 12)
    for lag_steps in range(1, 6):
        for found, at_once in zip(worlds(size, lambda w, lag=lag_steps: rank(w, lag)), wanted, strict=True):
            assert found[:2] == at_once[:2]
            assert all(torch.equal(a, b) for a, b in zip(found[2], at_once[2], strict=True))


# -- ranks that change what they train


class TestWhatIsTrainedChanges:
    def rank(self, world, changing):
        replica = replica_of(world, 2, optimizer=("SGD", {"lr": 0.1}))
        for number in range(NUM_STEPS):
            if number == 2 and world.rank in changing:
                replica.model[3].weight.requires_grad_(False)
            replica.step(planned(world, number), 0.1, want_norm=False)
        return replica.model[3].weight.detach().clone(), replica.model[0].weight.detach().clone()

    def test_on_all_ranks_at_once(self):
        (frozen, first), (other_frozen, other_first) = worlds(2, lambda world: self.rank(world, {0, 1}))

        assert torch.equal(frozen, other_frozen)
        assert torch.equal(first, other_first)

    def test_on_one_rank_alone_and_it_says_so(self):
        """The other one hears that it has left."""

        def rank(world):
            world.hvd._board.timeout_s = 0.3
            return self.rank(world, {1})

        _, error = on_torch_ranks(2, rank)

        assert isinstance(error, UserError)
        assert error.message == "the set of trained parameters has changed on this rank, not on all others"


# -- time


class FakeTimer:
    """A device that begins work when it has done what was queued before: time as a number of seconds.

    The host's time passes by ``host``; work is queued by ``work``; a mark knows when the device comes to it.
    """

    def __init__(self):
        self.host_s = self.device_s = 0.0
        self.free = []

    def host(self, seconds):
        self.host_s += seconds

    def work(self, seconds):
        self.device_s = max(self.device_s, self.host_s) + seconds

    def mark(self):
        self.device_s = max(self.device_s, self.host_s)
        return self.device_s

    def seconds_between(self, first, second):
        return second - first

    def release(self, marks):
        self.free += marks


class TestTheClock:
    def step(self, timer, *, data_s, launch_s, forward_s, wait_s):
        clock = DeviceClock(timer)
        timer.host(data_s)
        clock.end_phase("data")
        timer.host(launch_s)
        timer.work(forward_s)
        clock.end_phase("forward")
        timer.work(wait_s)
        clock.end_phase("allreduce_wait")
        return clock

    def test_tells_the_time_of_a_device_that_is_always_busy(self):
        timer = FakeTimer()
        clocks = [self.step(timer, data_s=0.2, launch_s=0.1, forward_s=1.0, wait_s=0.25) for _ in range(4)]
        for clock in clocks:
            clock.read()

        # Reading data was hidden behind the work of the step before.
        assert clocks[-1].seconds == {"data": 0.0, "forward": 1.0, "allreduce_wait": 0.25}
        assert clocks[-1].total_s == 1.25
        assert clocks[-1].own_s == 1.0
        assert clocks[0].seconds["data"] == 0.2  # the first had nothing to hide behind

    def test_tells_the_time_of_a_device_that_waits_for_the_host(self):
        timer = FakeTimer()
        clocks = [self.step(timer, data_s=0.2, launch_s=0.5, forward_s=0.125, wait_s=0.0) for _ in range(3)]
        for clock in clocks:
            clock.read()

        assert clocks[-1].seconds["forward"] == pytest.approx(0.625)
        assert clocks[-1].total_s == pytest.approx(0.7)

    def test_adds_up_over_micro_batches_and_gives_its_marks_back(self):
        timer = FakeTimer()
        clock = DeviceClock(timer)
        for seconds in (1.0, 2.0):
            timer.work(seconds)
            clock.end_phase("forward")
        clock.read()

        assert clock.seconds == {"forward": 3.0}
        assert len(timer.free) == 3


def test_an_outcome_is_read_once_and_stays():
    clock = DeviceClock(FakeTimer())
    clock.end_phase("forward")
    loss = torch.tensor(2.0)
    outcome = DeferredOutcome(
        pack({"loss": loss, "local_loss": torch.tensor(1.5), "grad_norm": None, "is_finite": True}),
        clock,
        SingleRank(),
    )
    loss.fill_(9.0)

    assert outcome.outcome() is outcome.outcome()
    assert (outcome.loss, outcome.local_loss, outcome.grad_norm, outcome.is_finite) == (2.0, 1.5, None, True)
    assert outcome.numbers == {"grad_norm": None}


def test_who_looks_on_while_the_host_waits_sees_the_phase_that_the_device_is_in():
    class Device(FakeTimer):
        reached_s = 0.0

        def is_reached(self, mark):
            return mark <= self.reached_s

    timer = Device()
    clock = DeviceClock(timer)
    for phase in ("forward", "backward", "allreduce_wait"):
        timer.work(1.0)
        clock.end_phase(phase)
    seen = []

    def blocking():
        for timer.reached_s in (0.5, 1.0, 2.5, 3.0):
            seen.append((world.waiting_in.phase(), world.waiting_in.is_collective))

    world = ThreadCommunicator(0, Board(2))
    world.wait_in(DeviceWork(clock.phase), blocking)

    assert seen == [("forward", False), ("backward", False), ("allreduce_wait", True), ("", False)]
    assert world.waiting_in is None


@pytest.mark.parametrize("lag_steps", [0, 2])
def test_the_host_says_that_it_waits_for_the_device_before_it_does(monkeypatch, lag_steps):
    waits = []

    class World(SingleRank):
        def wait_in(self, entry, blocking):
            waits.append(type(entry))
            return blocking()

    world = World()
    replica = replica_of(world, lag_steps)
    replica._timer = HostTimer()  # as on a device
    readings = trained(replica, world)
    assert len(waits) == (0 if lag_steps else NUM_STEPS)  # where the update asks the device
    for reading in readings:
        reading.outcome()

    assert set(waits) == {DeviceWork}
    assert len(waits) == (NUM_STEPS if lag_steps else 2 * NUM_STEPS)


# -- a checkpoint between settings


@pytest.mark.parametrize("saved_fused", [True, False])
def test_a_checkpoint_of_the_other_setting_is_taken_over_and_told(saved_fused, caplog):
    """Where an optimizer keeps its state follows from the settings that it has now."""
    world = SingleRank()
    first = replica_of(world, 0, optimizer=("AdamW", {"lr": 0.01, "eps": 1e-3, "fused": saved_fused}))
    trained(first, world)
    second = replica_of(world, 0, optimizer=("AdamW", {"lr": 0.01, "eps": 1e-3, "fused": not saved_fused}))
    second.load_state(first.state(copy=True))
    assert f"with fused: {saved_fused}, and training continues with fused: {not saved_fused}" in caplog.text

    assert [group["fused"] for group in second.optimizer.param_groups] == [not saved_fused]
    trained(second, world)
    trained(first, world)
    for found, wanted in zip(second.model.parameters(), first.model.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
