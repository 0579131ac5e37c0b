"""Asynchronous training with parameter servers, with bounded staleness.

    Server             stores a part of the weights, and applies gradients in the order of their arrival
    ServerConnection   connection of a rank to all servers
    ParameterServer    the strategy

.. code-block:: text

    worker, each step    weights from the servers -> the gradient of its own samples -> the servers
    server, each message the optimizer's step, with one worker's gradient

A rank waits only for ranks that are more than ``max_staleness`` steps behind. The strategy is for
comparison, because clusters were trained this way before all-reduce. A gradient belongs to weights that
other ranks have changed in the meantime, and results depend on the order of messages. If all ranks are
equally fast, a job is no faster than with all-reduce. Every ``sync_every_steps`` steps, and at the end of
an epoch, ranks wait until all gradients are applied. Weights are then identical on all ranks, for
evaluation and checkpoints.

Sources: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; Ho et al.,
"More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013.
"""

from __future__ import annotations

import copy
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from horovod_train.collectives.base import Collective, Mesh
from horovod_train.config.schema import Job
from horovod_train.data.shard import PlannedStep
from horovod_train.errors import LostError, NumericError, UserError, describe_ranks, result_of
from horovod_train.frameworks.torch.comm.collectives import mpi, tensor_communicator
from horovod_train.frameworks.torch.state.local import (
    LocalTensor,
    OptimizedParameter,
    OptimizedParameters,
    whole_parameters,
)
from horovod_train.frameworks.torch.strategies.base import Capabilities, Strategy, log

PUSH, PULL, WEIGHTS = 1, 2, 3
IDLE_S = 0.0005
"""Interval between two polls, in seconds; polling with sleep, because MPI's blocking calls spin on a core."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Layout:
    """Layout of one server's weights in its messages.

    Attributes:
        names: Names of the parameters.
        tensors: Tensors with the parameters' shapes and data types.
        num_groups: Number of the optimizer's parameter groups.
    """

    names: Sequence[str]
    tensors: Sequence[torch.Tensor]
    num_groups: int

    @property
    def size_bytes(self) -> int:
        """Size of all weights."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def pack(self, tensors: Sequence[torch.Tensor | None], into: Bytes) -> None:
        """Write tensors one after the other; zeros for None."""
        at = 0
        for like, tensor in zip(self.tensors, tensors, strict=True):
            part = into[at : at + like.nbytes]
            part[:] = 0 if tensor is None else _bytes_of(tensor)
            at += like.nbytes

    def unpack(self, data: Bytes) -> list[torch.Tensor]:
        """Return the tensors in a message, as views of its memory."""
        found, at = [], 0
        for like in self.tensors:
            part = torch.from_numpy(data[at : at + like.nbytes])
            found.append(part.view(like.dtype).view(like.shape) if like.nbytes else torch.empty_like(like))
            at += like.nbytes
        return found

    def push(self, gradients: Sequence[torch.Tensor | None], lrs: Sequence[float]) -> Bytes:
        """Return a worker's message: learning rates, a flag per gradient that is present, and gradients."""
        flags = np.array([gradient is not None for gradient in gradients], np.uint8)
        message = np.empty(len(lrs) * 8 + len(flags) + self.size_bytes, np.uint8)
        message[: len(lrs) * 8] = np.array(lrs, np.float64).view(np.uint8)
        message[len(lrs) * 8 : len(lrs) * 8 + len(flags)] = flags
        self.pack(gradients, message[len(lrs) * 8 + len(flags) :])
        return message

    def pushed(self, message: Bytes) -> tuple[list[float], list[torch.Tensor | None]]:
        """Return the learning rates and gradients in a worker's message."""
        head = self.num_groups * 8
        flags = message[head : head + len(self.names)]
        tensors = self.unpack(message[head + len(self.names) :].copy())  # a copy is aligned in memory
        gradients = [tensor if flag else None for tensor, flag in zip(tensors, flags, strict=True)]
        return message[:head].copy().view(np.float64).tolist(), gradients

    @property
    def push_bytes(self) -> int:
        """Size of a worker's message."""
        return self.num_groups * 8 + len(self.names) + self.size_bytes


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def partition(named: Mapping[str, torch.Tensor], num_servers: int) -> list[list[str]]:
    """Assign parameters to servers, with about equal bytes per server; the result is the same on all ranks.

    >>> partition({"a": torch.zeros(3), "b": torch.zeros(1), "c": torch.zeros(1)}, 2)
    [['a'], ['b', 'c']]
    """
    loads = [0] * num_servers
    having: list[list[str]] = [[] for _ in range(num_servers)]
    for name, tensor in sorted(named.items(), key=lambda item: (-item[1].nbytes, item[0])):
        least = loads.index(min(loads))
        loads[least] += tensor.nbytes
        having[least].append(name)
    return having


