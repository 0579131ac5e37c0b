"""Gradient compression: how a bucket of gradients is summed over ranks.

A codec is a file here (or in another package, see ``registry.py``) and one row of a table. For each bucket it
makes a message, once. In each step gradients are written into the message's ``body``, ``exchange`` runs its
collectives, and then the sum over ranks is in ``body``.

An exchange is a generator: it yields the handle of a collective and is resumed with its result. So it may
have several rounds that depend on each other, and the rounds of different buckets overlap.
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

Exchange = Generator[Any, torch.Tensor, None]
"""Yields handles of collectives; is resumed with their results."""


@dataclass(frozen=True)
class BucketLayout:
    """The gradients of a bucket, one after the other in flat memory.

    Attributes:
        shapes: Shape of each gradient by parameter name; a complex gradient has pairs of reals, and one more
            dimension. The first dimension is outermost in memory.
        dtype: Data type of the parameters; real.
        device: Device of the parameters.
        trailer_length: Numbers that are summed with this bucket, uncompressed; 0: none.
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
        """Return the part of a flat tensor that belongs to each parameter, flat."""
        return dict(zip(self.shapes, torch.split(flat, self.lengths), strict=True))


class Message:
    """Gradients of one bucket, and the collectives that sum them.

    Attributes:
        body: The gradients, flat; after ``exchange``, their sum over ranks, bitwise equal on all ranks.
        trailer: Numbers that are summed uncompressed, in at least 32 bits; None: this message has none.
        size_bytes: Bytes that this rank passes to collectives.
    """

    body: torch.Tensor
    trailer: torch.Tensor | None = None
    size_bytes: int

    def allocate(self) -> None:
        """Allocate ``body``, if it was released; called before a gradient is written."""

    def exchange(self, ranks: TensorCollectives, name: str) -> Exchange:
        """Sum ``body`` and ``trailer`` over ranks.

        Args:
            ranks: The ranks that sum; all of them have the same layout.
            name: Name of the collectives; each round appends its own suffix.
        """
        raise NotImplementedError

    def state(self) -> Mapping[StateKey, torch.Tensor]:
        """Return the state between steps, by parameter and key; writing to a tensor changes the state."""
        return {}

    def commit(self, *, is_used: torch.Tensor | bool) -> None:
        """Keep the new state if the step is used, and the old one if it is skipped.

        Args:
            is_used: Whether it is used; if only the device knows, a tensor of shape [].
        """


class Codec:
    """Makes messages.

    Attributes:
        rules: How each key of the messages' state is loaded on another number of ranks.
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
        """Refuse ranks on which the sums of these buckets would not be bitwise equal.

        Raises:
            UserError: They would not.
        """


def make_codec(section: Allreduce) -> Codec:
    """Return the codec of a job: ``allreduce.codec``, or else the one that sends its ``wire_dtype``.

    Raises:
        UserError: Unknown codec, or invalid arguments.
    """
    name: str = section.wire_dtype
    args: dict[str, Any] = {}
    if section.codec is not None:
        name, args = section.codec.name, section.codec.args
    codec: Codec = CODECS.make(name, lambda factory: factory(**args), args_field="allreduce.codec.args")
    return codec
