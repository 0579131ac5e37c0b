"""The gradient of several ranks is compared with that of one process on the joint batch."""

from __future__ import annotations

import copy

import pytest
import torch
from support.torch_threads import on_torch_ranks, run_of

from horovod_train.errors import UserError
from horovod_train.events.wire import Reporter
from horovod_train.frameworks.torch.verify import untouched
from horovod_train.frameworks.torch.verify.untouched import NUM_COMPONENTS, projected
from horovod_train.training.hooks.checks import CompareWithOneProcess
from horovod_train.training.loop import train

PARTS = [[3, 1, 8, 5], [9, 2, 30, 17]]


@pytest.fixture(autouse=True)
def shared_generators(monkeypatch, one_thread):
    """Ranks are threads, which share the default generators: none restores what another one has seeded."""
    monkeypatch.setattr(untouched, "rng_state", lambda: (None, {}))
    monkeypatch.setattr(untouched, "load_rng_state", lambda *_: None)


def compared(kind, size=2, act=lambda run: run.replica.one_process.compare(3, PARTS), **more):
    """Compare on ranks that are threads; return the result of each rank."""
    fields = {
        "name": "j", "task": "programs.compared:Compared", "task_args": {"kind": kind},
        "lr": {"base_lr": 0.1, "scaling": "none"}, **more,
        "train": {"epochs": 1, "batch_size_per_rank": 8, "device": "cpu", **more.get("train", {})},
    }  # fmt: skip

    def rank(world):
        _, run = run_of(world, fields)
        return act(run)

    return on_torch_ranks(size, rank)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("strategy", ["allreduce", "zero"])
@pytest.mark.parametrize(
    "kind", ["plain", "dropout", "tokens_counted", "counter", "gathered", "gathered_keys"]
)
def test_a_loss_that_is_a_mean_over_samples_has_the_gradient_of_one_process(kind, strategy, size, caplog):
    assert compared(kind, size, strategy=strategy) == [None] * size
    assert not caplog.text


@pytest.mark.parametrize("strategy", ["allreduce", "zero"])
@pytest.mark.parametrize(
    ("kind", "message", "hint"),
    [
        ("tokens", "a mean over something else than its samples, such as tokens", "return a sum and a count"),
        ("hook", "and the loss is equal. A hook or an autograd function", "act on each sample"),
        ("max_norm", "the change in forward of embedding.weight differs by", "after_update"),
    ],
)
def test_what_the_job_can_do_right_is_refused_with_the_remedy(kind, message, hint, strategy):
    errors = compared(kind, strategy=strategy)

    assert [type(error) for error in errors] == [UserError] * 2
    assert all(message in str(error) and hint in error.hint for error in errors)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("negatives", "it may compare samples with each other"),
        ("batch_norm", "A layer normalizes over the samples of each rank: norm"),
    ],
)
def test_what_is_another_training_on_ranks_is_a_warning_once(kind, text, caplog):
    def act(run):
        found.extend(run.replica.one_process.compare(step, PARTS) for step in (1, 2))

    found = []
    compared(kind, act=act)
    assert len(found) == 4
    assert all(text in each for each in found), "also of a step that is not compared any more"
    assert caplog.text.count(text) == 1


@pytest.mark.parametrize(
    ("kind", "steps", "text"),
    [
        ("plain", [1, 2, 4, 8], ""),
        ("negatives", [1], "it may compare samples"),
        ("tokens", [1], "such as tokens"),
    ],
)
def test_each_result_is_an_event_of_rank_0(kind, steps, text):
    def act(run):
        reporter = Reporter(run.world.rank, as_json=True, stream=None)
        reporter.observers.append(events[run.world.rank].append)
        run.hooks = [CompareWithOneProcess(reporter)]
        train(run)

    events = [], []
    compared(kind, act=act, train={"epochs": 4, "max_steps": 8})

    assert [event.step for event in events[0]] == steps
    assert all(text in event.text and bool(event.text) == bool(text) for event in events[0])
    assert not events[1]


def test_a_step_that_is_not_finite_has_no_result():
    assert compared("infinite") == ["", ""]


def test_the_remedies_of_messages_help(caplog):
    assert compared("batch_norm", train={"sync_batch_norm": True}) == [None] * 2
    assert compared("tokens_counted") == [None] * 2
    assert not caplog.text


def test_a_job_may_only_warn_of_everything(caplog):
    assert all("such as tokens" in text for text in compared("tokens", health={"one_process": "warn"}))
    assert "such as tokens" in caplog.text


def test_a_task_that_cannot_be_called_with_few_samples_is_not_compared_and_told(caplog):
    found = compared("too_few", 3)

    assert len(set(found)) == 1
    assert found[0] in caplog.text
    assert "not compared with those of one process: AssertionError: at least 9 samples" in caplog.text


@pytest.mark.parametrize("strategy", ["allreduce", "zero"])
@pytest.mark.parametrize("kind", ["plain", "batch_norm", "max_norm", "counter"])
def test_a_comparison_leaves_no_trace(kind, strategy):
    def act(run):
        replica = run.replica
        task, model = replica.task, replica.model
        before = copy.deepcopy((model.state_dict(), task.seen, model.num_calls, model.training))
        try:
            replica.one_process.compare(1, PARTS)
        except UserError:
            assert kind == "max_norm"
        after = (model.state_dict(), task.seen, model.num_calls, model.training)
        assert before[1:] == after[1:]
        assert all(torch.equal(value, after[0][name]) for name, value in before[0].items())
        assert all(parameter.grad is None for parameter in model.parameters())

    assert compared(kind, act=act, strategy=strategy) == [None] * 2


def test_the_projection_of_a_gradient_is_linear_and_has_its_length():
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randn(70_001, generator=generator) for _ in range(2))
    (of_one, square), (of_two, _), (of_difference, _) = projected(one), projected(two), projected(one - two)

    assert of_one.shape == (NUM_COMPONENTS,)
    assert square == pytest.approx(float(one.double().square().sum()))
    assert torch.allclose(of_one - of_two, of_difference, atol=1e-4)
    assert float(of_difference.norm()) == pytest.approx(float((one - two).norm()), rel=0.2)
