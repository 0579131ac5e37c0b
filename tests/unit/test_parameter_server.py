"""Parameter servers: each update is the one that its gradient makes, in the order in which they came."""

# ruff: noqa: N802  (as MPI names them)

from __future__ import annotations

import copy
import sys
import threading
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs.cases import Case
from support.reference import joint_batch_weights
from support.torch_threads import on_torch_ranks, run_of, weights_of
from torch import nn

from horovod_train.collectives.base import SingleRank
from horovod_train.config.rules import broken_rules
from horovod_train.config.schema import Job
from horovod_train.errors import LostError, NumericError
from horovod_train.plugins.parameter_server.strategy import (
    Layout,
    Server,
    ServerConnection,
    partition,
)
from horovod_train.training.loop import train

TASK = "support.torch_threads:Task"
pytestmark = pytest.mark.usefixtures("one_thread")


def fields_of(case, **args):
    return {**case.job(TASK), "strategy": {"name": "parameter_server", "args": args}}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 5))
def test_each_parameter_has_one_server_and_servers_have_about_as_much(lengths, num_servers):
    named = {f"p{at}": torch.zeros(length) for at, length in enumerate(lengths)}
    having = partition(named, num_servers)

    assert sorted(name for names in having for name in names) == sorted(named)
    loads = [sum(named[name].nbytes for name in names) for names in having]
    assert max(loads) - min(loads) <= max(tensor.nbytes for tensor in named.values())
    assert having == partition(dict(reversed(named.items())), num_servers)


class TestMessages:
    TENSORS = (torch.randn(2, 3), torch.randn(4).bfloat16(), torch.tensor(5.0).double(), torch.randn(0))
    LAYOUT = Layout("abcd", TENSORS, 2)

    def test_are_the_tensors_again(self):
        message = self.LAYOUT.push([self.TENSORS[0].T.contiguous().T, None, *self.TENSORS[2:]], [0.1, 0.2])
        lrs, found = self.LAYOUT.pushed(message)

        assert len(message) == self.LAYOUT.push_bytes
        assert lrs == [0.1, 0.2]
        assert torch.equal(found[0], self.TENSORS[0])
        assert found[1] is None
        assert torch.equal(found[2], self.TENSORS[2])
        assert found[3].shape == (0,)

    def test_of_weights_are_the_weights(self):
        data = np.empty(self.LAYOUT.size_bytes, np.uint8)
        self.LAYOUT.pack(self.TENSORS, data)

        for one, other in zip(self.LAYOUT.unpack(data), self.TENSORS, strict=True):
            assert torch.equal(one, other)


def server_of(model, num_workers, lr=0.1):
    named = dict(model.named_parameters())
    layout = Layout(list(named), list(named.values()), 1)
    return layout, Server(layout, named, torch.optim.SGD(named.values(), lr, momentum=0.9), num_workers)


class TestAServer:
    def test_makes_a_step_of_the_optimizer_with_each_gradient_as_it_comes(self):
        model = nn.Linear(3, 2)
        alone = copy.deepcopy(model)
        optimizer = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9)
        layout, server = server_of(model, 2)
        for at, worker in enumerate([0, 1, 1, 0]):
            gradients = [torch.randn_like(p) if at != 2 else None for p in alone.parameters()]
            server.push(worker, layout.push(gradients, [0.1 * (at + 1)]))
            optimizer.param_groups[0]["lr"] = 0.1 * (at + 1)
            for p, gradient in zip(alone.parameters(), gradients, strict=True):
                p.grad = gradient
            optimizer.step()

        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(one, other)

    def test_answers_when_nobody_is_too_far_behind(self):
        layout, server = server_of(nn.Linear(1, 1), 2)
        nothing = layout.push([None, None], [0.1])
        answered = []
        server.push(0, nothing)
        server.push(0, nothing)
        server.pull(0, 1, lambda _: answered.append("first"))
        server.pull(1, 0, lambda _: answered.append("second"))

        assert answered == ["second"]
        assert server.ranks_behind(1) == [1]
        server.push(1, nothing)
        assert answered == ["second", "first"]


class Request:
    def __init__(self, is_done):
        self.Test = is_done


class ThreadComm:
    """MPI's point-to-point messages between threads: each in order, and buffered."""

    def __init__(self, rank, boxes):
        self.rank, self.boxes = rank, boxes

    def Isend(self, data, to, tag):
        self.boxes[to].append((self.rank, tag, data.copy()))
        return Request(lambda: True)

    def Irecv(self, into, source, tag):
        def is_done():
            for at, each in enumerate(self.boxes[self.rank]):
                if each[:2] == (source, tag):
                    del self.boxes[self.rank][at]
                    into[:] = each[2]
                    return True
            return False

        return Request(is_done)

    def Recv(self, into, source, tag):
        assert self.Irecv(into, source, tag).Test()

    def Iprobe(self, _source, _tag, status):
        asked = [each[:2] for each in list(self.boxes[self.rank]) if each[1] != 3]
        if asked:
            status.found = asked[0]
        return bool(asked)


