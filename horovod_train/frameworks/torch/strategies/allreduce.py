"""All-reduce: gradients are summed over ranks while backward still runs, and all replicas are identical.

Gradients are packed into flat buckets in the order backward makes them. When the last gradient of
a bucket is there, the bucket leaves: one all-reduce, in place, no further copy. The layout follows from
what is trained alone, so the order of every addition is fixed too: results are the same bit for bit
from run to run, on any number of ranks.

Each micro-batch's loss is weighted by its share of the step's samples before backward, so the sum
over ranks is the mean over samples, also when ranks hold different numbers of them.

Three things ride along at the end of the last bucket, for free:

* one flag for each parameter, whether this rank has a gradient for it. A parameter that no rank
  used keeps ``grad = None``, as it would in a single process (an optimizer then leaves it alone);
* whether this rank trains other parameters than before. When any does, all ranks compare what they
  train, sum what is new in the same step, and lay out their buckets anew;
* the weighted loss, whose sum is the loss of the whole step on every rank.

A complex gradient travels as pairs of real numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from horovod_train.collectives.base import Communicator
from horovod_train.config.schema import Allreduce, Job
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.collectives import TensorCollectives, with_tensors
from horovod_train.frameworks.torch.strategies.base import Strategy
from horovod_train.frameworks.torch.trained import Named, Optimized, OptimizedParameters, check_same_trained

WIRE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


def allreduce(ranks: TensorCollectives, job: Job) -> Strategy:
    """Return the strategy ``allreduce``; its settings are the job's section of that name."""
    return summed_gradients(ranks, job.allreduce)


def summed_gradients(ranks: Communicator, section: Allreduce) -> Strategy:
    """Return what completes the gradients of a step in this world."""
    if ranks.size == 1:
        return SingleRankStrategy()
    return AllreduceStrategy(
        with_tensors(ranks),
        bucket_size_bytes=int(section.bucket_size_mib * 2**20),
        wire_dtype=WIRE_DTYPES[section.wire_dtype],
    )


