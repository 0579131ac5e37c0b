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
  train, sum what is new in the same step, and rebuild the buckets;
* the weighted loss, whose sum is the loss of the whole step on every rank.

A complex gradient travels as pairs of real numbers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from horovod_train.collectives.base import Communicator
from horovod_train.collectives.mesh import Mesh
from horovod_train.config.schema import Allreduce, Job
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.codecs.base import Codec, make_codec
from horovod_train.frameworks.torch.codecs.residuals import ResidualStore
from horovod_train.frameworks.torch.comm.buckets import (
    Bucket,
    Slot,
    aligned,
    as_reals,
    gradient_reduced_already,
    make_buckets,
    to_local,
)
from horovod_train.frameworks.torch.comm.collectives import TensorCollectives, with_tensors
from horovod_train.frameworks.torch.state.trained import (
    Named,
    OptimizedParameters,
    TrainedParameters,
    check_same_trained,
)
from horovod_train.frameworks.torch.strategies.base import Strategy

log = logging.getLogger(__name__)


def allreduce(mesh: Mesh, job: Job) -> Strategy:
    """Return the strategy ``allreduce``; its settings are the job's section of that name.

    Raises:
        UserError: The codec cannot be made, or the job cannot be trained with it.
    """
    strategy = summed_gradients(mesh.data, job.allreduce)
    if job.train.precision == "fp16" and job.allreduce.codec is not None:
        raise UserError(
            f"codec {job.allreduce.codec.name!r} is not supported with train.precision: fp16: its residual "
            "would have another loss scale when it is sent",
            hint="use bf16 or fp32",
        )
    return strategy


def summed_gradients(ranks: Communicator, section: Allreduce, name: str = "bucket") -> Strategy:
    """Return what completes the gradients of a step in this world.

    Args:
        ranks: Those that share the samples of a step.
        section: How gradients travel.
        name: Horovod knows the buckets by it.

    Raises:
        UserError: The codec cannot be made.
    """
    codec = make_codec(section)
    if ranks.size == 1 and not codec.has_residual:
        return SingleRankStrategy()
    size_bytes = int(section.bucket_size_mib * 2**20)
    return AllreduceStrategy(with_tensors(ranks), codec=codec, bucket_size_bytes=size_bytes, name=name)


class SingleRankStrategy(Strategy):
    """Gradients of a single process need no communication."""

    def reduce(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Convert sparse gradients to dense ones, as on several ranks; return the loss."""
        for parameter in self._parameters():
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
            parameter.grad = aligned(parameter, parameter.grad)
        return weighted_loss

    def used_in_last_pass(self) -> list[torch.nn.Parameter]:
        """Return the parameters that have a gradient."""
        return [parameter for parameter in self._parameters() if parameter.grad is not None]

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients there are."""
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for group in self._optimizer.param_groups for parameter in group["params"])


