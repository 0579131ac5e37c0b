"""Dense codecs: an in-place all-reduce of all elements of a gradient, in 32 bits or rounded to 16 bits."""

from __future__ import annotations

import torch

from horovod_train.frameworks.torch.codecs.base import BucketExchange, BucketLayout, Codec, Rounds
from horovod_train.frameworks.torch.comm.collectives import TensorCollectives


def fp32() -> Codec:
    """Return the codec that sends gradients unchanged."""
    return Dense(torch.float32)


def fp16() -> Codec:
    """Return the codec that rounds gradients to float16, which halves the bytes."""
    return Dense(torch.float16)


def bf16() -> Codec:
    """Return the codec that rounds gradients to bfloat16, which halves the bytes and has float32's range."""
    return Dense(torch.bfloat16)


class Dense(Codec):
    """Codec that sums all elements, in a data type that Horovod can sum.

    Args:
        dtype: Wire dtype. float64 gradients are sent in float64, and other buckets with a trailer in float32.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.is_exact = dtype == torch.float32

    def message(self, layout: BucketLayout) -> BucketExchange:
        """Create the message of a bucket."""
        rounded = torch.float32 if layout.trailer_length else self._dtype
        return DenseMessage(layout, torch.float64 if layout.dtype == torch.float64 else rounded)


class DenseMessage(BucketExchange):
    """BucketExchange of one tensor: gradients, followed by the trailer."""

    def __init__(self, layout: BucketLayout, dtype: torch.dtype) -> None:
        length = sum(layout.lengths)
        self._packed = torch.zeros(length + layout.trailer_length, dtype=dtype, device=layout.device)
        self.body, self.trailer = self._packed[:length], self._packed[length:]
        self.size_bytes = self._packed.nbytes

    def exchange(self, ranks: TensorCollectives, name: str) -> Rounds:
        """Sum the tensor over ranks, in place."""
        yield ranks.start_allreduce(self._packed, name)