class Server:
    """Server of a part of the weights. Its methods are thread-safe.

    Args:
        layout: Layout of the messages.
        weights: The served weights by name, which are updated in place.
        optimizer: Optimizer over the served weights.
        num_workers: Number of workers.
    """

    def __init__(
        self,
        layout: Layout,
        weights: Mapping[str, torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        num_workers: int,
    ) -> None:
        self._layout = layout
        self._weights = [weights[name] for name in layout.names]
        self._optimizer = optimizer
        self._counts = [0] * num_workers
        self._requests: list[tuple[int, int, Callable[[Bytes], None]]] = []
        self._changed = threading.Condition()

    def push(self, worker: int, message: Bytes) -> None:
        """Update the weights with a worker's gradients."""
        with self._changed:
            lrs, gradients = self._layout.pushed(message)
            if any(gradient is not None for gradient in gradients):
                self._update(lrs, gradients)
            self._counts[worker] += 1
            self._answer()

    def _update(self, lrs: Sequence[float], gradients: Sequence[torch.Tensor | None]) -> None:
        for group, lr in zip(self._optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr
        for weight, gradient in zip(self._weights, gradients, strict=True):
            weight.grad = gradient
        self._optimizer.step()

    def pull(self, worker: int, at_least: int, answer: Callable[[Bytes], None]) -> None:
        """Call ``answer`` with the weights as soon as each worker has sent ``at_least`` messages."""
        with self._changed:
            self._requests.append((worker, at_least, answer))
            self._answer()

    def _answer(self) -> None:
        slowest = min(self._counts)
        due = [pending for pending in self._requests if pending[1] <= slowest]
        self._requests = [pending for pending in self._requests if pending[1] > slowest]
        for _, _, answer in due:
            weights = np.empty(self._layout.size_bytes, np.uint8)
            self._layout.pack(list(self._weights), weights)
            answer(weights)

    def ranks_behind(self, at_least: int) -> list[int]:
        """Return the workers that have sent fewer than ``at_least`` messages."""
        return [worker for worker, count in enumerate(self._counts) if count < at_least]


class ServerConnection:
    """Connection of this rank to all servers, with the thread that serves other ranks.

    Every rank is a worker. It also serves a part of the weights in a separate thread, over an MPI
    communicator used exclusively. A worker requests weights, and receives them when no other worker is too
    far behind. It sends gradients without waiting for their application.

    Args:
        comm: MPI communicator of all ranks, used only by this connection; None: a single rank.
        rank: This rank.
        layouts: Layout of each server, by rank.
        server: The server of this rank.
        timeout_s: Time after which a server that has not answered is lost.
    """

    def __init__(
        self, comm: Any, rank: int, layouts: Sequence[Layout], server: Server, timeout_s: float
    ) -> None:
        self._comm = comm
        self._rank = rank
        self._layouts = layouts
        self._server = server
        self._timeout_s = timeout_s
        self._has_ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._sending: list[tuple[Any, Bytes]] = []
        self._answers: deque[tuple[Any, Bytes]] = deque()  # stores buffers until they are sent
        if comm is not None:
            self._thread.start()

    def push(self, gradients: Mapping[str, torch.Tensor | None], lrs: Sequence[float]) -> None:
        """Send gradients to the servers of their weights; block until the send buffers may be reused."""
        for rank, layout in enumerate(self._layouts):
            message = layout.push([gradients.get(name) for name in layout.names], lrs)
            if rank == self._rank:
                self._server.push(rank, message)
            else:
                self._sending.append((self._comm.Isend(message, rank, PUSH), message))
        for request, _ in self._sending:
            self._wait(request, "sends gradients", -1)
        self._sending.clear()

    def pull(self, at_least: int) -> dict[str, torch.Tensor]:
        """Return all weights; block until each worker has sent ``at_least`` messages to each server.

        Raises:
            LostError: A server does not answer within ``timeout_s``.
        """
        wanted = np.array([at_least], np.int64)
        own: list[Bytes] = []
        coming = []
        for rank, layout in enumerate(self._layouts):
            if rank == self._rank:
                self._server.pull(rank, at_least, own.append)
                continue
            weights = np.empty(layout.size_bytes, np.uint8)
            request = self._comm.Irecv(weights, rank, WEIGHTS)
            self._sending.append((self._comm.Isend(wanted, rank, PULL), wanted.view(np.uint8)))
            coming.append((rank, layout, weights, request))
        found: dict[str, torch.Tensor] = {}
        for rank, layout, weights, request in coming:
            self._wait(request, f"waits for weights of rank {rank}", at_least)
            found.update(zip(layout.names, layout.unpack(weights), strict=True))
        self._until(lambda: bool(own), "waits for its own weights", at_least)
        layout = self._layouts[self._rank]
        found.update(zip(layout.names, layout.unpack(own[0]), strict=True))
        return found

    def _wait(self, request: Any, doing: str, at_least: int) -> None:
        self._until(request.Test, doing, at_least)

    def _until(self, is_done: Callable[[], bool], doing: str, at_least: int) -> None:
        begun = monotonic()
        while not is_done():
            if self._failure is not None:
                raise self._failure
            if monotonic() - begun > self._timeout_s:
                absent = self._server.ranks_behind(at_least)
                who = f"; {describe_ranks(absent)} have not sent their gradients" if absent else ""
                raise LostError(
                    f"strategy parameter_server: rank {self._rank} {doing} for {self._timeout_s:.0f} s{who}; "
                    "ended after health.stall_shutdown_s"
                )
            sleep(IDLE_S)

    def _run(self) -> None:
        _, self._failure = result_of(self._serve)

    def _serve(self) -> None:
        library = mpi()
        status = library.Status()
        while not self._has_ended.is_set():
            while self._answers and self._answers[0][0].Test():
                self._answers.popleft()
            if not self._comm.Iprobe(library.ANY_SOURCE, library.ANY_TAG, status):
                sleep(IDLE_S)
                continue
            # The probe never finds WEIGHTS, because their receives are posted before the request is sent.
            self._receive(status.Get_source(), status.Get_tag())

    def _receive(self, worker: int, tag: int) -> None:
        if tag == PUSH:
            message = np.empty(self._layouts[self._rank].push_bytes, np.uint8)
            self._comm.Recv(message, worker, PUSH)
            self._server.push(worker, message)
            return
        wanted = np.empty(1, np.int64)
        self._comm.Recv(wanted, worker, PULL)

        def answer(weights: Bytes) -> None:  # called by either thread
            self._answers.append((self._comm.Isend(weights, worker, WEIGHTS), weights))

        self._server.pull(worker, int(wanted[0]), answer)

    def close(self) -> None:
        """End the thread. Safe to call twice.

        The communicator is not freed: freeing is a collective, and other ranks may have exited.
        """
        self._has_ended.set()
        if self._comm is not None:
            self._thread.join()


class ParameterServer(Strategy):
    """Strategy that sends gradients to servers, and receives weights from them.

    Clipping, norm and loss are those of each rank's own samples.

    Raises:
        UserError: Several ranks run without MPI.
    """

    capabilities = Capabilities(
        sum_and_count_loss=False,
        deferred_results=False,  # gradients are sent by the host
        sharded=True,
        owns_update=True,
        rank_state_kind="parameter_server",
    )

    def __init__(self, mesh: Mesh, job: Job, *, max_staleness: int = 4, sync_every_steps: int = 100) -> None:
        self._ranks = tensor_communicator(mesh.data)
        self._max_staleness = max_staleness
        self._meet_every_steps = sync_every_steps
        self._timeout_s = job.health.stall_shutdown_s
        self._num_made = 0
        self._line: ServerConnection | None = None
        if self._ranks.size > 1 and not self._ranks.is_over_mpi:
            raise UserError(
                "strategy parameter_server: it requires MPI, and this run uses Gloo",
                hint="start them with launch.controller: mpi, or use strategy: allreduce",
            )
        if self._ranks.rank == 0:
            log.warning(
                "strategy parameter_server is for comparison: gradients are of weights that others have "
                "changed meanwhile, and no two runs are alike"
            )

    def bind(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().bind(model, optimizer)
        trained = OptimizedParameters(model, optimizer).named()
        self._named = {name: p for name, p in trained.items() if p.requires_grad}
        having = partition(self._named, self._ranks.size)
        groups = len(optimizer.param_groups)
        self._layouts = [Layout(n, [self._named[name] for name in n], groups) for n in having]
        self._make_server(having[self._ranks.rank])

    def _make_server(self, names: Sequence[str]) -> None:
        """Create this rank's server, with copies of its weights on the CPU and an optimizer over them."""
        copies: dict[int, Any] = {}
        self._served_by = copy.deepcopy(self._optimizer, copies)
        self._served = {name: copies[id(self._named[name])] for name in names}
        for served in self._served.values():
            served.data = served.data.cpu()
        own = {id(served) for served in self._served.values()}
        for group in self._served_by.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in own]
        layout = self._layouts[self._ranks.rank]
        self._server = Server(layout, self._served, self._served_by, self._ranks.size)

    def _start(self) -> ServerConnection:
        """Start serving the current weights, which must be equal on all ranks; every rank must call it."""
        self._copy_weights_to_server()
        comm = None
        if self._ranks.size > 1:
            comm = mpi().COMM_WORLD.Dup()
            assert comm.rank == self._ranks.rank, "MPI and Horovod number ranks alike"
        connection = ServerConnection(comm, self._ranks.rank, self._layouts, self._server, self._timeout_s)
        self._ranks.call_at_close(connection.close)
        return connection

    @torch.no_grad()
    def _copy_weights_to_server(self) -> None:
        for name, served in self._served.items():
            served.copy_(self._named[name])

    def close(self) -> None:
        if self._line is not None:
            self._line.close()

    # -- one step

    @torch.no_grad()
    def begin(self, step: PlannedStep) -> None:
        """Receive weights that contain all gradients except those of the last ``max_staleness`` steps."""
        self._step = step
        self._line = self._line or self._start()
        self._take_weights(self._num_made - self._max_staleness)
        self.replicas_identical = self._ranks.size == 1

    def _take_weights(self, at_least: int) -> None:
        assert self._line is not None
        connection = self._line
        size_bytes = sum(layout.size_bytes for layout in self._layouts)
        entry = Collective("parameter_server.weights", size_bytes, monotonic())
        found = self._ranks.wait_in(entry, lambda: connection.pull(at_least))
        for name, weight in found.items():
            self._named[name].copy_(weight)
        self.sent_bytes = size_bytes

    def reduce(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Rescale the gradient to the mean over this rank's samples; return their loss.

        Raises:
            NumericError: The loss is not finite.
        """
        own_share = self._step.share.local_share
        if own_share:
            torch._foreach_div_(self.gradients(), own_share)
        loss = float(weighted_loss) / (own_share or 1.0)
        self._refuse_unless_finite(loss, "the loss")
        return torch.tensor(loss, dtype=torch.float64)

    def update(self, clip_grad_norm: float | None) -> float:
        """Clip the gradient of this rank, which ``after_update`` sends; return its norm before clipping.

        Raises:
            NumericError: The norm is not finite.
        """
        norm = float(self.norm())
        self._refuse_unless_finite(norm, "the norm of the gradient")
        if clip_grad_norm is not None and norm > clip_grad_norm:
            torch._foreach_mul_(self.gradients(), clip_grad_norm / norm)
        return norm

    def _refuse_unless_finite(self, value: float, what: str) -> None:
        if not math.isfinite(value):
            raise NumericError(
                f"{what} of rank {self._ranks.rank} is {value}",
                hint="lower lr.base_lr, or set clip_grad_norm",
            )

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of this rank, after converting sparse ones to dense ones."""
        for parameter in self._named.values():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        return [p.grad for p in self._named.values() if p.grad is not None]

    def after_update(self, *, is_used: torch.Tensor | bool) -> None:
        """Send the gradients; every ``sync_every_steps`` steps, wait for the gradients of all ranks."""
        assert self._line is not None
        gradients = {name: p.grad for name, p in self._named.items()} if is_used else {}
        self._line.push(gradients, [group["lr"] for group in self._optimizer.param_groups])
        sent_bytes = self.sent_bytes + sum(layout.push_bytes for layout in self._layouts)
        self._num_made += 1
        if self._step.is_last or self._num_made % self._meet_every_steps == 0:
            with torch.no_grad():
                self._take_weights(self._num_made)
            sent_bytes += self.sent_bytes
            self._ranks.allgather(b"")  # barrier: all ranks have received the weights
            self.replicas_identical = True
        self.sent_bytes = sent_bytes

    # -- checkpoints

    @property
    def saved_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's server, whose state is written to checkpoints."""
        return self._served_by

    def optimized(self) -> Sequence[OptimizedParameter]:
        names = {id(served): name for name, served in self._served.items()}
        groups = self._served_by.param_groups
        return [OptimizedParameter(names[id(p)], LocalTensor(p)) for group in groups for p in group["params"]]

    def numbering(self) -> Sequence[str | int]:
        """Return the names of the whole model's optimized parameters, in the order of its optimizer."""
        return [parameter.name for parameter in whole_parameters(self._model, self._optimizer)]

    def load_rank_states(self, of_ranks: Sequence[Mapping[str, torch.Tensor]]) -> None:
        super().load_rank_states(of_ranks)
        self._copy_weights_to_server()
