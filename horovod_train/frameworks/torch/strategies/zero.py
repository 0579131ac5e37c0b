"""ZeRO: each rank updates a part of the weights, and has gradients and optimizer state of that part alone.

    backward:  a bucket of gradients is full -> reduce-scatter: each rank gets the sum of its part
    update:    the optimizer's step, on this rank's part of each bucket
    then:      all-gather: each rank gets the weights of all parts

Both together move what a ring all-reduce moves, which is made of these two. Replicas hold all weights; of
N ranks each holds an N-th of the optimizer's state, and between steps of the gradients. Whatever updates
each number by itself (SGD, Adam, ...) makes the update that it would make of the whole, bit for bit; an
optimizer that looks at a whole weight (LARS, LAMB) cannot be split, and is refused.

A bucket's memory is there while its gradients are on their way. Micro-batches add up in whole gradients
(stage 1), or each is sent, and they add up in the rank's part (stage 2).

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, sleep

import torch
from torch.utils.hooks import RemovableHandle

from horovod_train.checkpoint.arrays import Part
from horovod_train.collectives.mesh import Mesh
from horovod_train.config.schema import Job
from horovod_train.data.planned_step import PlannedStep
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.comm.buckets import (
    Bucket,
    Slot,
    as_reals,
    gradient_reduced_already,
    make_buckets,
)
from horovod_train.frameworks.torch.comm.collectives import with_tensors
from horovod_train.frameworks.torch.comm.scattered import Scattered, ScatteredMessage
from horovod_train.frameworks.torch.state.elementwise import check_elementwise, move_state
from horovod_train.frameworks.torch.state.local_tensors import LocalTensor, OptimizedParameter
from horovod_train.frameworks.torch.state.trained import OptimizedParameters
from horovod_train.frameworks.torch.step.norm import total_norm
from horovod_train.frameworks.torch.strategies.base import Strategy

MAX_IN_FLIGHT = 3
"""So many buckets may be under way before a rank waits for the first of them."""
PATIENCE_S = 1.0
"""For so long; and after that not again."""
POLL_S = 0.0003
KEPT_BYTES = 64 * 2**20
"""Buckets of a model that has no more keep their memory: fresh pages take as long as what is sent."""


@dataclass(frozen=True)
class Piece:
    """What this rank updates of a parameter.

    Attributes:
        slot: The parameter.
        weight: What the optimizer updates, flat: the same memory as the parameter's.
        start: Where it begins in the flat parameter.
        gradient: Its gradient, in this rank's part of the bucket.
    """

    slot: Slot
    weight: torch.nn.Parameter
    start: int
    gradient: torch.Tensor


class Zero(Strategy):
    """Reduce-scatters gradients, updates this rank's part of the weights, and gathers all of them.

    Args:
        mesh: Of the ranks.
        job: Says how large buckets are.
        stage: 1: micro-batches add up in whole gradients; 2: in this rank's part.
    """

    is_sharded = True

    def __init__(self, mesh: Mesh, job: Job, *, stage: int = 2) -> None:
        self._ranks = with_tensors(mesh.data)
        self._bucket_size_bytes = int(job.allreduce.bucket_size_mib * 2**20)
        self._sends_each = stage == 2
        self._listening = False
        self._removers: list[RemovableHandle] = []

    def bind(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Attach to a model and its optimizer; the optimizer then contains this rank's shards.

        Raises:
            UserError: The optimizer, or a parameter, cannot be split.
        """
        super().bind(model, optimizer)
        check_elementwise(optimizer, "zero")
        self._numbering = [parameter.name for parameter in super().optimized()]
        self._candidates = OptimizedParameters(model, optimizer).named()
        self._required = {name: p.requires_grad for name, p in self._candidates.items()}
        trained = {name: p for name, p in self._candidates.items() if p.requires_grad}
        for name, parameter in trained.items():
            if parameter.is_complex():
                raise UserError(f"strategy zero cannot split {name!r}: it is complex", hint="use allreduce")
            parameter.data = parameter.data.contiguous()
        self._names, self._trained = list(trained), list(trained.values())
        self._memory = [parameter.data for parameter in self._trained]
        self._buckets = make_buckets(self._trained, self._bucket_size_bytes, Scattered(self._ranks))
        self._messages = [_message(bucket) for bucket in self._buckets]
        keep_memory = sum(message.size_bytes for message in self._messages) <= KEPT_BYTES
        for message in self._messages:
            message.keeps_memory = keep_memory
            message.give_back()
        self._pieces = [_pieces_of(bucket) for bucket in self._buckets]
        self._of_others = [_of_others(bucket) for bucket in self._buckets]
        self._in_flight: deque[int] = deque()  # numbers of buckets
        self._is_patient = True
        # Which ones have a gradient anywhere, whether any rank trains others than before, and the loss.
        wide = torch.float64 if any(p.dtype == torch.float64 for p in self._trained) else torch.float32
        self._tail = torch.zeros(len(self._trained) + 2, dtype=wide, device=self._trained[0].device)
        self._has_gradient = [False] * len(self._trained)
        self._is_packed = [False] * len(self._trained)
        self._shard_optimizer(optimizer)
        self._removers = [
            slot.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._make_hook(number, slot)
            )
            for number, bucket in enumerate(self._buckets)
            for slot in bucket.slots
        ]
        sizes = [
            len(message.own) * bucket.slots[0].parameter.element_size()
            for message, bucket in zip(self._messages, self._buckets, strict=True)
        ]
        self._bytes_once = sum(message.size_bytes for message in self._messages)
        self._bytes_gathered = sum(sizes)

    def _shard_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer this rank's pieces in place of parameters."""
        pieces = [piece for of_bucket in self._pieces for piece in of_bucket]
        of_parameter: dict[int, list[torch.nn.Parameter]] = {}
        for piece in pieces:
            of_parameter.setdefault(id(piece.slot.parameter), []).append(piece.weight)
            move_state(optimizer, piece.slot.parameter, piece.weight, piece.start)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state.pop(parameter, None)
            group["params"] = [weight for p in group["params"] for weight in of_parameter.get(id(p), [])]
        self._by_weight = {id(piece.weight): piece for piece in pieces}

    def close(self) -> None:
        """Let go of the parameters."""
        for remover in self._removers:
            remover.remove()
        self._removers = []

    def optimized(self) -> Sequence[OptimizedParameter]:
        """Return the optimizer's parameters, in its order: pieces of those of the model."""
        weights = [weight for group in self._optimizer.param_groups for weight in group["params"]]
        return [self._as_optimized(self._by_weight[id(weight)]) for weight in weights]

    def numbering(self) -> Sequence[str | int]:
        """Return the names of parameters as an optimizer of the whole model numbers them."""
        return self._numbering

    def _as_optimized(self, piece: Piece) -> OptimizedParameter:
        whole = tuple(piece.slot.parameter.shape)
        return OptimizedParameter(
            self._names[piece.slot.index], LocalTensor(piece.weight, Part(whole, (piece.start,)))
        )

    # -- one step

    @torch.no_grad()
    def _follow_swapped(self) -> None:
        """Bring weights that the task has put into other memory back to where this strategy updates them.

        Raises:
            UserError: They have another shape or type there.
        """
        for name, parameter, memory in zip(self._names, self._trained, self._memory, strict=True):
            if parameter.data_ptr() == memory.data_ptr():
                continue
            if (parameter.shape, parameter.dtype) != (memory.shape, memory.dtype):
                raise UserError(
                    f"strategy zero: the data of {name!r} were replaced by a tensor of another shape or type",
                    hint="change weights in place (parameter.data.copy_(...)), or use strategy: allreduce",
                )
            memory.copy_(parameter.data)
            parameter.data = memory

    def begin(self, step: PlannedStep) -> None:
        """Nothing was received yet."""
        self._listening = False
        self._in_flight.clear()
        self.bytes_per_step = 0
        self._has_gradient = [False] * len(self._trained)
        for message in self._messages:
            message.clear()

    def expect_more(self) -> None:
        """A micro-batch begins that is not the last: with stage 2, its gradients are sent as well."""
        if self._sends_each:
            self._complete()
            self._listening = True

    def expect_last(self) -> None:
        """The last micro-batch begins."""
        self._complete()
        self._listening = True

    def _make_hook(self, number: int, slot: Slot) -> Callable[[torch.Tensor], None]:
        def on_gradient(_: torch.Tensor) -> None:
            if not self._listening:
                return
            self.refuse_in_loss()
            if self._is_packed[slot.index]:
                raise gradient_reduced_already()
            self._pack(number, slot)
            if self._buckets[number].num_missing == 0:
                self._send(number)

        return on_gradient

    def _pack(self, number: int, slot: Slot) -> None:
        """Put a gradient, or zeros where there is none, into its bucket."""
        gradient, slot.parameter.grad = slot.parameter.grad, None
        self._messages[number].open()
        if gradient is None:
            slot.packed.zero_()
        else:
            slot.packed.copy_(as_reals(gradient))
            self._has_gradient[slot.index] = True
        self._is_packed[slot.index] = True
        self._buckets[number].num_missing -= 1

    def _send(self, number: int) -> None:
        self._buckets[number].is_sent = True
        self._messages[number].send(self._ranks, f"horovod_train.zero.gradients.{number}")
        self._in_flight.append(number)
        self._make_room()

    def _make_room(self) -> None:
        """Take in what has arrived; where much is under way, wait for the first of it.

        Gradients would be as large as the model otherwise, where the network is slower than backward. Not for
        long: ranks whose gradients come in different orders would wait for each other. And not on a GPU,
        where neither the host nor backward is to wait in a step.
        """
        if self._tail.is_cuda:
            return
        deadline_s = monotonic() + PATIENCE_S
        while self._in_flight:
            first = self._messages[self._in_flight[0]]
            if first.has_arrived(self._ranks):
                first.receive(self._ranks)
                self._in_flight.popleft()
            elif len(self._in_flight) <= MAX_IN_FLIGHT or not self._is_patient:
                return
            elif monotonic() > deadline_s:
                self._is_patient = False
            else:
                sleep(POLL_S)

    def _send_rest(self) -> None:
        self._listening = False
        for number, bucket in enumerate(self._buckets):
            for slot in bucket.slots if not bucket.is_sent else ():
                if not self._is_packed[slot.index]:
                    self._pack(number, slot)
            if not bucket.is_sent:
                self._send(number)

    def _complete(self) -> None:
        """Send what is left of the micro-batch before, if there was one, and receive this rank's parts."""
        if self._listening:
            self._send_rest()
            self._receive()

    def _receive(self) -> None:
        self.bytes_per_step += self._bytes_once
        while self._in_flight:
            self._messages[self._in_flight.popleft()].receive(self._ranks)
        for bucket in self._buckets:
            bucket.is_sent = False
            bucket.num_missing = len(bucket.slots)
        self._is_packed = [False] * len(self._trained)

    def reduce(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Receive this rank's parts of the sums, as gradients of its pieces."""
        self._follow_swapped()
        self._send_rest()
        is_changed = self._trains_others_than_before()
        all_used = all(self._has_gradient)
        if all_used:
            self._tail[:-2] = 1.0
        else:
            flags = torch.tensor(self._has_gradient, dtype=self._tail.dtype, pin_memory=self._tail.is_cuda)
            self._tail[:-2].copy_(flags, non_blocking=True)
        self._tail[-2] = float(is_changed)
        self._tail[-1] = weighted_loss
        handle = self._ranks.start_allreduce(self._tail, "horovod_train.zero.tail")
        self._receive()
        self._ranks.wait(handle)
        if is_changed or (not self.defers_results and bool(self._tail[-2] > 0)):
            raise UserError(
                "what is trained has changed: strategy zero splits it once",
                hint="freeze parameters before training begins, or use strategy: allreduce",
            )
        # Only a rank that lacks a gradient has to ask; the others know that it is used.
        is_used = [True] * len(self._trained) if all_used else (self._tail[:-2] > 0).tolist()
        for piece in self._by_weight.values():
            found = piece.gradient.to(piece.weight.dtype)
            piece.weight.grad = found if is_used[piece.slot.index] else None
        return self._tail[-1]

    def _trains_others_than_before(self) -> bool:
        count = sum(len(group["params"]) for group in self._optimizer.param_groups)
        return count != len(self._by_weight) or any(
            parameter.requires_grad != self._required[name] for name, parameter in self._candidates.items()
        )

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of this rank's pieces."""
        if all(
            message.own.dtype == piece.weight.dtype
            for message, pieces in zip(self._messages, self._pieces, strict=True)
            for piece in pieces
        ):
            return [message.own for message in self._messages]  # the same memory, in fewer tensors
        return [
            w.grad for group in self._optimizer.param_groups for w in group["params"] if w.grad is not None
        ]

    def norm(self) -> torch.Tensor:
        """Return the L2 norm of the whole gradient: ranks add up the squares of their parts."""
        own: torch.Tensor = total_norm([message.own for message in self._messages])
        squares = own.double().square().reshape(1)
        return self._ranks.wait(self._ranks.start_allreduce(squares, "horovod_train.zero.norm")).sqrt()[0]

    @torch.no_grad()
    def after_update(self, *, is_used: torch.Tensor | bool) -> None:
        """Gather the weights that each rank has updated."""
        if is_used is False:
            return
        self.bytes_per_step += self._bytes_gathered
        self.gather_weights()

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Gather the weights of which each rank has a part."""
        coming: deque[tuple[int, object]] = deque()  # in the same order on all ranks
        for number in range(len(self._buckets)):
            name = f"horovod_train.zero.weights.{number}"
            coming.append((number, self._ranks.start_allgather(self._own_weights(number), name)))
            if len(coming) > MAX_IN_FLIGHT:
                self._copy_gathered(*coming.popleft())
        for number, handle in coming:
            self._copy_gathered(number, handle)

    def _copy_gathered(self, number: int, handle: object) -> None:
        """Take over the weights of a bucket that other ranks have updated."""
        gathered = self._ranks.wait(handle)
        if weights := self._of_others[number]:  # of a small bucket, one rank may have all
            torch._foreach_copy_([weight for weight, _ in weights], [gathered[piece] for _, piece in weights])

    def _own_weights(self, number: int) -> torch.Tensor:
        """Return this rank's part of a bucket's weights, flat, as long as those of other ranks."""
        dtype = self._buckets[number].slots[0].parameter.dtype
        own = torch.empty_like(self._messages[number].own, dtype=dtype)
        weights = [piece.weight.data for piece in self._pieces[number]]
        length = sum(map(len, weights))
        if weights:
            torch.cat(weights, out=own[:length])
        own[length:] = 0
        return own


def _message(bucket: Bucket) -> ScatteredMessage:
    assert isinstance(bucket.message, ScatteredMessage)
    return bucket.message


def _pieces_of(bucket: Bucket) -> list[Piece]:
    """Return what this rank updates of a bucket's parameters, in their order."""
    message = _message(bucket)
    begin, end = message.begin, message.begin + len(message.own)
    pieces = []
    for slot, at, piece in bucket.slots_between(begin, end):
        weight = torch.nn.Parameter(slot.parameter.data.view(-1)[piece])
        gradient = message.own[at + piece.start - begin : at + piece.stop - begin]
        pieces.append(Piece(slot, weight, piece.start, gradient))
    return pieces


def _of_others(bucket: Bucket) -> list[tuple[torch.Tensor, slice]]:
    """Return what others update of a bucket's parameters, flat, and where it is in the bucket."""
    message = _message(bucket)
    before = bucket.slots_between(0, message.begin)
    after = bucket.slots_between(message.begin + len(message.own), message.body.numel())
    return [
        (slot.parameter.data.view(-1)[piece], slice(at + piece.start, at + piece.stop))
        for slot, at, piece in (*before, *after)
    ]
