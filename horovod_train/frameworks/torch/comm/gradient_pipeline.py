"""The bucket pipeline: gradients fill buckets during the backward pass, and full buckets are summed.

    a parameter's gradient is complete -> the gradient is copied into its bucket
    the last gradient of a bucket      -> the bucket's collectives start (``BucketExchange``)
    after the backward pass            -> incomplete buckets are sent; the rank waits for all collectives

The layout of buckets depends only on the parameters, so the order of additions is fixed: results are
bitwise reproducible. A trailer is summed in each step, within the last bucket or separately:

    used      one flag per parameter: this rank has its gradient. The ``grad`` of a parameter that no rank
              uses remains None, as in a single process
    noise     sums of the parts of the step, for the gradient noise scale (``step/noise.py``), if enabled
    changed   flag: this rank's set of trained parameters has changed
    loss      this rank's part of the loss; the sum is the loss of the step
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic, sleep
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from horovod_train.frameworks.torch.codecs.base import Rounds
from horovod_train.frameworks.torch.comm.buckets import (
    Bucket,
    MakeMessage,
    Slot,
    aligned,
    as_reals,
    gradient_reduced_already,
    make_buckets,
    to_local,
)
from horovod_train.frameworks.torch.comm.collectives import TensorCollectives
from horovod_train.frameworks.torch.step.noise import NoiseMeter

MAX_WAIT_S = 1.0
POLL_S = 0.0003


class Trailer:
    """Numbers that ranks sum with the gradients of a step, stored in a flat tensor.

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

    Args:
        named: The trained parameters by name.
        ranks: The communicator.
        make: Creates a bucket's ``BucketExchange`` (codecs/base.py): its flat data and its collectives.
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
            elif len(self._in_flight) <= self._max_in_flight:
                return
            elif monotonic() > deadline_s:
                self._max_in_flight = None  # ranks complete buckets in different orders: disable the limit
                return
            else:
                sleep(POLL_S)
