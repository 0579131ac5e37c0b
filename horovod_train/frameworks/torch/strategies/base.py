"""Interfaces of parallelism strategies, which define how ranks compute one training step together.

Strategy       base class of all strategies, which implements these interfaces:
GradientSync   gradients and loss of a step, over all ranks
Updater        update of the weights, and what ranks exchange after it
LocalState     this rank's part of weights and optimizer state, for checkpoints
PassSchedule   order of the passes of a step, for pipelines

Capabilities   properties of a strategy that the replica (``step/replica.py``) depends on
total_norm     norm of gradients, which is as accurate on a CPU as on a GPU
make_strategy  the job's strategy
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils import get_total_norm

from horovod_train.checkpoint.arrays import ArrayBlob, Part
from horovod_train.collectives.base import Mesh
from horovod_train.config.schema import Job, Train
from horovod_train.config.support import strategy_support
from horovod_train.data.shard import PlannedStep
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.state.local import (
    LocalTensor,
    OptimizedParameter,
    OptimizedParameters,
    to_local,
    whole_model,
    whole_parameters,
)
from horovod_train.frameworks.torch.step.deferred import NoiseMeter, Number
from horovod_train.frameworks.torch.task import TorchTask
from horovod_train.registry import STRATEGIES


def total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm of all elements of all gradients, shape [].

    On a CPU, squares are summed in 64 bits. PyTorch sums them sequentially in the gradients' type, with an
    error of 1e-5 to 4e-4 for a weight of a million elements. Ranks that store shards of weights would then
    clip differently from ranks that store whole weights. GPUs sum in a tree.
    """
    if not gradients:
        return torch.zeros(())
    if gradients[0].device.type != "cpu":
        return get_total_norm(gradients)
    real = [torch.view_as_real(each) if each.is_complex() else each for each in gradients]
    norms = torch._foreach_norm(real, 2, dtype=torch.float64)  # noqa: SLF001  (as get_total_norm does)
    return torch.linalg.vector_norm(torch.stack(norms))


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Capabilities:
    """Properties of a strategy that the replica depends on.

    Attributes:
        deferred_results: A step needs no device-to-host synchronization; False: the host waits in each step.
        collective_passes: Passes contain collectives, so all ranks run the same number of passes in a step.
        sharded: Each rank writes arrays of its own to a checkpoint.
        whole_weights: A rank has all weights.
        after_update: A task's ``after_update`` can read and change each weight of the model.
        checkpoints_optimizer: This rank's optimizer state is written to checkpoints.
        owns_update: The strategy clips and updates; the optimizer's ``step`` is not called.
        owns_schedule: The strategy runs the passes of a step, and computes the metrics of a batch.
        meta_model: ``wrap`` accepts a model on the meta device, and loads its weights from a file.
        sums_gradients: The gradient is the sum over ranks, without compression: that of the joint batch.
        sum_and_count_loss: The loss may be a sum and a count: ``divide_gradients`` gets the total count.
        unused_have_zeros: The gradient of a parameter that no rank uses is zero instead of None.
        num_loss_copies: If ``owns_schedule``: how many ranks add the same count; the sum is divided by it.
        rank_state_kind: Name of the format of ``rank_state``; only rank state of this kind is loaded.
    """

    deferred_results: bool = True
    collective_passes: bool = False
    sharded: bool = False
    whole_weights: bool = True
    after_update: bool = True
    checkpoints_optimizer: bool = True
    owns_update: bool = False
    owns_schedule: bool = False
    meta_model: bool = False
    sums_gradients: bool = False
    sum_and_count_loss: bool = True
    unused_have_zeros: bool = False
    num_loss_copies: int = 1
    rank_state_kind: str = "strategy"


