"""The ranks of a job, through one of Horovod's bindings.

Each binding has a core, a thread and its own connections, so a process uses one of them for
everything: gradients and what ranks tell each other.
"""

from __future__ import annotations

import importlib
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from time import monotonic
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from horovod_train.collectives.base import Communicator, SingleRank
from horovod_train.collectives.gpu_errors import explain_cuda, explain_nccl
from horovod_train.collectives.log import CollectiveLog, Waiting
from horovod_train.config.schema import Job
from horovod_train.errors import EngineError, HorovodTrainError, PeerError, WorldError
from horovod_train.horovod.counters import allreduce_counters, gpu_allreduce_counters
from horovod_train.horovod.environment import (
    horovod_settings,
    require_launcher,
    started_as_one_of_many,
)

Result = TypeVar("Result")
Array = npt.NDArray[np.generic]


class HorovodCommunicator:
    """The communicator of Horovod's ranks. A subclass says how its binding handles arrays.

    Args:
        settings: Environment variables that Horovod reads when it starts. What the user has set
            already wins.

    Raises:
        EngineError: Horovod is missing or cannot start.
    """

    BINDING = ""

    def __init__(self, settings: Mapping[str, str]) -> None:
        for variable, value in settings.items():
            os.environ.setdefault(variable, value)
        try:
            self.hvd: Any = importlib.import_module(f"horovod.{self.BINDING}")
            exceptions: Any = importlib.import_module("horovod.common.exceptions")
        except ImportError as error:
            raise EngineError(
                f"this process was started as one of several ranks, but Horovod for {self.BINDING} is "
                f"missing: {error}",
                hint="run `horovod-train engine build`, then `horovod-train engine check`",
            ) from error
        self.lost: tuple[type[Exception], ...] = (exceptions.HorovodInternalError,)
        try:
            self.hvd.init()
        except (RuntimeError, ValueError) as error:
            raise EngineError(
                f"Horovod cannot start: {error}", hint="run `horovod-train engine check` on this host"
            ) from error
        self.rank: int = self.hvd.rank()
        self.size: int = self.hvd.size()
        self.local_rank: int = self.hvd.local_rank()
        self.host = socket.gethostname()
        self.waiting_since_s: float | None = None
        """Since when this rank waits, by ``monotonic``; None: it does not."""
        self.waiting_in: Waiting | None = None
        """What it waits for."""
        self.log = CollectiveLog()
        """The last collectives of this rank."""
        self.at_close = ExitStack()
        """What ends with the world."""

    def allreduce_sum(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise sum over ranks, in double precision."""
        name = "horovod_train.allreduce_sum"
        array = np.array(values, np.float64)
        total = self.call(lambda: self.allreduce_array(array, name), name, array.nbytes)
        result: list[float] = total.tolist()
        return result

    def allgather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, by rank."""
        framed = np.frombuffer(struct.pack("<q", len(data)) + data, np.uint8)
        name = "horovod_train.allgather"
        everything = self.call(lambda: self.allgather_arrays(framed, name), name, framed.nbytes).tobytes()
        pieces, at = [], 0
        for _ in range(self.size):
            (length,) = struct.unpack_from("<q", everything, at)
            pieces.append(everything[at + 8 : at + 8 + length])
            at += 8 + length
        return pieces

    def allreduce_array(self, array: Array, name: str) -> Array:
        """Return the elementwise sum over ranks; float32, float64 or an integer type."""
        raise NotImplementedError

    def allgather_arrays(self, array: Array, name: str) -> Array:
        """Return the arrays of all ranks, shape [any], one after the other."""
        raise NotImplementedError

    @staticmethod
    def allreduce_counters() -> tuple[int, float] | None:
        """Return bytes and seconds of all-reduces so far, as the engine counts them; None: it does not."""
        return allreduce_counters()

    @staticmethod
    def gpu_allreduce_counters() -> tuple[int, float] | None:
        """Return the same of all-reduces on this rank's GPU."""
        return gpu_allreduce_counters()

    def close(self) -> None:
        """Leave the world. Safe to call twice."""
        self.at_close.close()
        if self.hvd.is_initialized():
            self.hvd.shutdown()

    def call(self, collective: Callable[[], Result], name: str, size_bytes: int) -> Result:
        """Call a collective; what Horovod raises becomes an error of ours.

        Args:
            collective: Returns when it is done.
            name: Names it for a person.
            size_bytes: What this rank gives.

        Raises:
            PeerError: Another rank was lost.
            WorldError: Ranks do not exchange the same.
        """
        entry = self.log.begin(name, size_bytes)
        result = self.wait_in(entry, collective)
        entry.ended_s = monotonic()
        return result

    def wait_in(self, entry: Waiting, blocking: Callable[[], Result]) -> Result:
        """Call what blocks; record what it waits for, and since when. Raises as ``call`` does."""
        self.waiting_in, self.waiting_since_s = entry, monotonic()
        try:
            return blocking()
        except self.lost as error:
            raise explained(error, entry, self.rank) from error
        finally:
            self.waiting_since_s = self.waiting_in = None


def explained(error: Exception, entry: Waiting, rank: int) -> HorovodTrainError:
    """Return our error for one that a collective of a rank raised."""
    message = str(error)
    if "mismatched" in message.lower():
        return WorldError(
            f"ranks disagree about what they exchange: {error}",
            hint="models and code must be the same on every rank",
        )
    gone = PeerError(f"a collective was ended because another rank left, in {entry}: {error}")
    return explain_nccl(message, str(entry)) or explain_cuda(message, rank) or gone


def connect(
    communicator_class: type[HorovodCommunicator],
    job: Job | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Communicator:
    """Join the ranks this process was started with; a world of one when it was started alone.

    Args:
        communicator_class: Which binding to use.
        job: Says how Horovod is set up; None: as a job without its own settings does.
        environ: What launchers leave in the environment.

    Raises:
        EngineError: It was started as one of several ranks, and Horovod is missing or cannot start.
        UserError: It was started as one of several processes that Horovod does not know.
    """
    if not started_as_one_of_many(environ):
        require_launcher(environ)
        return SingleRank()
    job = job or Job(name="library", task="own:Loop")
    settings = horovod_settings(job)
    if job.launch.threads_per_rank is not None:
        settings["OMP_NUM_THREADS"] = str(job.launch.threads_per_rank)  # else a world may share the cores
    world = communicator_class(settings)
    if world.size == 1:
        require_launcher(environ)
    return world
