"""Parameter server: it stores a part of the weights, and applies gradients in the order of their arrival.

Every rank is a worker. It also serves a part of the weights in a separate thread, over an MPI communicator
used exclusively. A worker requests weights, and receives them when no other worker is too far behind.
It sends gradients without waiting for their application.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from horovod_train.errors import LostError, describe_ranks, result_of
from horovod_train.frameworks.torch.comm.mpi import mpi

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