@dataclass(frozen=True)
class DevicePlacement:
    """Callable that moves a model to this rank's device.

    Attributes:
        device: The device of this rank.
        train: The job's ``train`` section.
        task: The task, which calls the model; None: the user's own loop calls it.
        example: Returns a batch of two samples.
        weights: Weights to load into a model on the meta device; None: the model has its weights.
        new_model: Returns a new model of the task, for tracing; None: a copy of the model is used.
    """

    device: torch.device
    train: Train
    task: TorchTask | None = None
    example: Callable[[], Any] | None = None
    weights: Mapping[str, ArrayBlob] | None = None
    new_model: Callable[[], torch.nn.Module] | None = None

    def __call__(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move a model to the device."""
        if self.train.channels_last:
            return model.to(device=self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model.to(self.device)


@dataclass(frozen=True)
class PassContext:
    """Context of the passes of a step, for a strategy that runs them itself (``owns_schedule``).

    Attributes:
        task: The task, which calls the model.
        autocast: Returns the context of a forward pass.
        end_phase: Ends a phase of the step.
        without_statistics: Returns a context for padding micro-batches, which change no running
            statistics.
        weight_loss: Returns a micro-batch's part of the step's loss, given its loss and fraction of samples.
    """

    task: TorchTask
    autocast: Callable[[], AbstractContextManager[object]]
    end_phase: Callable[[str], None]
    without_statistics: Callable[[], AbstractContextManager[object]]
    weight_loss: Callable[[object, float], torch.Tensor]


class GradientSync:
    """Gradients and loss of a step, over all ranks.

    Attributes:
        layout_version: Changes when gradients move to other addresses.
        is_in_loss: The replica is computing the task's loss: a backward pass is refused.
    """

    layout_version: int = 0
    is_in_loss: bool = False

    def begin(self, step: PlannedStep) -> None:
        """Start a step."""

    def prepare_backward(self, *, is_last: bool) -> None:
        """Prepare for a forward and backward pass; gradients may be reduced during the last one of a step."""

    def backward(self, weighted_loss: torch.Tensor) -> None:
        """Run the backward pass of a micro-batch.

        Args:
            weighted_loss: Loss times its fraction of the samples (times the loss scale with fp16), shape [].
        """
        weighted_loss.backward()  # type: ignore[no-untyped-call]

    def refuse_in_loss(self) -> None:
        """Raise ``UserError`` for a backward pass within the task's loss."""
        if self.is_in_loss:
            raise UserError(
                "the task's loss calls backward(): its gradients would not be weighted by the "
                "fraction of the samples that this rank has",
                hint="return the sum of all terms, or torch.autograd.grad for gradients that no update uses",
            )

    def reduce(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Complete the gradients of the step.

        Args:
            weighted_loss: Sum of this rank's losses, each times its fraction of the samples, shape [].

        Returns:
            The mean loss over the samples of the step, over all ranks, shape [].

        Raises:
            PeerError: Another rank was lost.
            UserError: Ranks train different parameters; raised by each rank that detects it.
        """
        raise NotImplementedError

    def gradients(self) -> list[torch.Tensor]:
        """Return tensors that together form the gradient and share memory with ``parameter.grad``."""
        raise NotImplementedError

    def divide_gradients(self, divisor: torch.Tensor) -> None:
        """Divide the gradient of the step by a float64 scalar, shape [], that is equal on all ranks."""
        gradients = self.gradients()
        for dtype in {gradient.dtype for gradient in gradients}:
            alike = [gradient for gradient in gradients if gradient.dtype == dtype]
            torch._foreach_div_(alike, divisor.to(dtype.to_real()))

    def norm(self) -> torch.Tensor:
        """Return the L2 norm of the whole gradient, shape []."""
        return total_norm(self.gradients())

    def squares_by_group(self, noise: NoiseMeter) -> torch.Tensor:
        """Return the squared norm of the whole gradient by parameter group, shape [noise.num_groups]."""
        return noise.squares_by_group(self.gradients())

    def is_finite(self, norm: float) -> bool:
        """Return whether the gradient is finite on all ranks, given the norm on this one."""
        return math.isfinite(norm)


class Updater:
    """Update of the weights, and what ranks exchange after it.

    Attributes:
        replicas_identical: Whether all replicas have identical weights and optimizer state. Must be true
            after the last step of an epoch. Checkpoints, comparisons and preemption wait until it is true.
    """

    replicas_identical: bool = True

    def update(self, clip_grad_norm: float | None) -> float:
        """Clip the gradient, and update the weights if it is finite; return its norm before clipping.

        Called only if ``owns_update``. ``clip_grad_norm`` is the largest norm; None: no clipping.
        """
        raise NotImplementedError

    def after_update(self, *, is_used: torch.Tensor | bool) -> None:
        """Synchronize after the optimizer's step, or after a skipped step.

        ``is_used`` is False if the step was skipped; with deferred results, it is a tensor of shape [].
        """

    def whole_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has whole weights, which a task may change."""
        return nullcontext()

    def gather_weights(self) -> None:
        """Gather the weights after ``optimizer.eval()``, which changes each rank's part of them."""


class LocalState:
    """This rank's part of weights, gradients and optimizer state; by default, all of it."""

    _model: torch.nn.Module
    _optimizer: torch.optim.Optimizer
    _numbering: Sequence[str | int] = ()
    """Result of ``numbering`` if this rank lacks some of the optimized parameters; otherwise empty."""

    def num_parameters(self) -> int:
        """Return the number of trainable elements of the whole model."""
        return sum(p.numel() for p in self._model.parameters() if p.requires_grad)

    def local_tensors(self) -> Mapping[str, LocalTensor]:
        """Return this rank's part of the model's weights and buffers, by their names in the whole model."""
        return whole_model(self._model)

    def transient_weights(self) -> Mapping[str, torch.nn.Parameter]:
        """Return parameters that have memory only in passes, by name: what a pass writes to them is lost."""
        return {}

    def local_gradients(self) -> Iterator[tuple[str, Part | None, torch.Tensor | None]]:
        """Yield name, part (None: all of it) and gradient (None: no rank has one) of each parameter."""
        parameters = (p for group in self._optimizer.param_groups for p in group["params"])
        for parameter, each in zip(parameters, self.optimized(), strict=True):
            yield (
                str(each.name),
                each.local.part,
                None if parameter.grad is None else to_local(parameter.grad),
            )

    @property
    def saved_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer whose state is written to checkpoints; ``optimized`` are its parameters."""
        return self._optimizer

    def optimized(self) -> Sequence[OptimizedParameter]:
        """Return the optimizer's parameters, in its order."""
        return whole_parameters(self._model, self._optimizer)

    def numbering(self) -> Sequence[str | int]:
        """Return the names of the whole model's optimized parameters, in the order of its optimizer."""
        return self._numbering or [parameter.name for parameter in self.optimized()]

    def load_optimizer(self, optimizer: torch.optim.Optimizer, document: dict[str, Any]) -> None:
        """Load the ``saved_optimizer``'s state after the weights; ``document`` is for ``load_state_dict``."""
        optimizer.load_state_dict(document)

    def rank_state(self) -> Mapping[str, torch.Tensor]:
        """Return the state that is specific to this rank, such as residuals, without copying it.

        State that is equal on all ranks is returned by rank 0 only; ``load_rank_states`` finds it at index 0.
        """
        return {}

    def load_rank_states(self, of_ranks: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Load this rank's state from the ``rank_state`` of all ranks that wrote the checkpoint, by rank."""
        if any(of_ranks):
            log.warning("the checkpoint's rank state is of another strategy or codec; it is dropped")


class PassSchedule:
    """Order of the passes of a step; used only if ``owns_schedule``."""

    def run_schedule(self, step: PlannedStep, context: PassContext) -> torch.Tensor:
        """Run the passes of a step; return this rank's weighted loss, shape []."""
        raise NotImplementedError

    def metrics_of(
        self, compute: Callable[[Any, Any], Mapping[str, Any]], batch: Any, context: PassContext
    ) -> Mapping[str, Any]:
        """Return the metrics of a batch; empty on ranks whose values are not counted."""
        raise NotImplementedError


class Strategy(GradientSync, Updater, LocalState, PassSchedule):
    """Base class of all strategies; its defaults are those of data parallelism over whole replicas.

    A strategy is a class, or a function that returns an instance. Its row in ``registry.STRATEGIES``, or its
    entry point, leads to what it declares (``config.support.StrategySupport``).

    Methods are called in this order:

        __init__     with the mesh of ranks, the job and ``strategy.args``; refuses unsupported jobs
        wrap         before the optimizer is created: moves the model to its device, and shards or wraps it
        bind         with the model and its optimizer
        forward_module  returns the module that the task calls
        in each step
          begin              with the samples of this rank
          prepare_backward  before each forward and backward pass
          backward           runs the backward pass
            or run_schedule, if ``owns_schedule``: runs all passes
          reduce             completes the gradients; returns the loss of the global batch
          divide_gradients   if the loss is a sum and a count
          norm, is_finite, gradients: called by the update (``step/update.py``), which clips the gradients
            or update, if ``owns_update``: replaces these three and the optimizer's step
          after_update       after the optimizer's step, or after a skipped step
        at a checkpoint, when ``replicas_identical``: local_tensors, optimized, rank_state
        to resume    load_optimizer, load_rank_states: after ``bind``, before the first step, or between two
        close        detaches all hooks: Lightning uses the model after training

    Attributes:
        capabilities: Properties that the replica depends on.
        sent_bytes: Bytes of gradients and weights that this rank passed to collectives in the last step.
        sum_in_pass: Sums a tensor over the data-parallel ranks with PyTorch's collectives, if passes contain
            any; None: Horovod's collectives are used.
        noise: Meter of the gradient noise scale, set before ``bind``; None: it is not measured.
        measures_local_gradients: The strategy passes this rank's gradients to ``noise`` before their sum.
    """

    capabilities: Capabilities = Capabilities()
    sent_bytes: int = 0
    sum_in_pass: Callable[[torch.Tensor, str], torch.Tensor] | None = None
    noise: NoiseMeter | None = None
    measures_local_gradients: bool = False
    _defers_results: bool = False

    def wrap(self, model: torch.nn.Module, move_to_device: DevicePlacement) -> torch.nn.Module:
        """Return the module to train, on its device; ``model`` is the task's model, on the CPU."""
        return move_to_device(model)

    def bind(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Attach to a model and its optimizer.

        Raises:
            UserError: This strategy does not support them.
        """
        self._model, self._optimizer = model, optimizer
        OptimizedParameters(model, optimizer).check()

    def forward_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return the module that the task calls; ``module`` is the bound model, or its compiled form."""
        return module

    def defer_results(self) -> None:
        """Require that, from the next step on, the host does not wait for the device within a step."""
        self._defers_results = True

    def numbers(self) -> Mapping[str, Number]:
        """Return additional metrics of the last step, by name in ``telemetry/catalog.py``."""
        return {}

    def close(self) -> None:
        """Detach all hooks from the model. Safe to call twice."""

    # -- verification against the plain model (``verify/verification.py``)

    def report_unused_parameters(self, names: Sequence[str]) -> None:
        """Receive the unused parameters of the reference model; called before a verified step.

        Args:
            names: Parameters without a gradient in the last pass of the step, on at least one rank.
        """

    @contextmanager
    def same_random_state(self, model: torch.nn.Module, step: PlannedStep) -> Iterator[PlannedStep]:
        """Yield the step for the reference; in the context, its model draws the strategy's random numbers."""
        yield step


def make_strategy(job: Job, mesh: Mesh) -> Strategy:
    """Return the job's strategy.

    Raises:
        UserError: The strategy is unknown, or does not support its arguments or the job.
    """
    support = strategy_support(job.strategy.name)
    args = job.strategy.args
    if support.arguments is not None:
        args = support.arguments.model_validate(args).model_dump()  # already validated with the job
    strategy: Strategy = STRATEGIES.make(
        job.strategy.name,
        lambda factory: factory(mesh, job, **args),
        args_field="strategy.args",
    )
    return strategy
