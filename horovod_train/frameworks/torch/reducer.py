"""Sum gradients over ranks while backward still runs.

Gradients are packed into flat buckets in the order backward makes them. When the last gradient of
a bucket is there, the bucket leaves: one all-reduce, in place, no further copy. The layout is fixed
when the reducer is made, so the order of every addition is fixed too: results are the same bit for
bit from run to run, on any number of ranks.

Each micro-batch's loss is weighted by its share of the step's samples before backward, so the sum
over ranks is the mean over samples, also when ranks hold different numbers of them.

Two things ride along at the end of the last bucket, for free:

* one flag for each parameter, whether this rank has a gradient for it. A parameter that no rank
  used keeps ``grad = None``, as it would in a single process (an optimizer then leaves it alone);
* the weighted loss, whose sum is the loss of the whole step on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from horovod_train.errors import UserError


class Gradients(Protocol):
    """The gradients of one replica during a step."""

    bytes_per_step: int

    def expect_last(self) -> None:
        """The next backward is the last of this step."""
        ...

    def finish(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Complete the gradients of the step; return its loss."""
        ...

    def gradients(self) -> list[torch.Tensor]:
        """Tensors that together are the gradient; writing to them changes ``parameter.grad``."""
        ...


class Wire(Protocol):
    """Sums tensors over ranks."""

    def start_sum(self, tensor: torch.Tensor, name: str) -> Any:
        """Begin to sum a tensor in place; returns at once with a handle."""
        ...

    def finish(self, handle: Any) -> None:
        """Return when the sum is in the tensor."""
        ...


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bucket; ``gradient`` and ``packed`` have the parameter's shape."""

    parameter: torch.nn.Parameter
    index: int
    gradient: torch.Tensor
    packed: torch.Tensor


class Bucket:
    """Some parameters' gradients in one piece of memory.

    Attributes:
        packed: What travels, flat, in the wire's type; in the last bucket, flags and loss follow.
        gradients: The gradients in the parameters' type: the same memory when the types agree.
    """

    def __init__(
        self, members: Sequence[tuple[int, torch.nn.Parameter]], wire_dtype: torch.dtype, num_extra: int
    ) -> None:
        first = members[0][1]
        length = sum(parameter.numel() for _, parameter in members)
        self.packed = torch.zeros(length + num_extra, dtype=wire_dtype, device=first.device)
        self.extra = self.packed[length:]
        body = self.packed[:length]
        self.gradients = body if wire_dtype == first.dtype else torch.zeros_like(body, dtype=first.dtype)
        self._body = body
        self.slots: list[Slot] = []
        at = 0
        for index, parameter in members:
            piece = slice(at, at + parameter.numel())
            shape = parameter.shape
            self.slots.append(
                Slot(parameter, index, self.gradients[piece].view(shape), body[piece].view(shape))
            )
            at += parameter.numel()
        self.num_missing = len(self.slots)
        self.handle: Any = None

    def unpack(self) -> None:
        """Bring the sum into the parameters' type."""
        if self.gradients is not self._body:
            self.gradients.copy_(self._body)