class Status:
    def Get_source(self):
        return self.found[0]

    def Get_tag(self):
        return self.found[1]


@pytest.fixture
def messages(monkeypatch):
    """MPI's module, as far as a server looks at it."""
    fake = types.SimpleNamespace(Status=Status, ANY_SOURCE=-1, ANY_TAG=-1, Exception=OSError)
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=fake))


@pytest.mark.usefixtures("messages")
class TestALine:
    def lines(self, num_ranks, timeout_s=20.0):
        models = [nn.Linear(3, 2) for _ in range(num_ranks)]
        boxes = [[] for _ in range(num_ranks)]
        layouts = [
            Layout([f"{rank}.weight", f"{rank}.bias"], list(model.parameters()), 1)
            for rank, model in enumerate(models)
        ]
        made = []
        for rank, model in enumerate(models):
            named = dict(zip(layouts[rank].names, model.parameters(), strict=True))
            server = Server(layouts[rank], named, torch.optim.SGD(named.values(), 1.0), num_ranks)
            made.append(ServerConnection(ThreadComm(rank, boxes), rank, layouts, server, timeout_s))
        return models, made

    def test_gives_each_worker_all_weights_and_sums_what_all_send(self):
        models, lines = self.lines(3)
        before = [[p.detach().clone() for p in model.parameters()] for model in models]
        names = [f"{rank}.{leaf}" for rank in range(3) for leaf in ("weight", "bias")]
        shapes = dict(zip(names, [p for model in models for p in model.parameters()], strict=True))
        found = {}

        def work(rank):
            connection = lines[rank]
            for number in range(5):
                connection.pull(number - 1)
                connection.push({name: torch.full_like(p, rank + 1.0) for name, p in shapes.items()}, [0.5])
            found[rank] = connection.pull(5)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for connection in lines:
            connection.close()

        assert len(found) == 3
        for weights in found.values():
            for rank, (weight, bias) in enumerate(before):
                assert torch.allclose(weights[f"{rank}.weight"], weight - 0.5 * 5 * (1 + 2 + 3))
                assert torch.allclose(weights[f"{rank}.bias"], bias - 0.5 * 5 * (1 + 2 + 3))

    def test_says_who_is_behind_when_it_has_waited_for_too_long(self):
        _, (one, other) = self.lines(2, timeout_s=0.2)
        with pytest.raises(LostError, match=r"rank 0 .* ranks 0-1 have not sent their gradients"):
            one.pull(1)
        one.close()
        other.close()

    def test_a_server_that_fails_tells_whoever_waits_for_it(self):
        def fails(*_):
            raise RuntimeError("no MPI any more")

        _, (one, other) = self.lines(2)
        one._comm.Iprobe = fails
        with pytest.raises(RuntimeError, match="no MPI any more"):
            one.pull(1)
        one.close()
        other.close()


@pytest.mark.parametrize(
    "case", [Case("sgd"), Case("clipped", clip=0.3, accumulation=3)], ids=lambda c: c.name
)
def test_one_rank_alone_trains_as_ever(case):
    expected, _ = joint_batch_weights(case, 1)
    _, run = run_of(SingleRank(), fields_of(case))
    train(run)

    assert float((weights_of(run.replica.model) - expected).abs().max()) <= 1e-6


def test_a_loss_that_is_not_finite_ends_the_job():
    _, run = run_of(SingleRank(), fields_of(Case("sgd")))
    run.replica.task.loss = lambda model, _: sum(p.sum() for p in model.parameters()) * float("nan")
    with pytest.raises(NumericError, match="the loss of rank 0 is nan"):
        train(run)


def test_it_needs_mpi():
    def rank(world):
        world.hvd.mpi_enabled = lambda: False
        run_of(world, fields_of(Case("sgd")))

    assert all("it requires MPI" in str(error) for error in on_torch_ranks(2, rank))


def test_leaving_steps_out_is_refused():
    job = Job.model_validate({**fields_of(Case("sgd")), "health": {"non_finite": "skip"}})

    (problem,) = [str(problem) for problem in broken_rules(job)]
    assert "health.non_finite = 'skip'" in problem
    assert "ranks do not synchronize in each step" in problem
