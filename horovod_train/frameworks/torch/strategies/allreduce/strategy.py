"""All-reduce: gradients are summed over ranks during the backward pass, and all replicas are identical.

Gradients are packed into flat buckets in the order of the backward pass, and each bucket is summed by one
in-place all-reduce (``torch/comm/buckets.py``). The loss of a micro-batch is weighted by its fraction of
the step's samples before the backward pass. The sum over ranks is therefore the mean over samples, for any
number of samples per rank.

If the set of trained parameters changes on any rank (with deferred results: on all ranks in the same step, or
it is an error), all ranks compare their sets, sum the gradients of new parameters in the same step, and
rebuild the buckets. A complex gradient is sent as pairs of reals.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence

import torch

from horovod_train.collectives.base import Communicator, Mesh
from horovod_train.config.schema import Allreduce, Job
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.codecs import BucketLayout, Codec, make_codec
from horovod_train.frameworks.torch.comm.buckets import Bucket, GradientPipeline, aligned
from horovod_train.frameworks.torch.comm.collectives import TensorCollectives, tensor_communicator
from horovod_train.frameworks.torch.state.local import (
    Named,
    OptimizedParameters,
    TrainedParameters,
    check_same_trained,
)
from horovod_train.frameworks.torch.state.rank_state import RankState, StateKey
from horovod_train.frameworks.torch.step.deferred import NoiseMeter, Number
from horovod_train.frameworks.torch.strategies.base import Capabilities, Strategy

log = logging.getLogger(__name__)


def allreduce(mesh: Mesh, job: Job) -> Strategy:
    """Return the strategy ``allreduce``, configured by the job's ``allreduce`` section.

    Raises:
        UserError: The codec cannot be created, or does not support the job.
    """
    codec = make_codec(job.allreduce)
    if job.train.precision == "fp16" and codec.keeps_residual:
        raise UserError(
            f"codec {type(codec).__name__} is not supported with train.precision: fp16: its residuals would "
            "have another loss scale when they are sent",
            hint="use bf16 or fp32",
        )
    return make_allreduce(mesh.data, job.allreduce, codec)


def make_allreduce(
    ranks: Communicator, section: Allreduce, codec: Codec | None = None, *, name: str = "bucket"
) -> Strategy:
    """Return the strategy that sums gradients over the data-parallel ranks.

    Args:
        ranks: The data-parallel ranks.
        section: The job's ``allreduce`` section.
        codec: Gradient compression; None: the codec of the section.
        name: Part of the names of collectives.

    Raises:
        UserError: The codec cannot be created.
    """
    codec = codec or make_codec(section)
    if ranks.size == 1 and not codec.keeps_residual:
        return SingleRankStrategy()
    size_bytes = int(section.bucket_size_mib * 2**20)
    return AllreduceStrategy(tensor_communicator(ranks), codec=codec, bucket_size_bytes=size_bytes, name=name)


class SingleRankStrategy(Strategy):
    """Strategy of a single rank, whose gradients need no communication."""

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
        """Return the parameters that have a gradient in this step."""
        return [parameter for parameter in self._parameters() if parameter.grad is not None]

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for group in self._optimizer.param_groups for parameter in group["params"])


class AllreduceStrategy(Strategy):
    """Strategy that all-reduces gradients in buckets of approximately ``bucket_size_bytes``."""

    measures_local_gradients = True

    def __init__(
        self, ranks: TensorCollectives, *, codec: Codec, bucket_size_bytes: int, name: str = "bucket"
    ) -> None:
        self._ranks = ranks
        self._name = name
        self._codec = codec
        self.capabilities = Capabilities(rank_state_kind=type(codec).__name__, sums_gradients=codec.is_exact)
        self._bucket_size_bytes = bucket_size_bytes
        self._rank_state = RankState(codec.rules)
        self.layout_version = -1
        self._has_warned = False
        self._pipeline: GradientPipeline | None = None
        self._replaced: list[Bucket] = []
        """Old buckets, if this step rebuilt them: their state is copied to the new ones after the update."""

    def bind(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().bind(model, optimizer)
        self.sum_gradients_of(OptimizedParameters(model, optimizer))

    def sum_gradients_of(self, optimized: TrainedParameters) -> None:
        """Sum the gradients of an optimizer's parameters that require a gradient."""
        self._optimized = optimized
        self._lay_out(optimized.named())

    @property
    def pipeline(self) -> GradientPipeline:
        """The gradient pipeline of the currently trained parameters."""
        assert self._pipeline is not None
        return self._pipeline

    def prepare_backward(self, *, is_last: bool) -> None:
        """All-reduce buckets during the next backward pass, if it is the last of this step."""
        if is_last:
            self.pipeline.listen()

    def reduce(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Complete the sums, assign them to ``parameter.grad``, and return the loss of the global batch."""
        pipeline, trailer = self.pipeline, self.pipeline.trailer
        is_changed = self._trainable_set_changed()
        if is_changed:
            frozen = {n for n, parameter in self._named.items() if not parameter.requires_grad}
            self._rank_state.store({key: t for key, t in self._state().items() if key[0] in frozen})
        all_used = pipeline.finish(weighted_loss, is_changed=is_changed, all_count=self._codec.keeps_residual)
        # Only a rank that lacks a gradient reads the flags from the device; others use every parameter.
        used = None if all_used else self._used_anywhere(trailer.used)
        set_gradients(pipeline.buckets, used)
        self._summed = [bucket.gradients for bucket in pipeline.buckets]
        if self._has_changed_anywhere(trailer.changed, is_changed=is_changed):
            self._rebuild_buckets()
        return trailer.loss

    def _used_anywhere(self, num_using: torch.Tensor) -> list[bool]:
        if self._defers_results and not self._has_warned:
            self._has_warned = True
            log.warning(
                "rank %d has parameters without a gradient: it waits for the GPU in each such step, to learn "
                "whether other ranks have one",
                self._ranks.rank,
            )
        used: list[bool] = (num_using > 0).tolist()
        return used

    def _has_changed_anywhere(self, num_changed: torch.Tensor, *, is_changed: bool) -> bool:
        """Return whether the set of trained parameters has changed on any rank.

        With deferred results, all ranks must change their sets in the same step, because a rank without a
        change does not read the number from the device. A rank with a change, which is rare, reads it.

        Raises:
            UserError: The set has changed on this rank, but not on all ranks.
        """
        if not self._defers_results:
            return bool(num_changed > 0)
        if not is_changed:
            return False
        if num_changed == self._ranks.size:
            return True
        raise UserError(
            "the set of trained parameters has changed on this rank, not on all others",
            hint="freeze and unfreeze parameters on all ranks in the same step",
        )

    def gradients(self) -> list[torch.Tensor]:
        """Return the summed gradients, one flat tensor per bucket."""
        return self._summed

    def numbers(self) -> Mapping[str, Number]:
        """Return the compression ratio, if it is above 1."""
        return {"compression_ratio": self._compression_ratio} if self._compression_ratio > 1 else {}

    def after_update(self, *, is_used: torch.Tensor | bool) -> None:
        """Commit the codec's new state (residuals) unless the step is skipped; copy it to rebuilt buckets."""
        replaced, self._replaced = self._replaced, []
        for bucket in replaced or self.pipeline.buckets:
            bucket.message.commit(is_used=is_used)
        if replaced:
            trained = {key[0] for key in self._state()}
            self._rank_state.store({key: t for key, t in state_of(replaced).items() if key[0] in trained})
            self._rank_state.restore(self._state())

    def rank_state(self) -> dict[str, torch.Tensor]:
        """Return the state of the codec, such as residuals."""
        return self._rank_state.save(self._state(), self._ranks.rank)

    def load_rank_states(self, of_ranks: Sequence[Mapping[str, torch.Tensor]]) -> None:
        if not self._codec.rules:
            super().load_rank_states(of_ranks)
            return
        self._rank_state.store(self._state())  # zeroes the state in the buckets; ``load`` drops the copy
        self._rank_state.load(of_ranks, self._ranks.rank, self._ranks.size)
        self._rank_state.restore(self._state())

    def _state(self) -> dict[StateKey, torch.Tensor]:
        return state_of(self.pipeline.buckets)

    def close(self) -> None:
        if self._pipeline is not None:
            self._pipeline.close()

    def used_in_last_pass(self) -> list[torch.nn.Parameter]:
        """Return the parameters with a gradient in the last backward pass; valid before ``reduce``."""
        return self.pipeline.used_in_last_pass()

    # -- changes of the trained parameters

    def _lay_out(self, named: Named) -> None:
        """Create buckets for the currently trained parameters."""
        self.close()
        self._named = named
        self._required = {name: parameter.requires_grad for name, parameter in named.items()}
        trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        if not trained:
            raise UserError("no parameter requires a gradient any more")
        self.layout_version += 1
        self._pipeline = self._make_pipeline(trained, self._name, self.noise)
        self._pipeline.attach()
        self._summed = [bucket.gradients for bucket in self._pipeline.buckets]
        self.sent_bytes = self._pipeline.pass_bytes
        layouts = [bucket.layout for bucket in self._pipeline.buckets]
        self._codec.check(self._ranks, layouts)
        self._compression_ratio = sum(map(bytes_of, layouts)) / max(1, self.sent_bytes)

    def _make_pipeline(self, trained: Named, name: str, noise: NoiseMeter | None = None) -> GradientPipeline:
        pipeline = GradientPipeline(
            trained,
            self._ranks,
            self._codec.message,
            bucket_size_bytes=self._bucket_size_bytes,
            # Horovod caches responses by tensor name, and sizes depend on the layout.
            name=f"horovod_train.{name}.{self.layout_version}",
            refuse=self.refuse_in_loss,
            noise=noise,
        )
        self._rank_state.restore(state_of(pipeline.buckets))
        return pipeline

    def _trainable_set_changed(self) -> bool:
        return self._optimized.count() != len(self._named) or any(
            parameter.requires_grad != self._required[name] for name, parameter in self._named.items()
        )

    def _rebuild_buckets(self) -> None:
        """Compare the trained parameters of all ranks, sum gradients of new ones, and rebuild the buckets."""
        named, problem = self._named_now()
        trained = {name: p for name, p in named.items() if p.requires_grad}
        layout = [[name, list(p.shape), str(p.dtype)] for name, p in trained.items()]
        everyone = [
            json.loads(data) for data in self._ranks.allgather(json.dumps([problem, layout]).encode())
        ]
        check_same_trained(everyone)
        if self.noise is not None:
            self.noise.discard()
        self._named = named
        before = set(map(id, self.pipeline.parameters))
        buckets = list(self.pipeline.buckets)
        if new := {name: p for name, p in trained.items() if id(p) not in before}:
            added = self._make_pipeline(new, f"late_{self._name}")
            added.finish(torch.zeros(()), is_changed=True, all_count=self._codec.keeps_residual)
            set_gradients(added.buckets, (added.trailer.used > 0).tolist())
            buckets += added.buckets
        self._lay_out(named)
        self._summed = [bucket.gradients for bucket in buckets]
        self._replaced = buckets

    def _named_now(self) -> tuple[Named, str]:
        try:
            return self._optimized.named(), ""
        except UserError as error:
            return {}, str(error)


def bytes_of(layout: BucketLayout) -> int:
    """Return the size of a bucket's gradients in bytes, in the data type of the parameters."""
    return sum(layout.lengths) * layout.dtype.itemsize


def set_gradients(buckets: Sequence[Bucket], used: Sequence[bool] | None) -> None:
    """Set ``parameter.grad`` to the sum, or to None if no rank has one (``used=None``: all have one)."""
    for bucket in buckets:
        bucket.unpack()
        for slot in bucket.slots:
            slot.parameter.grad = slot.gradient if used is None or used[slot.index] else None


def state_of(buckets: Sequence[Bucket]) -> dict[StateKey, torch.Tensor]:
    """Return the codec's state of these buckets, such as residuals."""
    return {key: tensor for bucket in buckets for key, tensor in bucket.message.state().items()}
