"""How the gradients of a bucket travel: whole, rounded, or only the largest of them.

A codec is a file here (or in another package, see ``registry.py``) and one row in the table. For each
bucket it makes a message, once; in each step, gradients are written into the message's ``body``,
``send`` lets it go, and after ``receive`` the sum over ranks is where the gradients were.
"""

from __future__ import annotations

from typing import Any

import torch

from horovod_train.config.schema import Allreduce
from horovod_train.frameworks.torch.comm.collectives import TensorCollectives
from horovod_train.registry import CODECS


class Message:
    """The gradients of one bucket on their way, and numbers that ride along.

    Attributes:
        body: The gradients, flat; after ``receive`` their sum over ranks, the same bits on all of them.
        extra: Flags and the loss; summed too, never encoded, in 32 bits at least.
        memory: What this rank has not sent yet, as long as ``body``; None: nothing is ever kept back.
        size_bytes: What this rank gives away.
    """

    body: torch.Tensor
    extra: torch.Tensor
    memory: torch.Tensor | None = None
    size_bytes: int

    def send(self, ranks: TensorCollectives, name: str) -> None:
        """Let it go; returns at once."""
        raise NotImplementedError

    def receive(self, ranks: TensorCollectives) -> None:
        """Return when the sums are in ``body`` and ``extra``."""
        raise NotImplementedError

    def commit(self, *, is_used: torch.Tensor | bool) -> None:
        """The step was made with the sum; or it was left out, and ``memory`` is as it was before.

        Args:
            is_used: Which of the two; where only the device knows, shape [].
        """


class Codec:
    """Makes messages.

    Attributes:
        has_memory: Messages keep back what they have not sent, and send it later.
    """

    has_residual: bool = False

    def message(self, length: int, num_extra: int, dtype: torch.dtype, device: torch.device) -> Message:
        """Return the message of a bucket.

        Args:
            length: How many numbers its gradients have.
            num_extra: How many ride along.
            dtype: Type of the gradients, real.
            device: Where they are.
        """
        raise NotImplementedError


def make_codec(section: Allreduce) -> Codec:
    """Return the codec of a job: the one it names, or else the one that sends its ``wire_dtype``.

    Raises:
        UserError: Unknown codec, or invalid arguments.
    """
    name: str = section.wire_dtype
    args: dict[str, Any] = {}
    if section.codec is not None:
        name, args = section.codec.name, section.codec.args
    codec: Codec = CODECS.make(name, lambda factory: factory(**args), args_field="allreduce.codec.args")
    return codec
