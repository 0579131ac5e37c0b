"""Messages of the strategy ``zero``: of the sum of a bucket's gradients each rank receives a part."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from horovod_train.frameworks.torch.codecs.base import Codec, Message
from horovod_train.frameworks.torch.comm.collectives import TensorCollectives
from horovod_train.frameworks.torch.comm.exchange import wide_type


class ScatteredMessage(Message):
    """A bucket's gradients, of whose sum each rank receives its part.

    Attributes:
        own: This rank's part of the sum over ranks and, since it was last cleared, over micro-batches.
        begin: Where the part begins in the bucket; the last parts may reach beyond its end.
    """

    def __init__(
        self, length: int, dtype: torch.dtype, device: torch.device, ranks: TensorCollectives
    ) -> None:
        part = -(-length // ranks.size)
        self.begin = ranks.rank * part
        self._whole = torch.zeros(part * ranks.size, dtype=dtype, device=device)
        self.body, self.extra = self._whole[:length], self._whole[:0]
        self.own = torch.zeros(part, dtype=dtype, device=device)
        self.size_bytes = self._whole.untyped_storage().nbytes()
        self.keeps_memory = True
        self._is_clear = True
        self._handle: object = None

    def open(self) -> None:
        """Make room for gradients, if there is none."""
        storage = self._whole.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.size_bytes)
            self._whole[self.body.numel() :].zero_()

    def give_back(self) -> None:
        """Keep no room for gradients, unless there is little to gain."""
        if self.keeps_memory:
            return
        self._whole.untyped_storage().resize_(0)

    def clear(self) -> None:
        """What is received next is the first."""
        self._is_clear = True

    def send(self, ranks: TensorCollectives, name: str) -> None:
        """Begin the reduce-scatter."""
        into = self.own if self._is_clear else torch.empty_like(self.own)
        self._handle = ranks.start_reduce_scatter(self._whole, into, name)

    def has_arrived(self, ranks: TensorCollectives) -> bool:
        """Return whether the message is complete."""
        return ranks.is_done(self._handle)

    def receive(self, ranks: TensorCollectives) -> None:
        """Wait for it, and add this rank's part to what was received before."""
        part = ranks.wait(self._handle)
        if part is not self.own:
            self.own += part
        self._is_clear = False
        self.give_back()


@dataclass(frozen=True)
class Scattered(Codec):
    """Makes such messages."""

    ranks: TensorCollectives

    def message(self, length: int, num_extra: int, dtype: torch.dtype, device: torch.device) -> Message:
        """Return the message of a bucket; sums are 32 bits wide at least, and nothing rides along."""
        return ScatteredMessage(length, wide_type(dtype), device, self.ranks)
