"""Buckets: gradients of several parameters in a flat tensor, which one message sums over ranks.

    Slot               a parameter's place in its bucket
    Bucket             gradients of some parameters in flat memory
    Trailer            numbers that ranks sum with the gradients of a step
    GradientPipeline   fills buckets during the backward pass, and sums full buckets
    ScatteredMessage   exchange under ``zero``: a reduce-scatter that returns this rank's part

The layout of buckets depends only on the parameters, so the order of additions is fixed: results are
bitwise reproducible.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from horovod_train.errors import UserError
from horovod_train.frameworks.exchange import plan_buckets
from horovod_train.frameworks.torch.codecs import BucketExchange, BucketLayout, Rounds
from horovod_train.frameworks.torch.comm.collectives import TensorCollectives, wide_type
from horovod_train.frameworks.torch.state.local import to_local
from horovod_train.frameworks.torch.step.deferred import NoiseMeter

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


MAX_WAIT_S = 5.0
"""Time without a completed collective after which more buckets may be in flight. Ranks that are slow for a
moment are not taken for ranks that send buckets in different orders."""
POLL_S = 0.0003


class Trailer:
    """Numbers that ranks sum with the gradients of a step, stored in a flat tensor.

    It is summed in each step, within the last bucket or separately:

        used      one flag per parameter: this rank has its gradient. The ``grad`` of a parameter that no
                  rank uses remains None, as in a single process
        noise     sums of the parts of the step, for the gradient noise scale (``step/deferred.py``), if
                  enabled
        changed   flag: this rank's set of trained parameters has changed
        loss      this rank's part of the loss; the sum is the loss of the step

    Args:
        numbers: Shape [number of parameters + ``num_noise`` + 2].
        num_noise: Number of elements of ``noise``.

    Attributes:
        noise: Sums for the gradient noise scale, shape [num_noise].
        used: Number of ranks that have a gradient, by parameter. Before the sum: 0 or 1.
        changed: Number of ranks whose set of trained parameters has changed, shape [].
        loss: The loss, shape [].
    """

    NUM_FIXED = 2

    def __init__(self, numbers: torch.Tensor, num_noise: int = 0) -> None:
        num_others = num_noise + self.NUM_FIXED
        self.used, self.noise = numbers[:-num_others], numbers[-num_others : -self.NUM_FIXED]
        self.changed, self.loss = numbers[-2], numbers[-1]

    def write(self, used: Sequence[bool] | None, loss: torch.Tensor, *, is_changed: bool) -> None:
        """Write this rank's numbers; ``used=None``: all parameters are used."""
        if used is None:
            self.used.fill_(1.0)
        else:
            flags = torch.tensor(used, dtype=self.used.dtype, pin_memory=self.used.is_cuda)
            self.used.copy_(flags, non_blocking=True)
        self.changed.fill_(float(is_changed))
        self.loss.copy_(loss)


