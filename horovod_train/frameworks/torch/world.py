"""The ranks of a job, through Horovod's PyTorch binding."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from horovod_train.config.schema import Job
from horovod_train.engine.base import SingleWorld, World
from horovod_train.engine.environment import horovod_settings, started_as_one_of_many
from horovod_train.errors import EngineError, PeerError, WorldError

Result = TypeVar("Result")


def connect(job: Job, environ: Mapping[str, str] = os.environ) -> World:
    """Join the ranks this process was started with; a world of one when it was started alone.

    Raises:
        EngineError: It was started as one of several ranks, and Horovod is missing or cannot start.
    """
    if not started_as_one_of_many(environ):
        return SingleWorld()
    return HorovodWorld(horovod_settings(job))


class HorovodWorld:
    """A world of Horovod ranks; also the wire on which gradients travel.

    Args:
        settings: Environment variables that Horovod reads when it starts. What the user has set
            already wins.

    Raises:
        EngineError: Horovod is missing or cannot start.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        for variable, value in settings.items():
            os.environ.setdefault(variable, value)
        try:
            import horovod.torch as hvd
            from horovod.common.exceptions import HorovodInternalError
        except ImportError as error:
            raise EngineError(
                f"this process was started as one of several ranks, but Horovod is missing: {error}",
                hint="run `horovod-train engine build`, then `horovod-train engine check`",
            ) from error
        self._hvd = hvd
        self._lost = HorovodInternalError
        try:
            hvd.init()
        except (RuntimeError, ValueError) as error:
            raise EngineError(
                f"Horovod cannot start: {error}", hint="run `horovod-train engine check` on this host"
            ) from error
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()
        self.local_rank: int = hvd.local_rank()
        self.host = socket.gethostname()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise sum over ranks, in double precision."""
        tensor = torch.tensor(values, dtype=torch.float64)
        self.finish(self.start_sum(tensor, "horovod_train.sum"))
        result: list[float] = tensor.tolist()
        return result

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, by rank."""
        framed = bytearray(struct.pack("<q", len(data)) + data)
        tensor = torch.frombuffer(framed, dtype=torch.uint8)
        joined = self._call(lambda: self._hvd.allgather(tensor, name="horovod_train.gather"))
        everything = joined.numpy().tobytes()
        pieces, at = [], 0
        for _ in range(self.size):
            (length,) = struct.unpack_from("<q", everything, at)
            pieces.append(everything[at + 8 : at + 8 + length])
            at += 8 + length
        return pieces

    def start_sum(self, tensor: torch.Tensor, name: str) -> Any:
        """Begin to sum a tensor over ranks, in place; returns at once."""
        return self._call(lambda: self._hvd.allreduce_async_(tensor, name=name, op=self._hvd.Sum))

    def finish(self, handle: Any) -> None:
        """Return when a sum has arrived."""
        self._call(lambda: self._hvd.synchronize(handle))

    def broadcast(self, tensor: torch.Tensor, name: str) -> None:
        """Overwrite a tensor with rank 0's, whatever its type."""
        # Horovod knows no bfloat16 and no bool; bytes are bytes.
        whole = tensor.detach().contiguous()
        view = whole.reshape(-1).view(torch.uint8)
        self._call(lambda: self._hvd.broadcast_(view, root_rank=0, name=name))
        if whole.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(whole)

    def close(self) -> None:
        """Leave the world. Safe to call twice."""
        if self._hvd.is_initialized():
            self._hvd.shutdown()

    def _call(self, collective: Callable[[], Result]) -> Result:
        try:
            return collective()
        except self._lost as error:
            if "mismatched" in str(error).lower():
                raise WorldError(
                    f"ranks disagree about what they exchange: {error}",
                    hint="models and code must be the same on every rank",
                ) from error
            raise PeerError(f"a collective was ended because another rank left: {error}") from error
