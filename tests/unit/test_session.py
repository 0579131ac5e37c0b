"""The parts for a loop of one's own, in a world of one: steps, their place in the data, saving, going on."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from itertools import chain, islice

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import horovod_train
from horovod_train.checkpoint.store import list_checkpoints
from horovod_train.errors import NumericError, UserError

NUM_SAMPLES = 10
DATA = TensorDataset(torch.arange(NUM_SAMPLES), torch.linspace(-1, 1, NUM_SAMPLES).view(-1, 1))

WITH_LOADERS = """
import json, psutil, subprocess, torch
from torch import nn
from torch.utils.data import TensorDataset
import horovod_train

with horovod_train.init("own", device="cpu") as session:
    model = nn.Linear(1, 1)
    replica = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    loader = session.loader(TensorDataset(torch.arange(40)), batch_size=2, num_workers=1)
    num_signalled, numbers = 0, []
    for step in loader.epoch(0, replica):
        for (index,) in step:
            if not numbers:
                children = psutil.Process().children(recursive=True)
                subprocess.run(["kill", *(str(child.pid) for child in children)], check=True)
                num_signalled = len(children)
            numbers += index.tolist()
            step.backward(model(index.view(-1, 1).float()).mean())
        step.finish(0.1)
print(json.dumps([num_signalled, numbers]))
"""


@pytest.fixture
def session():
    with horovod_train.init("own", device="cpu") as made:
        yield made


def prepared(session, **options):
    torch.manual_seed(3)
    model = nn.Linear(1, 1)
    return session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5), **options)


def step_through(loader, replica, epochs, lr=0.1, upto=None):
    """Train; return the samples of each step."""
    seen = []
    for epoch in range(epochs):
        for step in loader.epoch(epoch, replica):
            if upto is not None and len(seen) == upto:
                return seen
            numbers = []
            for index, x in step:
                numbers += index.tolist()
                step.backward(functional.mse_loss(replica.model(x), 2 * x + 1))
            step.finish(lr)
            seen.append(numbers)
    return seen


def weights(replica):
    return [p.detach().clone() for p in replica.model.parameters()]


class TestSteps:
    @pytest.mark.parametrize("accumulation", [1, 2])
    def test_train_like_a_plain_loop(self, session, accumulation):
        replica = prepared(session)
        loader = session.loader(DATA, batch_size=2, accumulation_steps=accumulation, shuffle=False)

        seen = step_through(loader, replica, 3)

        torch.manual_seed(3)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        for numbers in seen:
            optimizer.zero_grad()
            x = DATA.tensors[1][numbers]
            functional.mse_loss(model(x), 2 * x + 1).backward()
            optimizer.step()
        assert [len(numbers) for numbers in seen] == {1: [2] * 15, 2: [4, 4, 2] * 3}[accumulation]
        for mine, theirs in zip(weights(replica), model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), atol=1e-6, rtol=0)

    def test_that_are_not_read_to_their_end_are_refused(self, session):
        replica = prepared(session)
        loader = session.loader(DATA, batch_size=2, accumulation_steps=2)
        (step, *_) = loader.epoch(0, replica)
        for _, x in step:
            step.backward(replica.model(x).mean())
            break

        with pytest.raises(UserError, match="finished with 1 of its micro-batches unread"):
            step.finish(0.1)

    def test_say_where_their_time_went(self, session):
        replica = prepared(session)
        (step, *_) = session.loader(DATA, batch_size=2).epoch(0, replica)
        for _, x in step:
            step.backward(replica.model(x).mean())

        outcome = step.finish(0.1, want_norm=True)

        assert set(outcome.clock.seconds) == {"data", "forward", "backward", "allreduce_wait", "optimizer"}
        assert outcome.grad_norm > 0
        assert outcome.loss == outcome.local_loss


class TestTheLoader:
    def test_uses_each_sample_once_in_each_epoch_in_another_order(self, session):
        loader = session.loader(DATA, batch_size=3)

        seen = step_through(loader, prepared(session), 2)

        flat = [number for numbers in seen for number in numbers]
        assert sorted(flat) == sorted([*range(NUM_SAMPLES)] * 2)
        assert flat[:NUM_SAMPLES] != flat[NUM_SAMPLES:]
        assert loader.progress.epoch == 2

    def test_knows_the_global_batch_and_how_far_it_is(self, session):
        replica = prepared(session)
        loader = session.loader(DATA, batch_size=2, accumulation_steps=2)

        assert loader.global_batch_size == 4
        step_through(loader, replica, 1, upto=1)
        assert loader.epochs_passed == pytest.approx(0.4)

    def test_yields_nothing_of_an_epoch_that_is_complete(self, session):
        replica = prepared(session)
        loader = session.loader(DATA, batch_size=2)
        step_through(loader, replica, 1)

        assert list(loader.epoch(0, replica)) == []

    def test_may_skip_to_a_later_epoch(self, session):
        replica = prepared(session)
        loader = session.loader(DATA, batch_size=2)

        assert len(list(loader.epoch(4, replica))) == 5
        assert loader.progress.epoch == 4

    def test_has_processes_that_outlive_sigterm_to_all(self):
        """Kubernetes and Slurm send it so; the rank still needs what its step has to read."""
        done = subprocess.run(
            [sys.executable, "-c", WITH_LOADERS],
            stdout=subprocess.PIPE,
            check=True,
            text=True,
            timeout=120,  # at its end, the process waits for the loaders that it still has
        )

        num_signalled, numbers = json.loads(done.stdout)
        assert num_signalled >= 2
        assert sorted(numbers) == list(range(40))

    def test_gives_the_rate_its_global_batch(self, session):
        loader = session.loader(DATA, batch_size=4)

        policy = session.learning_rate(loader, epochs=2, base_lr=0.1, reference_batch_size=2)

        assert policy.at(1.0) == pytest.approx(0.2)

    @pytest.mark.parametrize(("strategy", "rate"), [("allreduce", 0.8), ("adasum", 0.2)])
    def test_gives_the_rate_the_batch_that_the_strategy_follows(self, strategy, rate):
        """Four ranks with batches of 4: linear scaling by 16 / 2, or under adasum by 4 / 2."""
        with horovod_train.init("own", device="cpu", strategy=strategy) as session:
            loader = session.loader(DATA, batch_size=4)
            loader.num_data_ranks = 4

            policy = session.learning_rate(loader, epochs=2, base_lr=0.1, reference_batch_size=2)

        assert policy.at(1.0) == pytest.approx(rate)


class TestCheckpoints:
    def test_go_on_in_mid_epoch_bit_for_bit(self, session, tmp_path):
        replica, loader = prepared(session), session.loader(DATA, batch_size=2)
        step_through(loader, replica, 3)
        expected = weights(replica)
        cut, place = prepared(session), session.loader(DATA, batch_size=2)
        checkpoints = session.checkpoints(tmp_path, cut, place)
        step_through(place, cut, 3, upto=7)
        checkpoints.save({"quality": 0.5}, wait=True)
        checkpoints._manager.close()

        other, again = prepared(session), session.loader(DATA, batch_size=2)
        resumed = session.checkpoints(tmp_path, other, again).resume()
        seen = step_through(again, other, 3)

        assert resumed
        assert len(seen) == 15 - 7
        assert all(torch.equal(a, b) for a, b in zip(weights(other), expected, strict=True))

    def test_keep_the_last_ones(self, session, tmp_path):
        replica, loader = prepared(session), session.loader(DATA, batch_size=2)
        checkpoints = session.checkpoints(tmp_path, replica, loader, keep_last=2)
        for number in range(1, 4):
            loader.progress.step = number
            checkpoints.save(wait=True)

        assert [found.step for found in list_checkpoints(tmp_path)] == [3, 2]

    def test_that_are_not_there_are_not_resumed(self, session, tmp_path):
        checkpoints = session.checkpoints(tmp_path, prepared(session), session.loader(DATA, batch_size=2))

        assert not checkpoints.resume()

    def test_that_are_resumed_are_an_event(self, tmp_path):
        with horovod_train.init("own", device="cpu", run_dir=tmp_path) as session:
            replica, loader = prepared(session), session.loader(DATA, batch_size=2)
            checkpoints = session.checkpoints(tmp_path / "saved", replica, loader)
            checkpoints.save(wait=True)
            assert checkpoints.resume()

        (file,) = tmp_path.rglob("events.jsonl")
        events = [json.loads(line) for line in file.read_text().splitlines()]
        assert [e["checkpoint"] for e in events if e["kind"] == "resumed"] == ["step-000000000000"]

    def test_say_what_has_changed(self, session, tmp_path, caplog):
        replica, loader = prepared(session), session.loader(DATA, batch_size=2)
        first = session.checkpoints(tmp_path, replica, loader)
        first.save(wait=True)
        first._manager.close()
        longer = TensorDataset(torch.arange(12), torch.ones(12, 1))

        session.checkpoints(tmp_path, replica, session.loader(longer, batch_size=2)).resume()

        assert "changed since step-000000000000: data.num_samples: 10 -> 12" in caplog.text

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
    def test_are_written_when_the_process_is_asked_to_leave(self, session, tmp_path, number):
        replica, loader = prepared(session), session.loader(DATA, batch_size=2)
        handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)}
        preemption = session.preemption(session.checkpoints(tmp_path, replica, loader))
        preemption.after_step()
        step_through(loader, replica, 1, upto=2)

        signal.raise_signal(number)
        with pytest.raises(SystemExit) as left:
            preemption.after_step()
        for each, handler in handlers.items():
            signal.signal(each, handler)

        assert left.value.code == 75
        assert [found.step for found in list_checkpoints(tmp_path)] == [2]


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_loop_ends_at_a_step_that_is_not_finite(session, factor):
    replica = prepared(session)
    step, *_ = session.loader(DATA, batch_size=2).epoch(0, replica)
    for _, x in step:
        step.backward(replica.model(x).mean() * factor)

    with pytest.raises(NumericError, match=r"step 1: the loss is -?(nan|inf) because of rank 0"):
        step.finish(0.1)
    assert replica.is_finite()


def test_a_loop_may_leave_out_steps_whose_gradient_is_not_finite(session):
    replica = prepared(session, non_finite="skip")
    before = [parameter.clone() for parameter in replica.model.parameters()]
    for step in islice(session.loader(DATA, batch_size=1).epoch(0, replica), 10):
        for _, x in step:
            step.backward((replica.model(x) * 0).sqrt().mean())  # 0, and its derivative is infinite
        assert not step.finish(0.1).is_finite

    assert all(map(torch.equal, before, replica.model.parameters()))


def test_a_loop_leaves_out_ten_steps_in_a_row_at_most(session):
    replica = prepared(session, non_finite="skip")
    loader = session.loader(DATA, batch_size=1)
    steps = chain(loader.epoch(0, replica), loader.epoch(1, replica))
    for step in islice(steps, 11):
        for _, x in step:
            step.backward(replica.model(x).mean() * math.nan)
        if loader.progress.step == 10:
            break
        step.finish(0.1)

    with pytest.raises(NumericError, match="step 11.*\n.*11 steps in a row"):
        step.finish(0.1)


def test_evaluation_reads_each_sample_once_in_order(session):
    batches = list(session.eval_batches(prepared(session), DATA, batch_size=4))

    assert [index.tolist() for index, _ in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert session.mean({"x": (6.0, 4), "none": (0.0, 0)}) == {"x": 1.5}


def test_an_evaluation_before_the_first_step_is_refused(session):
    replica = prepared(session)

    with pytest.raises(UserError, match="no step has been made with this replica"):
        session.report_evaluation(replica, {"accuracy": 1.0})


def test_metrics_are_recorded(session):
    replica = prepared(session)
    session.metrics(port=29400)
    (step, *_) = session.loader(DATA, batch_size=2).epoch(0, replica)
    for _, x in step:
        step.backward(replica.model(x).mean())

    step.finish(0.1)

    recorder = session._services.recorder
    found = recorder.registry.get_sample_value
    labels = {"training_job": "own", "rank": "0", "local_rank": "0", "host": session.world.host}
    labels["run"] = recorder._rank_labels[1]
    assert found("horovod_train_samples_total", labels) == 2
    assert found("horovod_train_epoch", labels) == 0.2


@pytest.mark.parametrize("strategy", ["allreduce", "zero", "local_sgd"])
def test_a_loop_has_the_services_of_a_job(tmp_path, strategy):
    args = {"every_steps": 2} if strategy == "local_sgd" else {}
    tracker = {"name": "csv", "args": {"path": str(tmp_path / "steps.csv")}}
    with horovod_train.init(
        "own",
        device="cpu",
        run_dir=tmp_path,
        strategy={"name": strategy, "args": args},
        metrics={"trackers": [tracker]},
    ) as session:
        replica, loader = prepared(session), session.loader(DATA, batch_size=2)
        session.learning_rate(loader, epochs=2, base_lr=0.1, reference_batch_size=2)
        step_through(loader, replica, 2)
        session.report_evaluation(replica, {"accuracy": 0.5})

    (events,) = tmp_path.glob("own/*/events.jsonl")
    found = [json.loads(line) for line in events.read_text().splitlines()]
    kinds = [each["kind"] for each in found]
    assert {"opened", "started", "progress", "evaluation"} <= set(kinds)
    last = [each for each in found if each["kind"] == "progress"][-1]
    assert (last["step"], last["num_steps"], last["num_epochs"]) == (10, 10, 2)
    assert "accuracy" in (tmp_path / "steps.csv").read_text()


SHARDED = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import horovod_train

data = TensorDataset(torch.linspace(-1, 1, 10).view(-1, 1))
make_model = lambda: nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))
with horovod_train.init("own", device="cpu", strategy="fsdp") as session:
    model = make_model()
    try:
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except horovod_train.errors.UserError as error:
        print(error)
    model = make_model()
    replica = session.prepare(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    losses = []
    for step in session.loader(data, batch_size=10).epoch(0, replica):
        for (x,) in step:
            step.backward((model(x) - x).square().mean())
        losses.append(step.finish(0.1).loss)
    print(len(losses), (model(data.tensors[0]) - data.tensors[0]).square().mean().item() < losses[0])
"""


def test_a_loop_with_sharded_weights_needs_a_function_that_makes_the_optimizer():
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], stdout=subprocess.PIPE, check=True, text=True, timeout=120
    )

    assert "give session.prepare a function that makes it" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 True"


def test_a_strategy_that_runs_the_passes_is_refused():
    with (
        horovod_train.init(
            "own", device="cpu", strategy={"name": "pipeline", "args": {"pipeline_parallel_degree": 1}}
        ) as session,
        pytest.raises(UserError, match="runs the passes of a step itself"),
    ):
        prepared(session)