class GradientPipeline:
    """Sums of the gradients of parameters over ranks, in buckets.

    .. code-block:: text

        a parameter's gradient is complete -> the gradient is copied into its bucket
        the last gradient of a bucket      -> the bucket's collectives start (``BucketExchange``)
        after the backward pass            -> incomplete buckets are sent; the rank waits for collectives

    Args:
        named: The trained parameters by name.
        ranks: The communicator.
        make: Creates a bucket's ``BucketExchange`` (codecs.py): its flat data and its collectives.
        bucket_size_bytes: Approximate size of a bucket.
        name: Prefix of the names of collectives.
        refuse: Called before a gradient is packed; raises if a backward pass is not allowed now.
        noise: Measures the norms of this rank's gradients; None: they are not measured.
        max_in_flight: Largest number of buckets in flight before a rank waits for the oldest; None: no limit.

    Attributes:
        buckets: Buckets in the order in which they are sent.
        trailer: Numbers that are summed with the gradients.
        pass_bytes: Bytes that this rank passes to collectives per backward pass.
        sent_bytes: Bytes that this rank has passed to collectives since ``begin``.
    """

    def __init__(
        self,
        named: Mapping[str, torch.nn.Parameter],
        ranks: TensorCollectives,
        make: MakeMessage,
        *,
        bucket_size_bytes: int,
        name: str,
        refuse: Callable[[], None] = lambda: None,
        noise: NoiseMeter | None = None,
        max_in_flight: int | None = None,
    ) -> None:
        self.parameters = list(named.values())
        self._ranks, self._name, self._refuse = ranks, name, refuse
        self._max_in_flight, self._noise = max_in_flight, noise
        num_noise = 0 if noise is None else noise.length
        length = len(self.parameters) + num_noise + Trailer.NUM_FIXED
        self.buckets = make_buckets(named, bucket_size_bytes, make, length)
        own = self.buckets[-1].message.trailer
        self._separate_trailer: torch.Tensor | None = None
        if own is None:
            wide = any(parameter.dtype == torch.float64 for parameter in self.parameters)
            dtype = torch.float64 if wide else torch.float32
            own = torch.zeros(length, dtype=dtype, device=self.parameters[0].device)
            self._separate_trailer = own
        self.trailer = Trailer(own, num_noise)
        self.pass_bytes = sum(bucket.message.size_bytes for bucket in self.buckets)
        self.sent_bytes = 0
        self._is_listening = False
        self._is_packed = [False] * len(self.parameters)
        self.has_gradient = [False] * len(self.parameters)
        self._in_flight: deque[tuple[Rounds, Any]] = deque()
        self._removers: list[RemovableHandle] = []

    def attach(self) -> None:
        """Register post-accumulate hooks that pack each gradient into its bucket."""
        self._removers = [
            slot.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._make_hook(number, slot)
            )
            for number, bucket in enumerate(self.buckets)
            for slot in bucket.slots
        ]

    def close(self) -> None:
        """Detach all hooks from the parameters."""
        for remover in self._removers:
            remover.remove()
        self._removers = []

    def begin(self) -> None:
        """Begin a step."""
        self._is_listening = False
        self._in_flight.clear()
        self.sent_bytes = 0
        self.has_gradient = [False] * len(self.parameters)

    def listen(self) -> None:
        """Complete the sums of the previous backward pass; pack and send gradients in the next one."""
        if self._is_listening:
            self.send_rest()
            self._end_part()
            self.receive()
        self._is_listening = True

    def used_in_last_pass(self) -> list[torch.nn.Parameter]:
        """Return the parameters that got a gradient in the last backward pass; valid until ``send_rest``."""
        return [p for p, used in zip(self.parameters, self._is_packed, strict=True) if used]

    def finish(self, loss: torch.Tensor, *, is_changed: bool, all_count: bool = False) -> bool:
        """Send the remaining buckets, and wait for the sums of gradients and trailer.

        Args:
            loss: This rank's part of the loss, shape [].
            is_changed: This rank's set of trained parameters has changed.
            all_count: Count every parameter that requires a gradient as used (it may have a residual).

        Returns:
            Whether this rank uses all parameters; if so, ``trailer.used`` need not be read.
        """
        used = [
            had or parameter.grad is not None or (all_count and parameter.requires_grad)
            for had, parameter in zip(self.has_gradient, self.parameters, strict=True)
        ]
        all_used = all(used)
        self._pack_rest()
        self._end_part()
        if self._noise is not None:
            self.trailer.noise.copy_(self._noise.local)
        self.trailer.write(None if all_used else used, loss, is_changed=is_changed)
        handle = None
        if self._separate_trailer is not None:
            handle = self._ranks.start_allreduce(self._separate_trailer, f"{self._name}.trailer")
        self.send_rest()
        self.receive()
        if handle is not None:
            self._ranks.wait(handle)
        if self._noise is not None:
            self._noise.receive(self.trailer.noise)
        self.has_gradient = [False] * len(self.parameters)
        return all_used

    def send_rest(self) -> None:
        """Send the buckets that were not sent; gradients that are missing are zero."""
        self._is_listening = False
        self._pack_rest()
        for number, bucket in enumerate(self.buckets):
            if not bucket.is_sent:
                self._send(number)

    def _pack_rest(self) -> None:
        """Pack the gradients that were not packed in the backward pass, and measure their buckets."""
        for bucket in self.buckets:
            if bucket.is_complete:
                continue
            for slot in bucket.slots:
                if not self._is_packed[slot.index]:
                    self._pack(bucket, slot)
            self._complete(bucket)

    def _complete(self, bucket: Bucket) -> None:
        """Record that a bucket contains all gradients of this rank, and measure them."""
        bucket.is_complete = True
        if self._noise is not None and self._noise.is_due:
            self._noise.add_gradients(bucket.parameters, bucket.packed, bucket.message.body)

    def _end_part(self) -> None:
        """Complete a part of the step, whose gradients this rank passes to collectives."""
        if self._noise is not None and self._noise.is_due:
            self._noise.end_part()

    def receive(self) -> None:
        """Wait for all collectives; the second round of a bucket overlaps the first rounds of others."""
        while self._in_flight:
            self._advance()
        self.sent_bytes += self.pass_bytes
        for bucket in self.buckets:
            bucket.is_sent = bucket.is_complete = False
            bucket.num_missing = len(bucket.slots)
        self._is_packed = [False] * len(self.parameters)

    def _make_hook(self, number: int, slot: Slot) -> Callable[[torch.Tensor], None]:
        bucket = self.buckets[number]
        # The bucket with the trailer is sent by ``finish``, after the trailer is written.
        has_trailer = number == len(self.buckets) - 1 and self._separate_trailer is None

        def on_gradient(_: torch.Tensor) -> None:
            if not self._is_listening or slot.parameter.grad is None:
                return  # a custom autograd function may return no gradient for a parameter
            self._refuse()
            if self._is_packed[slot.index]:
                raise gradient_reduced_already()
            self._pack(bucket, slot)
            bucket.num_missing -= 1
            if bucket.num_missing == 0:
                self._complete(bucket)
                if not has_trailer:
                    self._send(number)

        return on_gradient

    def _pack(self, bucket: Bucket, slot: Slot) -> None:
        """Copy a gradient, or zeros if it is None, into its bucket; set ``parameter.grad`` to None."""
        gradient, slot.parameter.grad = slot.parameter.grad, None
        bucket.message.allocate()
        if gradient is None:
            slot.packed.zero_()
            return
        self._is_packed[slot.index] = self.has_gradient[slot.index] = True
        gradient = aligned(slot.parameter, gradient)
        if gradient.is_sparse or to_local(gradient).data_ptr() != slot.packed.data_ptr():
            slot.packed.copy_(as_reals(gradient))

    def _send(self, number: int) -> None:
        bucket = self.buckets[number]
        bucket.is_sent = True
        exchange = bucket.message.exchange(self._ranks, f"{self._name}.{number}")
        self._in_flight.append((exchange, next(exchange)))
        self._limit_in_flight()

    def _advance(self) -> None:
        """Wait for the oldest collective in flight; start the next round of its message, if any."""
        exchange, handle = self._in_flight.popleft()
        try:
            following = exchange.send(self._ranks.wait(handle))
        except StopIteration:
            return
        self._in_flight.append((exchange, following))

    def _limit_in_flight(self) -> None:
        """Receive completed collectives; if too many buckets are in flight, wait for the oldest.

        Without a limit, buckets need as much memory as the model if the network is slower than the backward
        pass. The wait has a timeout, because ranks that send buckets in different orders would deadlock.
        There is no limit on a GPU, where neither the host nor the backward pass may block in a step.
        """
        if self._max_in_flight is None or self.parameters[0].is_cuda:
            return
        deadline_s = monotonic() + MAX_WAIT_S
        while self._in_flight:
            if self._ranks.is_done(self._in_flight[0][1]):
                self._advance()
                deadline_s = monotonic() + MAX_WAIT_S
            elif len(self._in_flight) <= self._max_in_flight:
                return
            elif monotonic() > deadline_s:
                self._max_in_flight *= 2
                deadline_s = monotonic() + MAX_WAIT_S
            else:
                sleep(POLL_S)


