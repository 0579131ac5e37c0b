"""Gradient codecs. A codec defines how a bucket of gradients is summed over ranks.

Codec            base class of codecs
BucketExchange   gradients of one bucket, and the collectives that sum them
make_codec       the job's codec
Dense            dense codecs: an in-place all-reduce of all elements of a gradient, in 32 bits or
                 rounded to 16 bits
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from horovod_train.config.schema import Allreduce
from horovod_train.frameworks.torch.comm.collectives import TensorCollectives
from horovod_train.frameworks.torch.state.rank_state import Rule, StateKey
from horovod_train.registry import CODECS

Rounds = Generator[Any, torch.Tensor, None]
"""Generator that yields at least one collective handle, and is resumed with the result of each."""


@dataclass(frozen=True)
class BucketLayout:
    """Layout of the gradients of a bucket, one after the other in flat memory.

    A complex gradient is represented by its real view, with a last dimension of 2.

    Attributes:
        shapes: Shape of each gradient by parameter name. The first dimension is outermost in memory.
        dtype: Data type of the parameters; of their real view if they are complex.
        device: Device of the parameters.
        trailer_length: Number of trailer elements (flags and loss), summed with this bucket; 0: no trailer.
    """

    shapes: Mapping[str, Sequence[int]]
    dtype: torch.dtype
    device: torch.device
    trailer_length: int

    @property
    def lengths(self) -> list[int]:
        """Number of elements of each gradient."""
        return [torch.Size(shape).numel() for shape in self.shapes.values()]

    def split(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the elements of each parameter in a flat tensor, as flat views by parameter name."""
        return dict(zip(self.shapes, torch.split(flat, self.lengths), strict=True))


class BucketExchange:
    """Gradients of one bucket, and the collectives that sum them.

    In each step, gradients are copied to its ``body``, ``exchange`` runs collectives, and ``body`` then
    contains the sum over ranks. The collectives of a bucket may depend on each other; those of different
    buckets overlap.

    Attributes:
        body: Flat gradients; after ``exchange``, their sum over ranks, bitwise equal on all ranks.
        trailer: Flags and loss, summed uncompressed in at least 32 bits; None: the caller sums them.
        size_bytes: Number of bytes that this rank passes to collectives per exchange.
    """

    body: torch.Tensor
    trailer: torch.Tensor | None = None
    size_bytes: int

    def allocate(self) -> None:
        """Allocate ``body`` if it was released. Called before a gradient is written."""

    def exchange(self, ranks: TensorCollectives, name: str) -> Rounds:
        """Sum ``body`` and ``trailer`` over ranks.

        Args:
            ranks: The communicator. All ranks must call this method with the same bucket layout.
            name: Name of the first collective; later collectives append a suffix.
        """
        raise NotImplementedError

    def state(self) -> Mapping[StateKey, torch.Tensor]:
        """Return the state that persists between steps, by parameter and key. Tensors are not copied."""
        return {}

    def commit(self, *, is_used: torch.Tensor | bool) -> None:
        """Store the state of the last ``exchange`` if the step is used; otherwise retain the previous state.

        ``is_used`` is a bool tensor of shape [] if the device decides.
        """


class Codec:
    """Base class of codecs.

    A codec is a class, or a function that returns one, and one row of ``registry.CODECS`` or an entry point.
    It creates one ``BucketExchange`` per bucket.

    Attributes:
        rules: How a state is loaded on another number of ranks, by the second item of its ``StateKey``.
        is_exact: Gradients are sent unchanged.
    """

    rules: Mapping[str, Rule] = {}
    is_exact: bool = False

    @property
    def keeps_residual(self) -> bool:
        """Whether the codec stores residuals: unsent parts of gradients, which later steps send."""
        return Rule.SUM in self.rules.values()

    def message(self, layout: BucketLayout) -> BucketExchange:
        """Create the ``BucketExchange`` of a bucket."""
        raise NotImplementedError

    def check(self, ranks: TensorCollectives, layouts: Sequence[BucketLayout]) -> None:
        """Raise ``UserError`` if ranks would compute different sums of these buckets. Collective."""


def replace_if_used(kept: torch.Tensor, new: torch.Tensor, is_used: torch.Tensor | bool) -> None:
    """Overwrite a stored tensor of ``BucketExchange.state`` with its new value if the step is used."""
    if isinstance(is_used, torch.Tensor):
        kept.copy_(torch.where(is_used, new, kept))
    elif is_used:
        kept.copy_(new)


def make_codec(section: Allreduce) -> Codec:
    """Create the job's codec: ``allreduce.codec`` or, if it is not set, the dense codec of ``wire_dtype``.

    Raises:
        UserError: The codec is unknown, or its arguments are invalid.
    """
    name: str = section.wire_dtype
    args: dict[str, Any] = {}
    if section.codec is not None:
        name, args = section.codec.name, section.codec.args
    codec: Codec = CODECS.make(name, lambda factory: factory(**args), args_field="allreduce.codec.args")
    return codec


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
        yield ranks.start_allreduce(self._packed, name)
