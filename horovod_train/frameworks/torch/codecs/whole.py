"""Every number of a gradient travels, in 32 bits or rounded to 16: an all-reduce in place."""

from __future__ import annotations

import torch

from horovod_train.frameworks.torch.codecs.base import Codec, Message
from horovod_train.frameworks.torch.comm.collectives import TensorCollectives


def fp32() -> Codec:
    """Return the codec that changes nothing."""
    return Whole(torch.float32)


def fp16() -> Codec:
    """Return the codec that halves the bytes and rounds the gradients."""
    return Whole(torch.float16)


def bf16() -> Codec:
    """Return the codec that halves the bytes, rounds the gradients, and does not overflow."""
    return Whole(torch.bfloat16)


class Whole(Codec):
    """Sums gradients unchanged, in a type that Horovod can sum.

    64-bit gradients stay 64-bit, and what carries extra numbers is never narrower than 32 bits. Gradients of
    bfloat16 that travel as bfloat16 are summed where they lie.

    Args:
        dtype: Of all others on the way.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def message(self, length: int, num_extra: int, dtype: torch.dtype, device: torch.device) -> Message:
        """Return the message of a bucket."""
        rounded = torch.float32 if num_extra else self._dtype
        return _WholeMessage(length, num_extra, torch.float64 if dtype == torch.float64 else rounded, device)


class _WholeMessage(Message):
    """One piece of memory: gradients, and behind them the extra numbers."""

    def __init__(self, length: int, num_extra: int, dtype: torch.dtype, device: torch.device) -> None:
        self._packed = torch.zeros(length + num_extra, dtype=dtype, device=device)
        self.body, self.extra = self._packed[:length], self._packed[length:]
        self.size_bytes = self._packed.numel() * self._packed.element_size()
        self._handle: object = None

    def send(self, ranks: TensorCollectives, name: str) -> None:
        """Begin the all-reduce."""
        self._handle = ranks.start_allreduce(self._packed, name)

    def receive(self, ranks: TensorCollectives) -> None:
        """Wait for it."""
        ranks.wait(self._handle)
