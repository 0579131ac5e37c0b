"""Gradient compression: how a bucket of gradients is summed over ranks.

A codec is a module here (or in another package) and one row of ``registry.CODECS``. For each bucket, it
creates one ``Message``. In each step, gradients are copied to its ``body``, ``exchange`` runs its
collectives, and ``body`` then contains the sum over ranks.

``exchange`` is a generator that yields handles of collectives, and is resumed with their results. It may
have several dependent rounds, and the rounds of different buckets overlap.
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
"""Generator that yields handles of collectives, at least one, and is resumed with their results."""


@dataclass(frozen=True)
class BucketLayout:
    """The gradients of a bucket, one after the other in flat memory.

    Attributes:
        shapes: Shape of each gradient by parameter name; that of a complex gradient is of its real view, with
            a last dimension of 2. The first dimension is outermost in memory.
        dtype: Data type of the parameters; of complex ones, that of the real view.
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
        """Return each parameter's elements of a flat tensor, as flat views."""
        return dict(zip(self.shapes, torch.split(flat, self.lengths), strict=True))


class Message:
    """Gradients of one bucket, and the collectives that sum them.

    Attributes:
        body: The gradients, flat; after ``exchange``, their sum over ranks, bitwise equal on all ranks.
        trailer: Flags and loss, summed uncompressed in at least 32 bits; None: summed separately.
        size_bytes: Bytes that this rank passes to collectives per exchange.
    """

    body: torch.Tensor
    trailer: torch.Tensor | None = None
    size_bytes: int

    def allocate(self) -> None:
        """Allocate ``body``, if it was released; called before a gradient is written."""

    def exchange(self, ranks: TensorCollectives, name: str) -> Rounds:
        """Sum ``body`` and ``trailer`` over ranks.

        Args:
            ranks: The communicator. All ranks call this with the same bucket layout.
            name: Name of the first collective; further rounds append a suffix.
        """
        raise NotImplementedError

    def state(self) -> Mapping[StateKey, torch.Tensor]:
        """Return the state that is kept between steps, by parameter and key; tensors are not copies."""
        return {}

    def commit(self, *, is_used: torch.Tensor | bool) -> None:
        """Keep the state of the last ``exchange`` if the step is used, or the one before if it is skipped.

        Args:
            is_used: Whether the step is used; a bool tensor of shape [] if the device decides.
        """


class Codec:
    """Gradient compression: creates the message of each bucket.

    Attributes:
        rules: By key of the messages' ``state``: how it is loaded on another number of ranks.
    """

    rules: Mapping[str, Rule] = {}

    @property
    def keeps_residual(self) -> bool:
        """Whether a part of a gradient may be sent in a later step."""
        return Rule.SUM in self.rules.values()

    def message(self, layout: BucketLayout) -> Message:
        """Return the message of a bucket."""
        raise NotImplementedError

    def check(self, ranks: TensorCollectives, layouts: Sequence[BucketLayout]) -> None:
        """Check that all ranks compute bitwise equal sums of these buckets. Collective.

        Raises:
            UserError: Ranks would compute different sums.
        """


def replace_if_used(kept: torch.Tensor, new: torch.Tensor, is_used: torch.Tensor | bool) -> None:
    """Copy new state of a message over the kept one, in place, if the step is used."""
    if isinstance(is_used, torch.Tensor):
        kept.copy_(torch.where(is_used, new, kept))
    elif is_used:
        kept.copy_(new)


def make_codec(section: Allreduce) -> Codec:
    """Return the job's codec: ``allreduce.codec``, or else the dense codec of ``wire_dtype``.

    Raises:
        UserError: Unknown codec, or invalid arguments.
    """
    name: str = section.wire_dtype
    args: dict[str, Any] = {}
    if section.codec is not None:
        name, args = section.codec.name, section.codec.args
    codec: Codec = CODECS.make(name, lambda factory: factory(**args), args_field="allreduce.codec.args")
    return codec