class AllreduceStrategy(Strategy):
    """Keeps the gradients of one replica equal to those of the whole step.

    Args:
        ranks: Those that share the samples of a step.
        codec: How gradients travel.
        bucket_size_bytes: About how much is one message.
        name: Horovod knows the buckets by it.
    """

    def __init__(
        self, ranks: TensorCollectives, *, codec: Codec, bucket_size_bytes: int, name: str = "bucket"
    ) -> None:
        self._ranks = ranks
        self._name = name
        self._codec = codec
        self.state_kind = type(codec).__name__
        self._bucket_size_bytes = bucket_size_bytes
        self.buckets: list[Bucket] = []
        self._residuals = ResidualStore()
        self._listening = False
        self._removers: list[RemovableHandle] = []
        self._is_packed: list[bool] = []
        self.layout_version = -1
        self._has_reported = False

    def bind(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Attach to a model and its optimizer."""
        super().bind(model, optimizer)
        self.sum_gradients_of(OptimizedParameters(model, optimizer))

    def sum_gradients_of(self, optimized: TrainedParameters) -> None:
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
        is_changed = self._trains_others_than_before()
        if is_changed:
            not_sent = self._not_sent(self.buckets)
            self._residuals.store_residual(
                {n: p for n, p in not_sent.items() if not self._named[n].requires_grad}
            )
        has_residual = self._codec.has_residual  # of what is not used now, something may have been kept
        has_gradient = [
            packed or parameter.grad is not None or (has_residual and parameter.requires_grad)
            for packed, parameter in zip(self._is_packed, self._trained, strict=True)
        ]
        all_used = all(has_gradient)
        self._append_trailer(extra, None if all_used else has_gradient, weighted_loss, is_changed=is_changed)
        for number, bucket in enumerate(self.buckets):
            if not bucket.is_sent:
                for slot in bucket.slots:
                    if not self._is_packed[slot.index]:
                        self._pack(slot)
                self._send(number)
        self._receive(None if all_used else flags)
        self._summed = [bucket.gradients for bucket in self.buckets]
        if self._has_changed_anywhere(extra[-2], is_changed=is_changed):
            self._rebuild_buckets()
        return extra[-1]

    def _append_trailer(
        self, extra: torch.Tensor, has_gradient: list[bool] | None, loss: torch.Tensor, *, is_changed: bool
    ) -> None:
        """Write what travels behind the gradients; has_gradient: None: all have."""
        if has_gradient is None:
            extra[:-2] = 1.0
        else:
            flags = torch.tensor(has_gradient, dtype=extra.dtype, pin_memory=extra.is_cuda)
            extra[:-2].copy_(flags, non_blocking=True)
        extra[-2] = float(is_changed)
        extra[-1] = loss

    def _has_changed_anywhere(self, num_changed: torch.Tensor, *, is_changed: bool) -> bool:
        """Return whether any rank trains other parameters than before.

        On a device a rank that has not changed does not wait for the answer: ranks change in the same step,
        or have gone wrong. One that has changed, which is rare, waits, sees whether the others have, and
        ends training if not.

        Raises:
            UserError: This rank has changed, and others have not.
        """
        if not self.defers_results:
            return bool(num_changed > 0)
        if not is_changed:
            return False
        if num_changed == self._ranks.size:
            return True
        raise UserError(
            "which parameters are trained has changed here, and not on other ranks",
            hint="freeze and unfreeze parameters on all ranks in the same step",
        )

    def gradients(self) -> list[torch.Tensor]:
        """The summed gradients, a flat tensor per bucket; writing to them changes ``parameter.grad``."""
        return self._summed

    def after_update(self, *, is_used: torch.Tensor | bool) -> None:
        """Let messages remember what they have kept back, if the step was used."""
        for bucket in self.buckets:
            bucket.message.commit(is_used=is_used)

    def state(self) -> dict[str, torch.Tensor]:
        """Return what this rank has not sent yet of each gradient, flat, by the names of parameters."""
        return self._residuals.state(self._not_sent(self.buckets))

    def load_state(self, of_ranks: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Take over what ranks had not sent yet."""
        if not self._codec.has_residual:
            super().load_state(of_ranks)
            return
        self._residuals.store_residual(self._not_sent(self.buckets))  # of steps that are taken back
        self._residuals.load_state(of_ranks, self._ranks.rank, self._ranks.size)
        self._residuals.restore_residual(self._not_sent(self.buckets))

    def _not_sent(self, buckets: Sequence[Bucket]) -> dict[str, torch.Tensor]:
        names = {id(parameter): name for name, parameter in self._named.items()}
        pieces = (found for bucket in buckets for found in bucket.memory())
        return {names[id(parameter)]: piece for parameter, piece in pieces if id(parameter) in names}

    def close(self) -> None:
        """Let go of the parameters."""
        for remover in self._removers:
            remover.remove()
        self._removers = []

    # -- what is trained

    def _lay_out(self, named: Named) -> None:
        """Lay out buckets for what is trained now."""
        self.close()
        self._named = named
        self._candidates = list(named.values())
        self._required = [parameter.requires_grad for parameter in self._candidates]
        self._trained = [parameter for parameter in self._candidates if parameter.requires_grad]
        if not self._trained:
            raise UserError("nothing is trained any more: no parameter requires a gradient")
        self.layout_version += 1
        self.buckets = make_buckets(self._trained, self._bucket_size_bytes, self._codec)
        self._residuals.restore_residual(self._not_sent(self.buckets))
        self._summed = [bucket.gradients for bucket in self.buckets]
        self._is_packed = [False] * len(self._trained)
        self.bytes_per_step = sum(bucket.message.size_bytes for bucket in self.buckets)
        self._removers = [
            slot.parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._make_hook(bucket, slot)
            )
            for bucket in self.buckets
            for slot in bucket.slots
        ]

    def used_in_last_pass(self) -> list[torch.nn.Parameter]:
        """Return the parameters with a gradient of this step's last backward pass, before ``reduce``."""
        return [p for p, used in zip(self._trained, self._is_packed, strict=True) if used]

    def _trains_others_than_before(self) -> bool:
        return self._optimized.count() != len(self._candidates) or any(
            parameter.requires_grad != before
            for parameter, before in zip(self._candidates, self._required, strict=True)
        )

    def _rebuild_buckets(self) -> None:
        """Compare the trained parameters of ranks, sum gradients of new ones, and rebuild the buckets."""
        named, problem = self._named_now()
        trained = {name: p for name, p in named.items() if p.requires_grad}
        layout = [[name, list(p.shape), str(p.dtype)] for name, p in trained.items()]
        everyone = [
            json.loads(data) for data in self._ranks.allgather(json.dumps([problem, layout]).encode())
        ]
        check_same_trained(everyone)
        self._named = named
        before = set(map(id, self._trained))
        new = [parameter for parameter in trained.values() if id(parameter) not in before]
        new_buckets = self._allreduce_new_gradients(new) if new else []
        summed = [*self._summed, *(bucket.gradients for bucket in new_buckets)]
        for bucket in (*self.buckets, *new_buckets):
            bucket.message.commit(is_used=True)
        not_sent = self._not_sent([*self.buckets, *new_buckets])
        self._residuals.store_residual({name: piece for name, piece in not_sent.items() if name in trained})
        self._lay_out(named)
        self._summed = summed

    def _named_now(self) -> tuple[Named, str]:
        try:
            return self._optimized.named(), ""
        except UserError as error:
            return {}, str(error)

    def _allreduce_new_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> list[Bucket]:
        """Sum gradients that are in no bucket yet, as the buckets to come will."""
        buckets = make_buckets(parameters, self._bucket_size_bytes, self._codec)
        self._residuals.restore_residual(self._not_sent(buckets))
        flags = buckets[-1].extra[:-2]
        flags[:] = torch.tensor([p.grad is not None for p in parameters]).to(flags)
        for number, bucket in enumerate(buckets):
            for slot in bucket.slots:
                self._pack(slot)
            bucket.message.send(self._ranks, f"horovod_train.late.{self.layout_version}.{number}")
        for bucket in buckets:
            bucket.message.receive(self._ranks)
        is_used = (flags > 0).tolist()
        for bucket in buckets:
            bucket.unpack()
            for slot in bucket.slots:
                slot.parameter.grad = slot.gradient if is_used[slot.index] else None
        return buckets

    # -- one step

    def _make_hook(self, bucket: Bucket, slot: Slot) -> Callable[[torch.Tensor], None]:
        number = self.buckets.index(bucket)
        is_last = bucket is self.buckets[-1]

        def on_gradient(_: torch.Tensor) -> None:
            if not self._listening or slot.parameter.grad is None:
                return  # a function of one's own may have no gradient for a parameter that it uses
            self.refuse_in_loss()
            if self._is_packed[slot.index]:
                raise gradient_reduced_already()
            self._pack(slot)
            self._is_packed[slot.index] = True
            slot.parameter.grad = None
            bucket.num_missing -= 1
            # The last bucket waits for reduce(): it carries what is only known then.
            if bucket.num_missing == 0 and not is_last:
                self._send(number)

        return on_gradient

    def _pack(self, slot: Slot) -> None:
        gradient = slot.parameter.grad
        if gradient is not None:
            gradient = aligned(slot.parameter, gradient)
        if gradient is None:
            slot.packed.zero_()
        elif gradient.is_sparse or to_local(gradient).data_ptr() != slot.packed.data_ptr():
            slot.packed.copy_(as_reals(gradient))

    def _send(self, number: int) -> None:
        bucket = self.buckets[number]
        bucket.is_sent = True
        # Sizes follow the layout, and Horovod knows a tensor by its name.
        bucket.message.send(self._ranks, f"horovod_train.{self._name}.{self.layout_version}.{number}")

    def _receive(self, flags: torch.Tensor | None) -> None:
        """Wait for every bucket. ``flags`` is read only by ranks that lack a gradient."""
        for bucket in self.buckets:
            bucket.message.receive(self._ranks)
        # Only a rank that lacks a gradient has to ask, and wait; the others know that it is used.
        is_used = None if flags is None else self._used_anywhere(flags)
        for bucket in self.buckets:
            bucket.unpack()
            bucket.is_sent = False
            bucket.num_missing = len(bucket.slots)
            for slot in bucket.slots:
                used = is_used is None or is_used[slot.index]
                slot.parameter.grad = slot.gradient if used else None
        self._is_packed = [False] * len(self._trained)

    def _used_anywhere(self, flags: torch.Tensor) -> list[bool]:
        if self.defers_results and not self._has_reported:
            self._has_reported = True
            log.warning(
                "rank %d has parameters without a gradient: it waits for the GPU in each such step, to learn "
                "whether other ranks have one",
                self._ranks.rank,
            )
        used: list[bool] = (flags > 0).tolist()
        return used
