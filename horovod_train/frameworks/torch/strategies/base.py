"""How ranks stay in step: what they exchange in each step, and which of them hold the same weights.

A strategy is a file here (or in another package, see ``registry.py``) with a class and its arguments,
and one row in the table. The replica calls it in this order:

    made         with the mesh of ranks, the job and ``strategy.args``; refuses what it cannot do
    wrap         the model, on its way to the device, before its optimizer is made
    bind         model and optimizer; what is trained is known now
    called       what the task calls in the model's place
    then in each step
      begin        which samples this rank has
      expect_more  before each forward and backward pass but the last
      expect_last  before the last
      backward     makes the backward pass
        or, of one with an order of passes of its own, make_passes: all of them
      reduce       gradients are completed; returns the loss of the whole step
      norm         of the whole gradient, where it is wanted
      gradients    are clipped by the replica
      is_finite    whether the step may be used: the same on all ranks
        or, of one that updates itself, update: in place of these three and of the optimizer
      after_update the optimizer has made its step, or has left it out
    between steps
      local_tensors, optimized, saved_optimizer: what this rank has of what all share, for a checkpoint
      load_optimizer: takes over an optimizer's state, when weights were
      state, load_state: what this rank alone has, for a checkpoint and from one
    close        where the model is used further in this process, by Lightning
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from horovod_train.checkpoint.arrays import ArrayBlob, Part
from horovod_train.collectives.mesh import Mesh
from horovod_train.config.schema import Job, Train
from horovod_train.config.strategies import STRATEGY_SUPPORT
from horovod_train.data.planned_step import PlannedStep
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.gradient_buckets import to_local
from horovod_train.frameworks.torch.local_tensors import LocalTensor, Optimized, whole_model, whole_parameters
from horovod_train.frameworks.torch.norm import total_norm
from horovod_train.frameworks.torch.task import TorchTask
from horovod_train.frameworks.torch.trained import OptimizedParameters
from horovod_train.registry import STRATEGIES

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Placing:
    """Where a model is trained, and how it lies there.

    Attributes:
        device: The rank's.
        train: The job's section.
        task: Calls the model; None: a loop of somebody else's does.
        example: Returns a batch of two samples.
        weights: Of a model without memory, for a strategy that reads them; None: the model has them.
        another: Returns another model of the task, to try things with; None: a copy has to do.
    """

    device: torch.device
    train: Train
    task: TorchTask | None = None
    example: Callable[[], Any] | None = None
    weights: Mapping[str, ArrayBlob] | None = None
    another: Callable[[], torch.nn.Module] | None = None

    def __call__(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return a model there."""
        if self.train.channels_last:
            return model.to(device=self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model.to(self.device)


@dataclass(frozen=True)
class Loop:
    """What a strategy needs that makes the passes of a step itself.

    Attributes:
        task: Calls the model.
        autocast: Returns the context of a forward pass.
        lap: Ends a phase of the step.
        not_counted: Returns the context of passes of a micro-batch that does not count.
        weigh: Returns what a micro-batch adds to the loss of the step, given its loss and its share of the
            samples.
    """

    task: TorchTask
    autocast: Callable[[], AbstractContextManager[object]]
    lap: Callable[[str], None]
    not_counted: Callable[[], AbstractContextManager[object]]
    weigh: Callable[[object, float], torch.Tensor]


class Strategy:
    """Keeps the replicas of ranks in step.

    Attributes:
        bytes_per_step: Bytes that this rank has put on the wire in the last step.
        replicas_identical: Whether all ranks hold the same weights and optimizer state now. Where they
            do not in each step, they do after a planned step that is the last; checkpoints, comparisons
            and leaving wait for it.
        can_be_read_later: Whether it completes a step without a number from the device. One that asks other
            ranks in each step about theirs cannot; the host waits for the device then.
        layout: Changes when gradients come to lie elsewhere.
        reads_later: Set from outside: the host must not wait for the device in a step.
        passes_are_collective: Forward or backward passes are collectives, of which all ranks make equally
            many.
        is_sharded: A rank holds only some of the model, or of the optimizer's state.
        has_whole_weights: A rank holds all weights.
        takes_after_update: A task's ``after_update`` finds each weight in the model, and may change it there.
        tells_optimizer: The state of this rank's optimizer belongs into a checkpoint as that of the job.
        updates_itself: It makes the updates, with clipping: the optimizer that it was bound to makes no step.
        reads_weights: It can be given a model without memory, and the weights of a file.
        makes_passes: It has an order of passes of its own, and gives the metrics of a batch as well.
        compute_dtypes: Types in which it computes passes, besides those of the weights.
        state_kind: Names what ``state`` returns: another kind is not taken over from a checkpoint.
        unused_have_zeros: A parameter that no rank uses in a step has a gradient of zeros, and not none.
        takes_sums: The loss of a micro-batch may be a sum and a count, by which gradients are divided at the
            end.
        is_in_loss: Set from outside: the task's loss is called now.
        num_loss_copies: On so many ranks the same loss is computed, where it makes the passes itself.
        sum_in_pass: Sums a tensor over the ranks that share samples, where passes have PyTorch's own
            collectives;
            None: Horovod does.
    """

    bytes_per_step: int = 0
    replicas_identical: bool = True
    layout: int = 0
    can_be_read_later: bool = True
    reads_later: bool = False
    passes_are_collective: bool = False
    is_sharded: bool = False
    has_whole_weights: bool = True
    takes_after_update: bool = True
    checkpoints_optimizer: bool = True
    updates_itself: bool = False
    reads_weights: bool = False
    makes_passes: bool = False
    compute_dtypes: Sequence[torch.dtype] = ()
    state_kind: str = "strategy"
    unused_have_zeros: bool = False
    takes_sums: bool = True
    num_loss_copies: int = 1
    sum_in_pass: Callable[[torch.Tensor, str], torch.Tensor] | None = None
    is_in_loss: bool = False
    _model: torch.nn.Module
    _optimizer: torch.optim.Optimizer

    def wrap(self, model: torch.nn.Module, placing: Placing) -> torch.nn.Module:
        """Return the module that is trained in a model's place, on its device.

        Args:
            model: On the CPU.
            placing: Brings a model to its device.
        """
        return placing(model)

    def called(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return what the task calls in the model's place; the model is bound by now.

        Args:
            module: The model, or its compiled form.
        """
        return module

    def close(self) -> None:
        """Let go of the model. Safe to call twice."""

    def num_parameters(self) -> int:
        """Return how many numbers are trained."""
        return sum(p.numel() for p in self._model.parameters() if p.requires_grad)

    def bind(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take up what is trained.

        Raises:
            UserError: It cannot be trained in this way.
        """
        self._model, self._optimizer = model, optimizer
        OptimizedParameters(model, optimizer).check()

    @property
    def saved_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer whose state belongs into a checkpoint; ``optimized`` are its parameters."""
        return self._optimizer

    def local_tensors(self) -> Mapping[str, LocalTensor]:
        """Return what this rank has of the whole model's weights and buffers, by their names in it."""
        return whole_model(self._model)

    def optimized(self) -> Sequence[Optimized]:
        """Return the optimizer's parameters, in its order."""
        return whole_parameters(self._model, self._optimizer)

    def numbering(self) -> Sequence[str | int]:
        """Return the names of parameters as an optimizer of the whole model numbers them."""
        return [parameter.name for parameter in self.optimized()]

    def note_unused(self, names: Sequence[str]) -> None:
        """Take note of parameters that a step of the plain model leaves out, before the step is made.

        Args:
            names: Of parameters without a gradient in the step's last pass, on at least one rank.
        """

    @contextmanager
    def drawing_alike(self, model: torch.nn.Module, step: PlannedStep) -> Iterator[PlannedStep]:
        """Yield a step with which the plain model draws the random numbers of this strategy.

        Args:
            model: The plain model.
            step: As the strategy makes it next, from the random state of now.
        """
        yield step

    def begin(self, step: PlannedStep) -> None:
        """A step begins."""

    def expect_more(self) -> None:
        """The next forward and backward pass is not the last of this step."""

    def expect_last(self) -> None:
        """The next forward and backward pass is the last of this step."""

    def make_passes(self, step: PlannedStep, loop: Loop) -> torch.Tensor:
        """Make the passes of a step; return this rank's sum of share x loss, shape []."""
        raise NotImplementedError

    def metrics_of(
        self, compute: Callable[[Any, Any], Mapping[str, Any]], batch: Any, loop: Loop
    ) -> Mapping[str, Any]:
        """Return the metrics of a batch; empty on ranks whose values are not counted."""
        raise NotImplementedError

    def backward(self, weighted_loss: torch.Tensor) -> None:
        """Make the backward pass of a micro-batch.

        Args:
            weighted_loss: Share x loss, and with fp16 x scale, shape [].
        """
        weighted_loss.backward()  # type: ignore[no-untyped-call]

    def refuse_in_loss(self) -> None:
        """Refuse a gradient that comes while the loss is computed.

        Raises:
            UserError: The loss is computed now.
        """
        if self.is_in_loss:
            raise UserError(
                "the task's loss makes a backward pass of its own: its gradients would count as those of the "
                "whole batch on each rank",
                hint="return the sum of all terms, or use torch.autograd.grad for what is not to be trained",
            )

    def reduce(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Complete the gradients of the step.

        Args:
            weighted_loss: This rank's sum of share x loss, shape [].

        Returns:
            The mean loss over the samples of the step, over all ranks, shape [].

        Raises:
            PeerError: Another rank was lost.
            UserError: Ranks train different parameters; each that can see it raises it.
        """
        raise NotImplementedError

    def gradients(self) -> list[torch.Tensor]:
        """Return tensors that together are the gradient; writing to them changes ``parameter.grad``."""
        raise NotImplementedError

    def divide_gradients(self, divisor: torch.Tensor) -> None:
        """Divide the gradient of the step.

        Args:
            divisor: The same on all ranks, shape [], in 64 bits.
        """
        gradients = self.gradients()
        for dtype in {gradient.dtype for gradient in gradients}:
            alike = [gradient for gradient in gradients if gradient.dtype == dtype]
            torch._foreach_div_(alike, divisor.to(dtype.to_real()))

    def local_gradients(self) -> Iterator[tuple[str, Part | None, torch.Tensor | None]]:
        """Yield what this rank holds of the gradient of the step, by the names of parameters.

        Yields:
            The name, which part of the parameter it is (None: all of it), and the gradient (None: no rank has
            one).
        """
        parameters = (p for group in self._optimizer.param_groups for p in group["params"])
        for parameter, each in zip(parameters, self.optimized(), strict=True):
            yield (
                str(each.name),
                each.local.part,
                None if parameter.grad is None else to_local(parameter.grad),
            )

    def norm(self) -> torch.Tensor:
        """Return the L2 norm of the whole gradient, shape []."""
        gradients = self.gradients()
        return total_norm(gradients)

    def is_finite(self, norm: float) -> bool:
        """Return whether the gradient is finite on all ranks, given the norm on this one."""
        return math.isfinite(norm)

    def update(self, clip_grad_norm: float | None) -> float:
        """Clip the gradient, and update the weights if it is finite; return its norm before.

        Args:
            clip_grad_norm: Largest norm; None: no clipping.
        """
        raise NotImplementedError

    def after_update(self, *, is_used: torch.Tensor | bool) -> None:
        """The optimizer has made its step; or the step was not used, and weights are as before.

        Args:
            is_used: With ``reads_later`` it may be known on the device alone, shape [].
        """

    def whole_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has whole weights, which a task may change."""
        return nullcontext()

    def gather_weights(self) -> None:
        """Gather weights whose parts the optimizer has changed on each rank, outside of a step."""

    def load_optimizer(self, optimizer: torch.optim.Optimizer, document: dict[str, Any]) -> None:
        """Take over an optimizer's state; the weights are loaded by now.

        Args:
            optimizer: The ``saved_optimizer``.
            document: As its ``load_state_dict`` takes it.
        """
        optimizer.load_state_dict(document)

    def state(self) -> Mapping[str, torch.Tensor]:
        """Return what this rank alone has, and has to be in a checkpoint; it may still change."""
        return {}

    def load_state(self, of_ranks: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Take over what ``state`` returned on each rank, of as many ranks as there were then."""
        if any(of_ranks):
            log.warning("the checkpoint holds what another strategy or codec keeps for itself: it is dropped")


def make_strategy(job: Job, mesh: Mesh) -> Strategy:
    """Return the job's strategy.

    Raises:
        UserError: There is no such strategy, or it refuses its arguments or the job.
    """
    args = job.strategy.args
    if support := STRATEGY_SUPPORT.get(job.strategy.name):
        args = support.arguments.model_validate(args).model_dump()  # rules have looked at them
    strategy: Strategy = STRATEGIES.make(
        job.strategy.name,
        lambda factory: factory(mesh, job, **args),
        args_field="strategy.args",
    )
    return strategy
