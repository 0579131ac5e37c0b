"""``horovod_train.gather``: ranks train the weights of one process whose loss compares all samples.

The reference is a plain loop over the joint batch, without code of the product.
"""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from support.graphs import CpuRecorder
from support.torch_threads import on_torch_ranks, run_of, weights_of
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from horovod_train import gather
from horovod_train.errors import UserError
from horovod_train.training.loop import evaluate, train

MODEL = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()
BATCH_SIZE = 4


class Points:
    def __init__(self, num):
        self.points = torch.randn(num, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, place):
        return self.points[place], place


def contrast(rows, all_rows, places):
    scores = functional.normalize(rows, dim=-1) @ functional.normalize(all_rows * 1.5 + 0.1, dim=-1).T
    return functional.cross_entropy(scores / 0.5, places)


class Task:
    """A loss that compares samples, in several ways to write it.

    Args:
        kind: joint: each rank has the loss of all; own: of its rows against all; recomputed: rows minus
            their mean over all, in a part of the model that is recomputed; seldom: some ranks have a loss of
            no gathered row; counted: a sum and a count; late: from the third loss on.
        num: Number of samples.
    """

    def __init__(self, kind="joint", num=21):
        self.kind, self.num, self.num_losses = kind, num, 0

    def model(self):
        return copy.deepcopy(MODEL)

    def train_data(self):
        return Points(self.num)

    def eval_data(self):
        return Points(7)

    def metrics(self, model, batch):
        return {"rows": torch.tensor(float(len(gather(model(batch[0])))))}

    def loss(self, model, batch):
        points, numbers = batch
        rows = model(points)
        if self.kind == "joint":
            joined = gather(rows)
            return contrast(joined, joined, torch.arange(len(joined)))
        if self.kind == "recomputed":
            rows = checkpoint(lambda h: torch.tanh(3 * (h - gather(h).mean(0))), rows, use_reentrant=False)
            return rows.square().mean()
        all_rows, all_numbers = gather(rows), gather(numbers.to(torch.int16))
        places = (all_numbers == numbers[:, None]).nonzero()[:, 1]
        if self.kind == "seldom" and int(numbers.max()) % 2:
            return rows.sum() * 0
        if self.kind == "counted":
            labels = all_numbers.long() % 4
            return functional.cross_entropy(all_rows, labels, reduction="sum"), len(all_rows)
        return contrast(rows, all_rows, places)


def fields_of(kind, **more):
    return {
        "name": "g", "task": "test_gather:Task", "task_args": {"kind": kind, **more.pop("task_args", {})},
        "lr": {"base_lr": 0.2, "scaling": "none"}, "data": {"shuffle": False}, **more,
        "train": {"epochs": 2, "batch_size_per_rank": BATCH_SIZE, "device": "cpu", **more.get("train", {})},
    }  # fmt: skip


@pytest.fixture(autouse=True)
def on_one_thread(one_thread):
    pass


def trained_on(size, kind, act=train, **more):
    def rank(world):
        _, run = run_of(world, fields_of(kind, **more))
        found = act(run)
        return weights_of(run.replica.model) if act is train else found

    results = on_torch_ranks(size, rank)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def trained_alone(size, kind):
    task = Task(kind)
    model, data = task.model(), task.train_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(2):
        for start in range(0, len(data), BATCH_SIZE * size):
            points = data.points[start : start + BATCH_SIZE * size]
            numbers = torch.arange(start, start + len(points))
            optimizer.zero_grad()
            task.loss(model, (points, numbers)).backward()
            optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize("kind", ["joint", "own", "recomputed"])
@pytest.mark.parametrize("strategy", ["allreduce", "zero"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_train_the_weights_of_one_process(kind, strategy, size):
    """21 samples: in the last step, ranks have other numbers of samples, or none that count."""
    (weights, *others) = trained_on(size, kind, strategy=strategy if size > 1 else "allreduce")

    assert float((weights - trained_alone(size, kind)).abs().max()) < 1e-12
    assert all(torch.equal(each, weights) for each in others)


def test_without_it_ranks_train_other_weights(monkeypatch):
    expected = trained_alone(2, "joint")
    monkeypatch.setattr("test_gather.gather", lambda tensor: tensor)

    apart = trained_on(2, "joint", health={"one_process": "off"})[0]

    assert float((apart - expected).abs().max()) > 1e-3


def test_a_rank_whose_loss_uses_no_gathered_row_is_not_waited_for():
    weights, other = trained_on(2, "seldom", health={"one_process": "off"})

    assert torch.equal(weights, other)


def test_an_evaluation_sees_the_rows_of_a_rank():
    found = trained_on(2, "joint", act=evaluate, evaluation={"batch_size_per_rank": 7})

    assert all(metrics["rows"] == pytest.approx((4 * 4 + 3 * 3) / 7) for metrics in found)


def test_more_micro_batches_are_told_once(caplog):
    caplog.set_level(logging.WARNING)
    trained_on(2, "joint", train={"accumulation_steps": 2})

    assert caplog.text.count("joins the samples of a micro-batch of all ranks, and this step has 2") == 1


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        ("counted", {}, "each rank would add the samples of all"),
        (
            "joint",
            {"strategy": {"name": "local_sgd", "args": {"every_steps": 2}}},
            "does not sum the gradients of ranks in each step",
        ),
        ("joint", {"allreduce": {"codec": {"name": "powersgd"}}}, "does not sum the gradients"),
    ],
)
def test_what_would_be_another_loss_is_refused(kind, more, message):
    with pytest.raises(UserError, match=message):
        trained_on(2, kind, health={"one_process": "off"}, **more)


def test_graphs_are_refused():
    def act(run):
        run.replica.record_steps(CpuRecorder(), only_if_faster=False)
        run.replica.gathering.is_in_graphs = True  # also where no graph can be recorded on a CPU
        train(run)

    with pytest.raises(UserError, match="a CUDA graph cannot contain it"):
        trained_on(2, "joint", act=act)


def test_outside_of_passes_it_is_refused_on_several_ranks_only(monkeypatch):
    rows = torch.ones(2, 3)
    assert gather(rows) is rows

    monkeypatch.setattr("horovod_train.frameworks.torch.step.gathering._is_one_of_several", lambda: True)
    with pytest.raises(UserError, match="outside of the passes of a job") as caught:
        gather(rows)
    assert "sync_grads" in caught.value.hint
