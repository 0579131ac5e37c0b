"""A framework in NumPy, added through the entry points that any package can use.

A rank of it starts in about a second, where one of PyTorch needs eight, and everything around it is
the real thing: launchers, worker, loop, hooks, checkpoints, signals, metrics. Tests whose subject is
one of those use it. It is also the example for people who want to add a framework: what is here is all
that a framework has to have.

A task has

    model()                      new parameters: arrays by name
    train_data(), eval_data()    datasets
    gradient(params, batch)      the mean loss over a batch, and its gradient by name
    metrics(params, batch)       one value per sample, by name
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from horovod_train.checkpoint.arrays import ArrayBlob, ReplicaState
from horovod_train.collectives.base import Communicator, Mesh, SingleRank
from horovod_train.config.schema import Job
from horovod_train.data.shard import PlannedStep
from horovod_train.errors import EngineError, PeerError
from horovod_train.frameworks.base import (
    IdenticalReplica,
    StepClock,
    StepOutcome,
    add_metric,
    load_task,
    make_optimizer,
)
from horovod_train.frameworks.plain_data import (
    check_fits,
    check_same_layout,
    from_blob,
    from_rank_0,
    to_blob,
)
from horovod_train.frameworks.python_state import state_of_task
from horovod_train.frameworks.reader import NumpyReader, load_rng_state, mix, rng_state
from horovod_train.horovod.mpi import number_of, started_as_one_of_many

Arrays = dict[str, np.ndarray]
MEET_S = 60.0


class SocketCommunicator:
    """Ranks that talk through rank 0, over TCP; under any launcher that numbers them.

    They meet in the folder of the job's runs, which all hosts share: rank 0 writes down where it
    listens.
    """

    def __init__(self, job: Job, environ: Mapping[str, str]) -> None:
        self.rank = number_of(environ, "rank", alone=0)
        self.size = number_of(environ, "size", alone=1)
        self.local_rank = number_of(environ, "local_rank", alone=0)
        self.host = socket.gethostname()
        self.waiting_since_s: float | None = None
        self.waiting_in = None
        self._counters = (0, 0.0)
        self._folder = Path(job.run_dir).expanduser() / job.name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._place = self._folder / f".ranks-of-{launch_of(environ)}.json"
        self._peers = self._wait_for_others() if self.rank == 0 else {0: self._find_rank_0()}

    def allreduce_sum(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise sum over ranks, added in the order of ranks."""
        return self.allreduce_array(np.array(values, np.float64)).tolist()

    def allreduce_array(self, array: np.ndarray) -> np.ndarray:
        """Return the sum of an array over ranks."""
        gathered = self.allgather(array.tobytes())
        begun_s = time.perf_counter()  # all ranks are ready, and their data is here
        pieces = [np.frombuffer(piece, array.dtype) for piece in gathered]
        total = sum(pieces[1:], pieces[0].copy()).reshape(array.shape)
        size_bytes, seconds = self._counters
        self._counters = size_bytes + array.nbytes, seconds + time.perf_counter() - begun_s
        return total

    def allreduce_counters(self) -> tuple[int, float]:
        """Return bytes and seconds of sums so far, as Horovod's engine counts them."""
        return self._counters

    def gpu_allreduce_counters(self) -> tuple[int, float]:
        """Return the same, as if it were on a GPU."""
        return self._counters

    def allgather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, by rank."""
        self.waiting_since_s = time.monotonic()
        try:
            if self.rank != 0:
                send(self._peers[0], [data])
                return receive(self._peers[0])
            pieces = [data, *(receive(self._peers[rank])[0] for rank in range(1, self.size))]
            for peer in self._peers.values():
                send(peer, pieces)
        except OSError as error:
            self.close()
            raise PeerError(f"a collective failed because another rank exited: {error}") from error
        finally:
            self.waiting_since_s = None
        return pieces

    def wait_in(self, _: object, blocking: Any) -> Any:
        """Call what blocks."""
        self.waiting_since_s = time.monotonic()
        try:
            return blocking()
        finally:
            self.waiting_since_s = None

    def close(self) -> None:
        """Leave; whoever waits for this rank notices."""
        for peer in self._peers.values():
            peer.close()

    def _wait_for_others(self) -> dict[int, socket.socket]:
        with socket.create_server((own_address(os.environ), 0), backlog=self.size) as server:
            server.settimeout(MEET_S)
            written = self._place.with_suffix(f".{os.getpid()}")
            written.write_text(json.dumps(server.getsockname()))
            written.replace(self._place)
            peers = {}
            while len(peers) < self.size - 1:
                peer, _ = server.accept()
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                peers[int(receive(peer)[0])] = peer
        self._place.unlink()
        return peers

    def _find_rank_0(self) -> socket.socket:
        deadline = time.monotonic() + MEET_S
        while time.monotonic() < deadline:
            with suppress(OSError, ValueError):
                host, port = json.loads(self._place.read_text())
                peer = socket.create_connection((host, port), 5)
                peer.settimeout(None)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                send(peer, [str(self.rank).encode()])
                return peer
            time.sleep(0.01)
        raise EngineError(f"rank 0 did not say in {self._folder} where it is")


def launch_of(environ: Mapping[str, str]) -> str:
    """What all ranks of one launch have in common, and no others."""
    names = ("HOROVOD_TRAIN_RUN", "PMIX_NAMESPACE", "HOROVOD_GLOO_RENDEZVOUS_PORT")
    return next(environ[name] for name in names if name in environ).rpartition("/")[2]


def own_address(environ: Mapping[str, str]) -> str:
    """The address of the interface that the launcher has chosen; alone on a machine, loopback."""
    names = environ.get("HOROVOD_GLOO_IFACE") or environ.get("OMPI_MCA_btl_tcp_if_include") or "lo"
    addresses = psutil.net_if_addrs().get(names, [])
    return next((a.address for a in addresses if a.family == socket.AF_INET), "127.0.0.1")


def send(peer: socket.socket, pieces: Sequence[bytes]) -> None:
    lengths = struct.pack(f"<{len(pieces) + 1}q", len(pieces), *map(len, pieces))
    peer.sendall(b"".join([lengths, *pieces]))


def receive(peer: socket.socket) -> list[bytes]:
    (count,) = struct.unpack("<q", exactly(peer, 8))
    lengths = struct.unpack(f"<{count}q", exactly(peer, 8 * count))
    return [exactly(peer, length) for length in lengths]


def exactly(peer: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = peer.recv(min(1 << 20, length - len(data)))
        if not piece:
            raise ConnectionResetError("the connection was closed")
        data += piece
    return bytes(data)


class Sgd:
    """Stochastic gradient descent with momentum: v = m v + g, w -= lr v."""

    def __init__(self, momentum: float = 0.0) -> None:
        self.momentum = momentum
        self.velocity: Arrays = {}

    def step(self, params: Arrays, gradients: Arrays, lr: float) -> None:
        for name, gradient in gradients.items():
            velocity = self.momentum * self.velocity.get(name, np.zeros_like(gradient)) + gradient
            self.velocity[name] = velocity
            params[name] = params[name] - lr * velocity


class NumpyReplica(IdenticalReplica):
    """Parameters and optimizer of one rank."""

    def __init__(self, task: Any, optimizer: Sgd, world: Communicator) -> None:
        self.task = task
        self.params: Arrays = {name: np.asarray(array) for name, array in task.model().items()}
        self._optimizer = optimizer
        self._world = world

    def step(self, step: PlannedStep, lr: float, *, want_norm: bool) -> StepOutcome:
        """Make one optimizer step with this rank's share of it."""
        clock = StepClock()
        gradients = {name: np.zeros_like(array) for name, array in self.params.items()}
        local_loss = 0.0
        for micro_batch, batch in step:
            clock.end_phase("data")
            loss, found = self.task.gradient(self.params, batch)
            local_loss += loss * micro_batch.share
            for name, gradient in found.items():
                gradients[name] += gradient * micro_batch.share
            clock.end_phase("compute")
        packed = np.concatenate([*(g.ravel() for g in gradients.values()), [local_loss]])
        total = self._sum(packed)
        clock.end_phase("allreduce_wait")
        pieces = np.split(total[:-1], np.cumsum([g.size for g in gradients.values()])[:-1])
        gradients = {n: p.reshape(self.params[n].shape) for n, p in zip(gradients, pieces, strict=True)}
        is_finite = bool(np.isfinite(total).all())
        if is_finite:
            self._optimizer.step(self.params, gradients, lr)
        clock.end_phase("optimizer")
        return StepOutcome(
            loss=float(total[-1]),
            local_loss=local_loss,
            is_finite=is_finite,
            numbers={
                "grad_norm": float(np.linalg.norm(total[:-1])) if want_norm else None,
                "sent_bytes": packed.nbytes if self._world.size > 1 else 0,
                "flops": getattr(self.task, "FLOPS_PER_SAMPLE", 0) * step.share.num_local_samples or None,
            },
            clock=clock,
        )

    def _sum(self, array: np.ndarray) -> np.ndarray:
        if isinstance(self._world, SocketCommunicator):
            return self._world.allreduce_array(array)
        return np.array(self._world.allreduce_sum(array.tolist()))

    def evaluate(self, batches: Iterable[tuple[int, Any]]) -> dict[str, tuple[float, int]]:
        """Return (sum, count) of each metric over this rank's batches."""
        sums: dict[str, tuple[float, int]] = {}
        for num_samples, batch in batches:
            for name, value in self.task.metrics(self.params, batch).items():
                add_metric(sums, name, value, num_samples)
        return sums

    def sync_buffers(self) -> None:
        """There are none."""

    def is_finite(self) -> bool:
        """Return whether all parameters are finite numbers."""
        return all(bool(np.isfinite(array).all()) for array in self.params.values())

    def state(self, *, copy: bool) -> ReplicaState:
        """Return the state; parameters are never changed in place, so nothing has to be copied."""
        return ReplicaState(
            model={name: to_blob(array) for name, array in self.params.items()},
            optimizer={name: to_blob(array) for name, array in self._optimizer.velocity.items()},
            optimizer_tree={"class": type(self._optimizer).__name__},
            scaler={},
        )

    def load_state(self, state: ReplicaState) -> None:
        """Take over a state."""
        check_fits({name: array.shape for name, array in self.params.items()}, state.model, "model")
        self.params = {name: from_blob(state.model[name]) for name in self.params}
        self._optimizer.velocity = {name: from_blob(blob) for name, blob in state.optimizer.items()}

    def broadcast(self) -> None:
        """Take over rank 0's parameters."""
        check_same_layout(self._world, self.params)
        self.params = {name: from_rank_0(self._world, array) for name, array in self.params.items()}

    def device_name(self) -> str:
        """Return where the model lives."""
        return "cpu"

    def num_parameters(self) -> int:
        """Return how many numbers are trained."""
        return sum(array.size for array in self.params.values())


