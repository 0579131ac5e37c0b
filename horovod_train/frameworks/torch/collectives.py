"""The ranks of a job, through Horovod's PyTorch binding."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from horovod_train.collectives.horovod import Array, HorovodCommunicator


class TorchCommunicator(HorovodCommunicator):
    """A world of ranks; also the wire on which gradients travel."""

    BINDING = "torch"

    def __init__(self, settings: Mapping[str, str]) -> None:
        super().__init__(settings)
        if "OMP_NUM_THREADS" not in os.environ:
            share_cores(self.hvd.local_size())

    def allreduce_array(self, array: Array, name: str) -> Array:
        """Return the elementwise sum over ranks."""
        tensor = torch.from_numpy(array)
        self.finish(self.start_sum(tensor, name))
        return array

    def allgather_arrays(self, array: Array, name: str) -> Array:
        """Return the arrays of all ranks, one after the other."""
        joined: Array = self.hvd.allgather(torch.tensor(array), name=name).numpy()
        return joined

    def start_sum(self, tensor: torch.Tensor, name: str) -> Any:
        """Begin to sum a tensor over ranks, in place; returns at once."""
        # Horovod knows no complex numbers; a sum of pairs is the same.
        reals = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return self.call(lambda: self.hvd.allreduce_async_(reals, name=name, op=self.hvd.Sum))

    def finish(self, handle: Any) -> None:
        """Return when a sum has arrived."""
        self.call(lambda: self.hvd.synchronize(handle))

    def broadcast(self, tensor: torch.Tensor, name: str) -> None:
        """Overwrite a tensor with rank 0's, whatever its type."""
        # Horovod knows no bfloat16 and no bool; bytes are bytes.
        whole = tensor.detach().contiguous()
        view = whole.reshape(-1).view(torch.uint8)
        self.call(lambda: self.hvd.broadcast_(view, root_rank=0, name=name))
        if whole.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(whole)


def share_cores(num_ranks: int) -> None:
    """Let the ranks of a host share its cores: with a thread per core each, they would fight for them.

    ``horovodrun`` does not see to it; ``horovod-train run`` sets OMP_NUM_THREADS instead.
    """
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, min(torch.get_num_threads(), cores // num_ranks)))