class GradientReducer:
    """Keeps the gradients of one replica equal to those of the whole step.

    A step is: ``expect_last()`` before the last backward, then ``finish(loss)``. Backward passes
    before that only accumulate. A rank without samples calls ``finish`` alone.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        wire: Wire,
        *,
        bucket_size_bytes: int,
        wire_dtype: torch.dtype = torch.float32,
    ) -> None:
        self._wire = wire
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.buckets = make_buckets(self._trained, bucket_size_bytes, wire_dtype)
        self._is_packed = [False] * len(self._trained)
        self._listening = False
        self.bytes_per_step = sum(b.packed.numel() * b.packed.element_size() for b in self.buckets)
        self._removers = [
            slot.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._make_hook(bucket, slot)
            )
            for bucket in self.buckets
            for slot in bucket.slots
        ]

    def expect_last(self) -> None:
        """The next backward is the last of this step: buckets leave as they fill."""
        self._listening = True

    def finish(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Send what has not left yet, wait for all, and put the sums into ``parameter.grad``.

        Args:
            weighted_loss: This rank's sum of share x loss, shape [].

        Returns:
            The sum over ranks, shape []: the mean loss over the samples of the step.
        """
        self._listening = False
        flags_and_loss = self.buckets[-1].extra
        has_gradient = [
            packed or parameter.grad is not None
            for packed, parameter in zip(self._is_packed, self._trained, strict=True)
        ]
        all_used = all(has_gradient)
        flags_and_loss[:-1] = 1.0 if all_used else torch.tensor(has_gradient).to(flags_and_loss)
        flags_and_loss[-1] = weighted_loss
        for number, bucket in enumerate(self.buckets):
            if bucket.handle is None:
                for slot in bucket.slots:
                    if not self._is_packed[slot.index]:
                        self._pack(slot)
                self._send(number)
        self._receive(None if all_used else flags_and_loss[:-1])
        return flags_and_loss[-1]

    def gradients(self) -> list[torch.Tensor]:
        """The summed gradients, a flat tensor per bucket; writing to them changes ``parameter.grad``."""
        return [bucket.gradients for bucket in self.buckets]

    def close(self) -> None:
        """Let go of the parameters."""
        for remover in self._removers:
            remover.remove()

    def _make_hook(self, bucket: Bucket, slot: Slot) -> Any:
        number = self.buckets.index(bucket)
        is_last = bucket is self.buckets[-1]

        def gradient_is_there(_: torch.Tensor) -> None:
            if not self._listening:
                return
            if self._is_packed[slot.index]:
                raise UserError(
                    "a parameter got a gradient twice in one backward pass",
                    hint="use torch.utils.checkpoint with use_reentrant=False",
                )
            self._pack(slot)
            self._is_packed[slot.index] = True
            slot.parameter.grad = None
            bucket.num_missing -= 1
            # The last bucket waits for finish(): it carries what is only known then.
            if bucket.num_missing == 0 and not is_last:
                self._send(number)

        return gradient_is_there

    def _pack(self, slot: Slot) -> None:
        gradient = slot.parameter.grad
        if gradient is None:
            slot.packed.zero_()
        elif gradient.is_sparse:
            slot.packed.copy_(gradient.to_dense())
        elif gradient.data_ptr() != slot.packed.data_ptr():
            slot.packed.copy_(gradient)

    def _send(self, number: int) -> None:
        bucket = self.buckets[number]
        bucket.handle = self._wire.start_sum(bucket.packed, f"horovod_train.bucket.{number}")

    def _receive(self, flags: torch.Tensor | None) -> None:
        """Wait for every bucket. ``flags`` is read only by ranks that lack a gradient."""
        for bucket in self.buckets:
            self._wire.finish(bucket.handle)
        # Only a rank that lacks a gradient has to ask; the others know that it is used.
        is_used = None if flags is None else (flags > 0).tolist()
        for bucket in self.buckets:
            bucket.unpack()
            bucket.handle = None
            bucket.num_missing = len(bucket.slots)
            for slot in bucket.slots:
                used = is_used is None or is_used[slot.index]
                slot.parameter.grad = slot.gradient if used else None
        self._is_packed = [False] * len(self._trained)


class LocalGradients:
    """The gradients of a world of one: already complete."""

    bytes_per_step = 0

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)

    def expect_last(self) -> None:
        """Do nothing."""

    def finish(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return weighted_loss

    def gradients(self) -> list[torch.Tensor]:
        """The gradients there are."""
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]


def make_buckets(
    parameters: Sequence[torch.nn.Parameter], bucket_size_bytes: int, wire_dtype: torch.dtype
) -> list[Bucket]:
    """Lay parameters out in buckets, last parameter first: about the order backward makes them.

    A bucket holds one type on one device. 64-bit gradients stay 64-bit on the wire, and the last
    bucket is never narrower than 32 bits: it carries the loss.
    """
    groups: list[list[tuple[int, torch.nn.Parameter]]] = []
    size_bytes = 0
    for index, parameter in reversed(list(enumerate(parameters))):
        same = groups and _kind(groups[-1][0][1]) == _kind(parameter)
        if not same or size_bytes >= bucket_size_bytes:
            groups.append([])
            size_bytes = 0
        groups[-1].append((index, parameter))
        size_bytes += parameter.numel() * parameter.element_size()
    buckets = []
    for group in groups:
        is_last = group is groups[-1]
        is_wide = group[0][1].dtype == torch.float64
        dtype = torch.float64 if is_wide else torch.float32 if is_last else wire_dtype
        buckets.append(Bucket(group, dtype, len(parameters) + 1 if is_last else 0))
    return buckets


def _kind(parameter: torch.nn.Parameter) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device