class SingleRankStrategy(Strategy):
    """The gradients of a process alone: complete as they are."""

    def bind(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take up what is trained."""
        OptimizedParameters(model, optimizer).check()
        self._optimizer = optimizer

    def reduce(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Make sparse gradients dense, as they are on several ranks; return the loss."""
        for parameter in self._parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        return weighted_loss

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients there are."""
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for group in self._optimizer.param_groups for parameter in group["params"])


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
        gradients: The gradients in the parameters' type: the same memory when the types agree. Of
            complex parameters, pairs of real and imaginary part.
    """

    def __init__(
        self, members: Sequence[tuple[int, torch.nn.Parameter]], wire_dtype: torch.dtype, num_extra: int
    ) -> None:
        first = members[0][1]
        own_dtype = first.dtype.to_real()
        length = sum(map(_num_reals, (parameter for _, parameter in members)))
        self.packed = torch.zeros(length + num_extra, dtype=wire_dtype, device=first.device)
        self.extra = self.packed[length:]
        body = self.packed[:length]
        self.gradients = body if wire_dtype == own_dtype else torch.zeros_like(body, dtype=own_dtype)
        self._body = body
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
                shape = parameter.shape
                self.slots.append(
                    Slot(parameter, index, self.gradients[piece].view(shape), body[piece].view(shape))
                )
        self.num_missing = len(self.slots)
        self.handle: Any = None

    def unpack(self) -> None:
        """Bring the sum into the parameters' type."""
        if self.gradients is not self._body:
            self.gradients.copy_(self._body)


def _num_reals(parameter: torch.Tensor) -> int:
    return parameter.numel() * (2 if parameter.is_complex() else 1)


class AllreduceStrategy(Strategy):
    """Keeps the gradients of one replica equal to those of the whole step.

    Args:
        ranks: Those that share the samples of a step.
        bucket_size_bytes: About how much travels in one piece.
        wire_dtype: Type of 32-bit gradients on the way.
    """

    def __init__(
        self,
        ranks: TensorCollectives,
        *,
        bucket_size_bytes: int,
        wire_dtype: torch.dtype = torch.float32,
    ) -> None:
        self._ranks = ranks
        self._bucket_size_bytes = bucket_size_bytes
        self._wire_dtype = wire_dtype
        self._listening = False
        self._removers: list[Any] = []
        self._is_packed: list[bool] = []
        self._layout = -1

    def bind(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take up what is trained."""
        optimized = OptimizedParameters(model, optimizer)
        optimized.check()
        self.sum_gradients_of(optimized)

    def sum_gradients_of(self, optimized: Optimized) -> None:
        """Sum the gradients of what an optimizer has, and of that, what requires a gradient."""
        self._optimized = optimized
        self._lay_out(optimized.named())

    def expect_last(self) -> None:
        """The next backward is the last of this step: buckets leave as they fill."""
        self._listening = True

    def reduce(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Send what has not left yet, wait for all, and put the sums into ``parameter.grad``."""
        self._listening = False
        extra = self.buckets[-1].extra
        flags = extra[:-2]
        has_gradient = [
            packed or parameter.grad is not None
            for packed, parameter in zip(self._is_packed, self._trained, strict=True)
        ]
        all_used = all(has_gradient)
        flags[:] = 1.0 if all_used else torch.tensor(has_gradient).to(flags)
        extra[-2] = float(self._trains_others_than_before())
        extra[-1] = weighted_loss
        for number, bucket in enumerate(self.buckets):
            if bucket.handle is None:
                for slot in bucket.slots:
                    if not self._is_packed[slot.index]:
                        self._pack(slot)
                self._send(number)
        self._receive(None if all_used else flags)
        self._summed = [bucket.gradients for bucket in self.buckets]
        loss = extra[-1]
        if extra[-2] > 0:  # on any rank, and so on all
            self._take_up_changes()
        return loss

    def gradients(self) -> list[torch.Tensor]:
        """The summed gradients, a flat tensor per bucket; writing to them changes ``parameter.grad``."""
        return self._summed

    def close(self) -> None:
        """Let go of the parameters."""
        for remover in self._removers:
            remover.remove()
        self._removers = []

    # -- what is trained

    def _lay_out(self, named: Named) -> None:
        """Lay out buckets for what is trained now."""
        self.close()
        self._candidates = list(named.values())
        self._required = [parameter.requires_grad for parameter in self._candidates]
        self._trained = [parameter for parameter in self._candidates if parameter.requires_grad]
        if not self._trained:
            raise UserError("nothing is trained any more: no parameter requires a gradient")
        self._layout += 1
        self.buckets = make_buckets(self._trained, self._bucket_size_bytes, self._wire_dtype)
        self._summed = [bucket.gradients for bucket in self.buckets]
        self._is_packed = [False] * len(self._trained)
        self.bytes_per_step = sum(b.packed.numel() * b.packed.element_size() for b in self.buckets)
        self._removers = [
            slot.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._make_hook(bucket, slot)
            )
            for bucket in self.buckets
            for slot in bucket.slots
        ]

    def _trains_others_than_before(self) -> bool:
        return self._optimized.count() != len(self._candidates) or any(
            parameter.requires_grad != before
            for parameter, before in zip(self._candidates, self._required, strict=True)
        )

    def _take_up_changes(self) -> None:
        """Compare what ranks train from now on, sum the gradients of what is new, lay out buckets anew."""
        named, problem = self._named_now()
        trained = {name: p for name, p in named.items() if p.requires_grad}
        layout = [[name, list(p.shape), str(p.dtype)] for name, p in trained.items()]
        everyone = [
            json.loads(data) for data in self._ranks.allgather(json.dumps([problem, layout]).encode())
        ]
        check_same_trained(everyone)
        before = set(map(id, self._trained))
        new = [parameter for parameter in trained.values() if id(parameter) not in before]
        late = self._sum_late(new) if new else []
        summed = [*self._summed, *late]
        self._lay_out(named)
        self._summed = summed

    def _named_now(self) -> tuple[Named, str]:
        try:
            return self._optimized.named(), ""
        except UserError as error:
            return {}, str(error)

    def _sum_late(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
        """Sum gradients that are in no bucket yet, as the buckets to come will."""
        buckets = make_buckets(parameters, self._bucket_size_bytes, self._wire_dtype)
        flags = buckets[-1].extra[:-2]
        flags[:] = torch.tensor([p.grad is not None for p in parameters]).to(flags)
        for number, bucket in enumerate(buckets):
            for slot in bucket.slots:
                self._pack(slot)
            name = f"horovod_train.late.{self._layout}.{number}"
            bucket.handle = self._ranks.start_allreduce(bucket.packed, name)
        for bucket in buckets:
            self._ranks.wait(bucket.handle)
        is_used = (flags > 0).tolist()
        for bucket in buckets:
            bucket.unpack()
            for slot in bucket.slots:
                slot.parameter.grad = slot.gradient if is_used[slot.index] else None
        return [bucket.gradients for bucket in buckets]

    # -- one step

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
            # The last bucket waits for reduce(): it carries what is only known then.
            if bucket.num_missing == 0 and not is_last:
                self._send(number)

        return gradient_is_there

    def _pack(self, slot: Slot) -> None:
        gradient = slot.parameter.grad
        if gradient is None:
            slot.packed.zero_()
        elif gradient.is_sparse or gradient.data_ptr() != slot.packed.data_ptr():
            slot.packed.copy_(as_reals(gradient))

    def _send(self, number: int) -> None:
        bucket = self.buckets[number]
        # Sizes follow the layout, and Horovod knows a tensor by its name.
        bucket.handle = self._ranks.start_allreduce(
            bucket.packed, f"horovod_train.bucket.{self._layout}.{number}"
        )

    def _receive(self, flags: torch.Tensor | None) -> None:
        """Wait for every bucket. ``flags`` is read only by ranks that lack a gradient."""
        for bucket in self.buckets:
            self._ranks.wait(bucket.handle)
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


def as_reals(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient densely, complex numbers as pairs."""
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def make_buckets(
    parameters: Sequence[torch.nn.Parameter], bucket_size_bytes: int, wire_dtype: torch.dtype
) -> list[Bucket]:
    """Lay parameters out in buckets, last parameter first: about the order backward makes them.

    A bucket holds one type on one device. 64-bit gradients stay 64-bit on the wire, and the last
    bucket is never narrower than 32 bits: it carries the loss.
    """
    groups: list[list[tuple[int, torch.nn.Parameter]]] = []
    size_bytes = 0
    # After the flags of all: whether this rank has changed what it trains, and the loss.
    num_extra = len(parameters) + 2
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
        is_wide = group[0][1].dtype.to_real() == torch.float64
        dtype = torch.float64 if is_wide else torch.float32 if is_last else wire_dtype
        buckets.append(Bucket(group, dtype, num_extra if is_last else 0))
    return buckets


def _kind(parameter: torch.nn.Parameter) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device
