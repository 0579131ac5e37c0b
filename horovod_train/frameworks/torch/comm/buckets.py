"""Gradients packed into flat pieces of memory, each of which travels as one message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from horovod_train.errors import UserError
from horovod_train.frameworks.buckets import plan_buckets
from horovod_train.frameworks.torch.codecs.base import Codec


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bucket; ``packed`` has the shape of its local part.

    Attributes:
        gradient: In the form of the parameter.
    """

    parameter: torch.nn.Parameter
    index: int
    gradient: torch.Tensor
    packed: torch.Tensor


class Bucket:
    """Some parameters' gradients in one piece of memory.

    Attributes:
        message: What travels; in the last bucket, flags and loss with it.
        gradients: The gradients in the parameters' type: the same memory when the types agree. Of
            complex parameters, pairs of real and imaginary part.
    """

    def __init__(
        self, members: Sequence[tuple[int, torch.nn.Parameter]], codec: Codec, num_extra: int
    ) -> None:
        first = members[0][1]
        own_dtype = first.dtype.to_real()
        length = sum(map(_num_reals, (parameter for _, parameter in members)))
        self.message = codec.message(length, num_extra, own_dtype, first.device)
        self.extra, body = self.message.extra, self.message.body
        self.gradients = body if body.dtype == own_dtype else torch.zeros_like(body, dtype=own_dtype)
        self.slots: list[Slot] = []
        at = 0
        for index, parameter in members:
            piece = slice(at, at + _num_reals(parameter))
            at = piece.stop
            if parameter.is_complex():
                pairs = (*parameter.shape, 2)
                gradient = torch.view_as_complex(self.gradients[piece].view(pairs))
                self.slots.append(Slot(parameter, index, gradient, body[piece].view(pairs)))
            else:
                gradient, packed = (
                    laid_out(self.gradients[piece], to_local(parameter)),
                    laid_out(body[piece], to_local(parameter)),
                )
                self.slots.append(Slot(parameter, index, like(parameter, gradient), packed))
        self.num_missing = len(self.slots)
        self.is_sent = False

    def unpack(self) -> None:
        """Bring the sum into the parameters' type."""
        if self.gradients is not self.message.body:
            self.gradients.copy_(self.message.body)

    def slots_between(self, begin: int, end: int) -> Iterator[tuple[Slot, int, slice]]:
        """Yield the parameters between two places, where each begins, and what of it, flat, is there."""
        at = 0
        for slot in self.slots:
            length = _num_reals(slot.parameter)
            first, last = max(begin - at, 0), min(end - at, length)
            if first < last:
                yield slot, at, slice(first, last)
            at += length

    def memory(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yield what was not sent yet of each parameter's gradient, flat; nothing where all is sent."""
        if self.message.memory is not None:
            parameters = [slot.parameter for slot in self.slots]
            pieces = torch.split(self.message.memory, list(map(_num_reals, parameters)))
            yield from zip(parameters, pieces, strict=True)


def _num_reals(parameter: torch.Tensor) -> int:
    return to_local(parameter).numel() * (2 if parameter.is_complex() else 1)


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a ``DTensor``; other tensors are returned unchanged."""
    to_local: Callable[[], torch.Tensor] | None = getattr(tensor.detach(), "to_local", None)
    return tensor if to_local is None else to_local()


def aligned(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient shared between ranks as its parameter is; autograd leaves it as it comes."""
    wanted = getattr(parameter, "placements", None)
    if wanted is None or getattr(gradient, "placements", None) == wanted:
        return gradient
    shared: torch.Tensor = gradient.redistribute(placements=wanted)  # type: ignore[attr-defined]
    return shared


def like(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient, the same memory, in the form of a parameter, which ranks may share."""
    if not hasattr(parameter, "to_local"):
        return gradient
    from horovod_train.frameworks.torch.state.shards import local_tensor_of  # takes a while to import

    return local_tensor_of(parameter).like(gradient)


def laid_out(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a view of flat memory with a parameter's shape, laid out as the parameter is.

    Optimizers that update many parameters in one kernel want a gradient where the weight lies: with
    channels last, in that order.
    """
    formats = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
    dims = {torch.channels_last: 4, torch.channels_last_3d: 5}
    is_dense = any(
        parameter.is_contiguous(memory_format=form)
        for form in formats
        if dims.get(form, parameter.dim()) == parameter.dim()
    )
    return flat.as_strided(parameter.shape, parameter.stride()) if is_dense else flat.view(parameter.shape)


def as_reals(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient densely, complex numbers as pairs."""
    own = to_local(gradient)
    dense = own.to_dense() if own.is_sparse else own
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def make_buckets(
    parameters: Sequence[torch.nn.Parameter], bucket_size_bytes: int, codec: Codec
) -> list[Bucket]:
    """Lay parameters out in buckets, last parameter first: about the order backward makes them.

    A bucket holds one type on one device; the last one carries what rides along.
    """
    kinds = [(parameter.dtype, parameter.device) for parameter in parameters]
    sizes_bytes = [to_local(parameter).numel() * parameter.element_size() for parameter in parameters]
    plan = plan_buckets(kinds, sizes_bytes, bucket_size_bytes, in_a_row=True)
    # After the flags of all: whether this rank has changed what it trains, and the loss.
    num_extra = len(parameters) + 2
    return [
        Bucket(
            [(place, parameters[place]) for place in places], codec, num_extra if places is plan[-1] else 0
        )
        for places in plan
    ]


def gradient_reduced_already() -> UserError:
    """Return the error of a parameter whose gradient has left, and that got another one."""
    return UserError(
        "a parameter got a gradient twice in one backward pass",
        hint="use torch.utils.checkpoint with use_reentrant=False",
    )
