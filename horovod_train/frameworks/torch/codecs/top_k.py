"""Only the largest numbers of a gradient travel; the rest is kept and added to the next one.

For each bucket, with what was kept back added to its gradient, a rank sends the ``keep`` part of its
numbers that are largest in size, and their places, and keeps the others (error feedback): nothing is
lost, it comes later. Every rank adds up what all have sent, in the order of ranks, so the sum is the
same bit for bit. What is kept belongs to a rank alone and is in the checkpoint.

A number costs 8 bytes on the way (32 bits, and its place), and all ranks send to all, so that a rank
receives ``size`` times what it sends. For networks that are slow relative to the model, and few ranks.

Source: Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", arXiv:1809.07599.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from horovod_train.errors import UserError
from horovod_train.frameworks.torch.codecs.base import Codec, Message
from horovod_train.frameworks.torch.comm.collectives import TensorCollectives

PLACE = torch.int32


class TopK(Codec):
    """Sends the largest numbers, and keeps the others for later.

    Args:
        keep: Which part of a bucket's numbers travels, 0 < keep <= 1; one number at least.

    Raises:
        UserError: It is not such a part.
    """

    has_residual = True

    def __init__(self, *, keep: float) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
            raise UserError(
                f"allreduce.codec.args.keep is {keep!r}",
                hint="use the part of all numbers that travels, such as 0.01",
            )
        self._keep = keep

    def message(self, length: int, num_extra: int, dtype: torch.dtype, device: torch.device) -> Message:
        """Return the message of a bucket."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return _TopKMessage(math.ceil(self._keep * length), length, num_extra, wide, device)


class _TopKMessage(Message):
    """Values, their places, and the extra numbers behind them, as bytes."""

    memory: torch.Tensor

    def __init__(
        self, num_sent: int, length: int, num_extra: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.body = torch.zeros(length, dtype=dtype, device=device)
        self.extra = torch.zeros(num_extra, dtype=dtype, device=device)
        self.memory = torch.zeros_like(self.body)
        self._kept = torch.zeros_like(self.body)  # memory after this step, if it is used
        self._num_sent = num_sent
        self._sizes_bytes = [num_sent * dtype.itemsize, num_sent * PLACE.itemsize, num_extra * dtype.itemsize]
        self.size_bytes = sum(self._sizes_bytes)
        self._handle: Any = None

    def send(self, ranks: TensorCollectives, name: str) -> None:
        """Choose what travels, and let it go."""
        self.body.add_(self.memory)
        places = self.body.abs().topk(self._num_sent, sorted=False).indices
        parts = (self.body[places], places.to(PLACE), self.extra)
        self._kept.copy_(self.body)
        self._kept[places] = 0
        self._handle = ranks.start_allgather(torch.cat([part.view(torch.uint8) for part in parts]), name)

    def receive(self, ranks: TensorCollectives) -> None:
        """Add up what all ranks have sent."""
        self.body.zero_()
        self.extra.zero_()
        for sent in torch.split(ranks.wait(self._handle), self.size_bytes):
            # Copies: a type wants its numbers at multiples of their size.
            values, places, extra = (part.clone() for part in torch.split(sent, self._sizes_bytes))
            self.body.index_add_(0, places.view(PLACE), values.view(self.body.dtype))
            self.extra.add_(extra.view(self.extra.dtype))

    def commit(self, *, is_used: torch.Tensor | bool) -> None:
        """Remember what was kept back in a step that was used."""
        if self._handle is None:
            return
        if isinstance(is_used, torch.Tensor):
            self.memory.copy_(torch.where(is_used, self._kept, self.memory))
        elif is_used:
            self.memory, self._kept = self._kept, self.memory