class ScatteredMessage(BucketExchange):
    """Gradients of a bucket; each rank receives its part of their sum, in at least 32 bits.

    Attributes:
        own: This rank's part of the sum over ranks, and over micro-batches since the last ``clear``.
        begin: Position of the part in the bucket; the last parts may extend beyond the end of the bucket.
        keeps_memory: ``body`` stays allocated between exchanges.
    """

    def __init__(self, layout: BucketLayout, ranks: TensorCollectives) -> None:
        length, dtype = sum(layout.lengths), wide_type(layout.dtype)
        part = -(-length // ranks.size)
        self.begin = ranks.rank * part
        self._whole = torch.zeros(part * ranks.size, dtype=dtype, device=layout.device)
        self.body = self._whole[:length]
        self.own = torch.zeros(part, dtype=dtype, device=layout.device)
        self.size_bytes = self._whole.untyped_storage().nbytes()
        self.keeps_memory = True
        self._is_clear = True

    def allocate(self) -> None:
        storage = self._whole.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.size_bytes)
            self._whole[self.body.numel() :].zero_()

    def release(self) -> None:
        """Free the memory of ``body``, unless ``keeps_memory``."""
        if not self.keeps_memory:
            self._whole.untyped_storage().resize_(0)

    def clear(self) -> None:
        """Make the next exchange overwrite ``own`` instead of adding to it."""
        self._is_clear = True

    def exchange(self, ranks: TensorCollectives, name: str) -> Rounds:
        """Sum ``body`` over ranks, and add this rank's part to ``own``."""
        into = self.own if self._is_clear else torch.empty_like(self.own)
        part = yield ranks.start_reduce_scatter(self._whole, into, name)
        if part is not self.own:
            self.own += part
        self._is_clear = False
        self.release()
