"""Buckets: gradients of several parameters in a flat tensor, which one message sums over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from horovod_train.errors import UserError
from horovod_train.frameworks.buckets import plan_buckets
from horovod_train.frameworks.torch.codecs.base import BucketExchange, BucketLayout

MakeMessage = Callable[[BucketLayout], BucketExchange]


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bucket.

    Attributes:
        index: Number of the parameter among all parameters of the buckets.
        gradient: The sum over ranks, in the parameter's data type; a ``DTensor`` if the parameter is one.
        packed: View of ``message.body`` to which the gradient is copied; shape of the local part.
    """

    parameter: torch.nn.Parameter
    index: int
    gradient: torch.Tensor
    packed: torch.Tensor


class Bucket:
    """Gradients of some parameters in flat memory.

    Attributes:
        message: Sums the gradients over ranks.
        gradients: The sums in the parameters' data type; ``message.body`` itself if data types are equal.
            Complex gradients are stored as pairs of real and imaginary part.
        parameters: The parameters, in the order of their gradients.
        packed: Views of ``message.body``, one for each parameter.
        num_missing: Gradients that the backward pass has not computed yet.
        is_complete: Whether all gradients of this rank are packed.
        is_sent: Whether the collectives have started.
    """

    def __init__(
        self, members: Sequence[tuple[int, str, torch.nn.Parameter]], make: MakeMessage, trailer_length: int
    ) -> None:
        first = members[0][2]
        dtype = first.dtype.to_real()
        shapes = {name: shape_of_reals(parameter) for _, name, parameter in members}
        self.layout = BucketLayout(shapes, dtype, first.device, trailer_length)
        self.message = make(self.layout)
        body = self.message.body
        self.gradients = body if body.dtype == dtype else torch.zeros_like(body, dtype=dtype)
        sums, packed = self.layout.split(self.gradients), self.layout.split(body)
        self.slots = [
            Slot(parameter, index, in_form_of(parameter, sums[name]), laid_out(packed[name], parameter))
            for index, name, parameter in members
        ]
        self.parameters = [slot.parameter for slot in self.slots]
        self.packed = [slot.packed for slot in self.slots]
        self.num_missing = len(self.slots)
        self.is_sent = False
        self.is_complete = False

    def unpack(self) -> None:
        """Convert the sum to the parameters' data type."""
        if self.gradients is not self.message.body:
            self.gradients.copy_(self.message.body)

    def slots_between(self, begin: int, end: int) -> Iterator[tuple[Slot, int, slice]]:
        """Yield the parameters between two positions of the flat memory.

        Yields:
            Slot, offset of the parameter in the bucket, and slice of the flat parameter within the interval.
        """
        at = 0
        for slot, length in zip(self.slots, self.layout.lengths, strict=True):
            first, last = max(begin - at, 0), min(end - at, length)
            if first < last:
                yield slot, at, slice(first, last)
            at += length


def shape_of_reals(parameter: torch.Tensor) -> Sequence[int]:
    """Return the shape of a gradient in its bucket: pairs of reals if the parameter is complex."""
    local = to_local(parameter)
    return (*local.shape, 2) if local.is_complex() else tuple(local.shape)


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a ``DTensor``; other tensors are returned unchanged."""
    to_local: Callable[[], torch.Tensor] | None = getattr(tensor.detach(), "to_local", None)
    return tensor if to_local is None else to_local()


def aligned(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient, redistributed to the placements of its parameter if that is a ``DTensor``."""
    wanted = getattr(parameter, "placements", None)
    if wanted is None or getattr(gradient, "placements", None) == wanted:
        return gradient
    redistributed: torch.Tensor = gradient.redistribute(placements=wanted)  # type: ignore[attr-defined]
    return redistributed


def in_form_of(parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """Return a view of flat memory as a gradient; complex, or a ``DTensor``, if its parameter is."""
    view = laid_out(flat, parameter)
    if parameter.is_complex():
        return torch.view_as_complex(view)
    if not hasattr(parameter, "to_local"):
        return view
    from horovod_train.frameworks.torch.state.shards import local_tensor_of  # importing DTensor is slow

    return local_tensor_of(parameter).like(view)


def laid_out(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a view of flat memory with the shape and strides of a parameter's local part.

    Fused optimizers require that a gradient has the strides of its weight (channels last, for example).
    """
    if parameter.is_complex():
        return flat.view(tuple(shape_of_reals(parameter)))
    local = to_local(parameter)
    formats = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
    dims = {torch.channels_last: 4, torch.channels_last_3d: 5}
    is_dense = any(
        local.is_contiguous(memory_format=form)
        for form in formats
        if dims.get(form, local.dim()) == local.dim()
    )
    return flat.as_strided(local.shape, local.stride()) if is_dense else flat.view(local.shape)


def as_reals(gradient: torch.Tensor) -> torch.Tensor:
    """Return the local part of a gradient, dense; the real view of a complex gradient."""
    own = to_local(gradient)
    dense = own.to_dense() if own.is_sparse else own
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def make_buckets(
    named: Mapping[str, torch.nn.Parameter], bucket_size_bytes: int, make: MakeMessage, trailer_length: int
) -> list[Bucket]:
    """Assign parameters to buckets in reverse order, which approximates the order of the backward pass.

    A bucket has one data type and one device. The layout of the last bucket includes the trailer.
    """
    names, parameters = list(named), list(named.values())
    kinds = [(parameter.dtype, parameter.device) for parameter in parameters]
    sizes_bytes = [to_local(parameter).numel() * parameter.element_size() for parameter in parameters]
    plan = plan_buckets(kinds, sizes_bytes, bucket_size_bytes, contiguous=True)
    return [
        Bucket(
            [(index, names[index], parameters[index]) for index in indices],
            make,
            trailer_length if indices is plan[-1] else 0,
        )
        for indices in plan
    ]


def gradient_reduced_already() -> UserError:
    """Return the error for a parameter that receives a second gradient in one backward pass."""
    return UserError(
        "a parameter got a gradient twice in one backward pass",
        hint="use torch.utils.checkpoint with use_reentrant=False",
    )
