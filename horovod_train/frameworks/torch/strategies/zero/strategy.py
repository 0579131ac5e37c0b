"""ZeRO stages 1 and 2: each rank updates a part of the weights, with the gradients and state of that part.

    backward:  a bucket of gradients is full -> reduce-scatter: each rank gets the sum of its part
    update:    the optimizer's step for this rank's part of each bucket
    after it:  all-gather: each rank gets the updated weights of all parts

The two collectives send as many bytes as a ring all-reduce. Each of N ranks stores all weights, and 1/N of
the optimizer state and of the reduced gradients. For an elementwise optimizer (SGD, Adam, ...), the update is
bitwise equal to an unsharded one. An optimizer that needs whole weights (LARS, LAMB) is refused.

The memory of a bucket is allocated only while its gradients are in flight. Stage 1 accumulates micro-batches
in unsharded gradients; stage 2 reduce-scatters after each micro-batch, and accumulates in the rank's part.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv:1910.02054.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from horovod_train.checkpoint.arrays import Part
from horovod_train.collectives.base import Mesh
from horovod_train.config.schema import Job
from horovod_train.data.shard import PlannedStep
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.codecs import BucketLayout
from horovod_train.frameworks.torch.comm.buckets import Bucket, GradientPipeline, ScatteredMessage, Slot
from horovod_train.frameworks.torch.comm.collectives import tensor_communicator
from horovod_train.frameworks.torch.state.local import LocalTensor, OptimizedParameter, OptimizedParameters
from horovod_train.frameworks.torch.state.optimizer import check_elementwise, move_state
from horovod_train.frameworks.torch.step.deferred import NoiseMeter
from horovod_train.frameworks.torch.strategies.base import Capabilities, Strategy, total_norm
from horovod_train.frameworks.torch.verify.verification import refuse_hooks_of_parameters

MAX_IN_FLIGHT = 3
"""Maximum number of buckets in flight; without a limit, they would need the memory of the whole gradient."""
KEPT_BYTES = 64 * 2**20
"""If all buckets together are at most this large, they remain allocated, which avoids page faults."""


@dataclass(frozen=True)
class Piece:
    """This rank's part of a parameter.

    Attributes:
        slot: The parameter.
        weight: The part, flat, as the optimizer's parameter: a view of the parameter's memory.
        start: Position of the part in the flat parameter.
        gradient: Its gradient, a view of this rank's part of the bucket.
    """

    slot: Slot
    weight: torch.nn.Parameter
    start: int
    gradient: torch.Tensor


class Zero(Strategy):
    """Strategy that reduce-scatters gradients, updates this rank's part of the weights, and all-gathers them.

    The job's ``allreduce`` section defines the bucket size.
    """

    capabilities = Capabilities(sharded=True, sums_gradients=True)
    measures_local_gradients = True

    def __init__(self, mesh: Mesh, job: Job, *, stage: int = 2) -> None:
        self._ranks = tensor_communicator(mesh.data)
        self._bucket_size_bytes = int(job.allreduce.bucket_size_mib * 2**20)
        self._sends_each = stage == 2
        self._pipeline: GradientPipeline | None = None

    def bind(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Attach to a model and its optimizer; the optimizer then contains this rank's parts.

        Raises:
            UserError: The optimizer, or a parameter, cannot be sharded.
        """
        super().bind(model, optimizer)
        check_elementwise(optimizer, "zero")
        refuse_hooks_of_parameters(model, "zero")
        self._numbering = [parameter.name for parameter in super().optimized()]
        self._candidates = OptimizedParameters(model, optimizer).named()
        self._required = {name: p.requires_grad for name, p in self._candidates.items()}
        trained = {name: p for name, p in self._candidates.items() if p.requires_grad}
        for name, parameter in trained.items():
            if parameter.is_complex():
                raise UserError(f"strategy zero cannot split {name!r}: it is complex", hint="use allreduce")
            parameter.data = parameter.data.contiguous()
        self._names = list(trained)
        self._memory = [parameter.data for parameter in trained.values()]
        self._make_pipeline(trained)
        self._shard_optimizer(optimizer)

    def _make_pipeline(self, trained: dict[str, torch.nn.Parameter]) -> None:
        self._messages: list[ScatteredMessage] = []

        def message(layout: BucketLayout) -> ScatteredMessage:
            self._messages.append(ScatteredMessage(layout, self._ranks))
            return self._messages[-1]

        self._pipeline = pipeline = GradientPipeline(
            trained,
            self._ranks,
            message,
            bucket_size_bytes=self._bucket_size_bytes,
            name="horovod_train.zero",
            refuse=self.refuse_in_loss,
            noise=self.noise,
            max_in_flight=MAX_IN_FLIGHT,
        )
        keeps_memory = pipeline.pass_bytes <= KEPT_BYTES
        for each in self._messages:
            each.keeps_memory = keeps_memory
            each.release()
        parts = list(zip(pipeline.buckets, self._messages, strict=True))
        self._pieces = [pieces_of(bucket, each) for bucket, each in parts]
        self._of_others = [weights_of_others(bucket, each) for bucket, each in parts]
        self._bytes_gathered = sum(
            len(each.own) * bucket.slots[0].parameter.element_size() for bucket, each in parts
        )
        pipeline.attach()

    def _shard_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the optimizer's parameters by this rank's parts."""
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
        if self._pipeline is not None:
            self._pipeline.close()

    def optimized(self) -> Sequence[OptimizedParameter]:
        """Return this rank's parts of the optimizer's parameters, in its order."""
        weights = [weight for group in self._optimizer.param_groups for weight in group["params"]]
        return [self._as_optimized(self._by_weight[id(weight)]) for weight in weights]

    def _as_optimized(self, piece: Piece) -> OptimizedParameter:
        whole = tuple(piece.slot.parameter.shape)
        return OptimizedParameter(
            self._names[piece.slot.index], LocalTensor(piece.weight, Part(whole, (piece.start,)))
        )

    # -- one step

    @property
    def pipeline(self) -> GradientPipeline:
        """The buckets of the trained parameters."""
        assert self._pipeline is not None
        return self._pipeline

    def begin(self, step: PlannedStep) -> None:
        """Begin a step, and discard the gradients of the last step."""
        self.pipeline.begin()
        for message in self._messages:
            message.clear()

    def prepare_backward(self, *, is_last: bool) -> None:
        """Reduce-scatter buckets in the next backward pass if it is the last, or with stage 2."""
        if is_last or self._sends_each:
            self.pipeline.listen()

    def reduce(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Wait for the reduce-scatters, set ``grad`` of this rank's parts, and return the loss."""
        self._restore_replaced_memory()
        trailer = self.pipeline.trailer
        is_changed = self._trainable_set_changed()
        all_used = self.pipeline.finish(weighted_loss, is_changed=is_changed)
        self.sent_bytes = self.pipeline.sent_bytes
        if is_changed or (not self._defers_results and bool(trailer.changed > 0)):
            raise UserError(
                "strategy zero: the set of trained parameters has changed, and zero shards its state once",
                hint="freeze parameters before training begins, or use strategy: allreduce",
            )
        # Only a rank that lacks a gradient reads the flags from the device; others use every parameter.
        is_used = [True] * len(self._names) if all_used else (trailer.used > 0).tolist()
        for piece in self._by_weight.values():
            found = piece.gradient.to(piece.weight.dtype)
            piece.weight.grad = found if is_used[piece.slot.index] else None
        return trailer.loss

    @torch.no_grad()
    def _restore_replaced_memory(self) -> None:
        """If the task has replaced a weight's ``data``, copy it to the memory that this strategy updates.

        Raises:
            UserError: The replacement has another shape or data type.
        """
        for name, parameter, memory in zip(self._names, self.pipeline.parameters, self._memory, strict=True):
            if parameter.data_ptr() == memory.data_ptr():
                continue
            if (parameter.shape, parameter.dtype) != (memory.shape, memory.dtype):
                raise UserError(
                    f"strategy zero: the data of {name!r} were replaced by a tensor of another shape or type",
                    hint="change weights in place (parameter.data.copy_(...)), or use strategy: allreduce",
                )
            memory.copy_(parameter.data)
            parameter.data = memory

    def _trainable_set_changed(self) -> bool:
        count = sum(len(group["params"]) for group in self._optimizer.param_groups)
        return count != len(self._by_weight) or any(
            parameter.requires_grad != self._required[name] for name, parameter in self._candidates.items()
        )

    def gradients(self) -> list[torch.Tensor]:
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
        """Return the L2 norm of the whole gradient: the squares of all parts are summed over ranks."""
        own: torch.Tensor = total_norm([message.own for message in self._messages])
        squares = own.double().square().reshape(1)
        return self._ranks.wait(self._ranks.start_allreduce(squares, "horovod_train.zero.norm")).sqrt()[0]

    def squares_by_group(self, noise: NoiseMeter) -> torch.Tensor:
        """Return the squared norm of the whole gradient by parameter group; sums over ranks."""
        squares = noise.squares_by_group()
        return self._ranks.wait(self._ranks.start_allreduce(squares, "horovod_train.zero.noise"))

    @torch.no_grad()
    def after_update(self, *, is_used: torch.Tensor | bool) -> None:
        """All-gather the updated weights, unless the step is known on the host to be skipped."""
        if is_used is False:
            return
        self.sent_bytes += self._bytes_gathered
        self.gather_weights()

    @torch.no_grad()
    def gather_weights(self) -> None:
        in_flight: deque[tuple[int, object]] = deque()  # in the same order on all ranks
        for number in range(len(self._messages)):
            name = f"horovod_train.zero.weights.{number}"
            in_flight.append((number, self._ranks.start_allgather(self._own_weights(number), name)))
            if len(in_flight) > MAX_IN_FLIGHT:
                self._copy_gathered(*in_flight.popleft())
        for number, handle in in_flight:
            self._copy_gathered(number, handle)

    def _copy_gathered(self, number: int, handle: object) -> None:
        """Copy the weights of a bucket that other ranks have updated."""
        gathered = self._ranks.wait(handle)
        if weights := self._of_others[number]:  # one rank may have all of a small bucket
            torch._foreach_copy_([weight for weight, _ in weights], [gathered[piece] for _, piece in weights])

    def _own_weights(self, number: int) -> torch.Tensor:
        """Return this rank's part of a bucket's weights, flat, padded to the length of a part."""
        dtype = self.pipeline.buckets[number].slots[0].parameter.dtype
        own = torch.empty_like(self._messages[number].own, dtype=dtype)
        weights = [piece.weight.data for piece in self._pieces[number]]
        length = sum(map(len, weights))
        if weights:
            torch.cat(weights, out=own[:length])
        own[length:] = 0
        return own


def pieces_of(bucket: Bucket, message: ScatteredMessage) -> list[Piece]:
    """Return this rank's parts of a bucket's parameters, in their order."""
    begin, end = message.begin, message.begin + len(message.own)
    pieces = []
    for slot, at, piece in bucket.slots_between(begin, end):
        weight = torch.nn.Parameter(slot.parameter.data.view(-1)[piece])
        gradient = message.own[at + piece.start - begin : at + piece.stop - begin]
        pieces.append(Piece(slot, weight, piece.start, gradient))
    return pieces


def weights_of_others(bucket: Bucket, message: ScatteredMessage) -> list[tuple[torch.Tensor, slice]]:
    """Return flat views of the weights that other ranks update, and their positions in the bucket."""
    before = bucket.slots_between(0, message.begin)
    after = bucket.slots_between(message.begin + len(message.own), message.body.numel())
    return [
        (slot.parameter.data.view(-1)[piece], slice(at + piece.start, at + piece.stop))
        for slot, at, piece in (*before, *after)
    ]