class NumpyFramework:
    """NumPy, for one job in one process."""

    def connect(self, job: Job) -> Communicator:
        """Join the ranks this process was started with; a world of one when there are none."""
        if not started_as_one_of_many(os.environ):
            return SingleRank()
        return SocketCommunicator(job, os.environ)

    def prepare(self, job: Job, mesh: Mesh) -> tuple[NumpyReplica, NumpyReader, NumpyReader | None]:
        """Return this rank's replica and the readers of training and evaluation data."""
        self.seed(job.train.seed, 0, 0)
        task = load_task(job.task, job.task_args, ("model", "train_data", "gradient", "metrics"))
        optimizer = make_optimizer(job, mesh.data.size, lambda factory, args: factory(**args))
        read = partial(NumpyReader, data=job.data, seed=job.train.seed, task=job.task)
        eval_data = getattr(task, "eval_data", None)
        replica = NumpyReplica(task, optimizer, mesh.data)
        readers = read(task.train_data()), read(eval_data()) if eval_data else None
        replica.python_state = state_of_task(mesh, task, readers)
        return replica, *readers

    def gpu_uuid(self) -> str:
        """Return the GPU that a test plays (``tests/fakes/pynvml.py``)."""
        return os.environ.get("FAKE_GPU_UUID", "")

    def device_memory(self) -> tuple[int, int | None, int] | None:
        """Return what arrays of this process take, as if they lay on that GPU."""
        if not self.gpu_uuid():
            return None
        resident = psutil.Process().memory_info().rss
        return resident // 2, resident, resident

    def rng_state(self) -> tuple[Any, Mapping[str, ArrayBlob]]:
        """Return the state of Python's and NumPy's generators."""
        return rng_state({})

    def load_rng_state(self, tree: Any, arrays: Mapping[str, ArrayBlob]) -> None:
        """Take over the state of the generators."""
        load_rng_state(tree, arrays)

    def seed(self, seed: int, rank: int, epoch: int) -> None:
        """Seed Python's and NumPy's generators."""
        mixed = mix(seed, rank, epoch)
        random.seed(mixed)
        np.random.seed(mixed % 2**32)
