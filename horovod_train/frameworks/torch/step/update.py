"""Loss of a step, the decision whether the step is used, and the optimizer's update.

    StepLoss          sum of the loss over micro-batches and ranks
    UpdateOnHost      unscale, clip and step, in this order; the host decides whether the step is used
    UpdateOnDevice    the same rules on the device; the host does not block
    TaskAfterUpdate   a task's ``after_update(model)``, which changes weights after each update, identically
                      on all ranks

Loss and summed gradients are equal on all ranks, so all ranks make the same decision without communication.
A strategy whose gradients differ between ranks communicates in ``is_finite``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from horovod_train.collectives.base import Communicator, any_rank
from horovod_train.config.schema import Health
from horovod_train.data.shard import PlannedStep
from horovod_train.errors import UserError
from horovod_train.events.types import WAIT_PHASE
from horovod_train.frameworks.base import StepClock
from horovod_train.frameworks.torch.comm.collectives import sum_over, tensor_communicator
from horovod_train.frameworks.torch.step.deferred import NoiseMeter, Number, Sent
from horovod_train.frameworks.torch.step.gathering import Gathering
from horovod_train.frameworks.torch.step.gradient_hooks import GradientHooks
from horovod_train.frameworks.torch.strategies.base import Strategy
from horovod_train.frameworks.torch.task import TorchTask, check_count, checked_loss, is_sum_and_count
from horovod_train.health.comparisons import SkipPolicy

MASKABLE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


@dataclass(frozen=True, slots=True)
class Updated:
    """Result of the update of a step.

    Attributes:
        is_used: Whether the step was not skipped; a bool tensor of shape [] if the device decides.
        numbers: Fields of ``StepOutcome`` and further numbers, by name.
    """

    is_used: torch.Tensor | bool
    numbers: Mapping[str, Number] = field(default_factory=dict)

    def with_numbers(self, **more: Number) -> Updated:
        """Return the result with further numbers."""
        return Updated(self.is_used, {**self.numbers, "is_finite": self.is_used, **more})


def may_be_used(is_used: torch.Tensor | bool) -> bool:
    """Return whether a step was used, or may have been used: a tensor is not read."""
    return isinstance(is_used, torch.Tensor) or is_used


class Update(Protocol):
    """Performs the update of a step."""

    def __call__(self, loss: torch.Tensor, *, want_norm: bool) -> Updated:
        """Update the weights, or leave them unchanged, given the loss of the step over all ranks, shape [].

        ``want_norm`` requests the gradient norm even without clipping.
        """
        ...

    def resume_updates(self) -> None:
        """Allow updates again after a step has ended training."""
        ...


def clip(strategy: Strategy, limit: float | None) -> float:
    """Scale the gradient to a norm of at most ``limit`` (None: no limit); return its norm before clipping.

    A gradient whose norm is not finite is left unchanged.
    """
    norm = float(strategy.norm())
    if limit is not None and limit < norm < math.inf:
        torch._foreach_mul_(strategy.gradients(), limit / norm)
    return norm


class UpdateOnHost:
    """Update with the decision on the host, which reads loss and norm.

    It is used on a CPU, and if the optimizer cannot skip a step on the device (``can_be_masked``).

    Args:
        optimizer: Updates the weights.
        strategy: Provides the gradients and their norm.
        scaler: Loss scaler; enabled only with fp16.
        clip_grad_norm: Largest norm; None: no clipping.
        health: The job's ``health`` section: which steps may be skipped, and how many in a row.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        scaler: torch.amp.GradScaler,
        clip_grad_norm: float | None,
        health: Health,
    ) -> None:
        self._optimizer = optimizer
        self._strategy = strategy
        self._scaler = scaler
        self._limit = clip_grad_norm
        self._needs_norm = clip_grad_norm is not None or health.non_finite == "skip"
        self._policy = SkipPolicy(health, scaler_skips=scaler.is_enabled())
        owns_update = strategy.capabilities.owns_update
        self._make = self._updated_by_strategy if owns_update else self._clip_and_step

    def __call__(self, loss: torch.Tensor, *, want_norm: bool) -> Updated:
        """Update the weights, or leave them unchanged."""
        loss_value, was_executed, norm, is_used = float(loss), not self._policy.has_ended, None, False
        if was_executed:
            if math.isfinite(loss_value):
                norm, is_used = self._make(want_norm=want_norm)
            self._policy.record(is_used=is_used, is_loss_finite=math.isfinite(loss_value))
        return Updated(is_used, {"loss": loss_value, "grad_norm": norm, "was_executed": was_executed})

    def _updated_by_strategy(self, *, want_norm: bool) -> tuple[float | None, bool]:
        norm = self._strategy.update(self._limit)
        return norm, math.isfinite(norm)

    def _clip_and_step(self, *, want_norm: bool) -> tuple[float | None, bool]:
        """Unscale, clip and step; return the norm before clipping, and whether the step is used."""
        scaler = self._scaler
        scaler.unscale_(self._optimizer)
        norm = clip(self._strategy, self._limit) if want_norm or self._needs_norm else None
        if norm is not None and not self._strategy.is_finite(norm) and not scaler.is_enabled():
            return norm, False
        scale = scaler.get_scale()
        scaler.step(self._optimizer)
        scaler.update()
        # A scaler that backs off has skipped the step: some gradient overflowed.
        return norm, not scaler.is_enabled() or scaler.get_scale() >= scale

    def resume_updates(self) -> None:
        """Allow updates again after a non-finite step has stopped training."""
        self._policy.reset()


class UpdateOnDevice:
    """Update with the decision on the device, by the rules of ``UpdateOnHost``; the host does not block.

    The host would have to wait for a GPU in each step. Instead, the device applies the rules, and the
    optimizer receives the decision as a tensor: PyTorch's fused optimizers skip the step if ``found_inf``
    is 1. After a step that ends training, later steps are skipped until the host has read the result.

    Arguments are as in ``UpdateOnHost``; the optimizer must satisfy ``can_be_masked``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        scaler: DeviceScaler,
        clip_grad_norm: float | None,
        health: Health,
        device: torch.device,
    ) -> None:
        self._optimizer = optimizer
        self._strategy = strategy
        self._scaler = scaler
        self._limit: torch.Tensor | None = None
        if clip_grad_norm is not None:
            self._limit = torch.tensor(clip_grad_norm, dtype=torch.float64, device=device)
        self._health = health
        self._needs_norm = clip_grad_norm is not None or health.non_finite == "skip"
        self._has_ended = torch.zeros((), dtype=torch.bool, device=device)
        self._num_bad_in_a_row = torch.zeros((), dtype=torch.int32, device=device)
        self._num_prepared = -1

    @torch.no_grad()
    def __call__(self, loss: torch.Tensor, *, want_norm: bool) -> Updated:
        """Update the weights, or leave them unchanged; returns without waiting for the device."""
        self._prepare()
        was_made = ~self._has_ended
        is_loss_finite = loss.isfinite()
        is_used = is_loss_finite
        self._scaler.unscale_(self._optimizer)
        norm = self._clipped() if want_norm or self._needs_norm else None
        if self._scaler.is_enabled():
            is_used = is_used & ~self._scaler.has_overflowed(self._optimizer)
        elif norm is not None:
            is_used = is_used & norm.isfinite()
        self._record(is_loss_finite, is_used)
        is_used = is_used & was_made
        self._scaler.step_where(self._optimizer, is_used=is_used, updates_scale=is_loss_finite & was_made)
        return Updated(is_used, {"loss": loss, "grad_norm": norm, "was_executed": was_made})

    def _clipped(self) -> torch.Tensor:
        """Clip gradients; return the norm before clipping."""
        norm, gradients = self._strategy.norm().to(self._has_ended.device), self._strategy.gradients()
        if self._limit is not None:
            # Divided in 64 bits and then rounded, as on the host (a float divided by a tensor is rounded
            # twice). A factor of 1 changes nothing. For 16-bit gradients, it is rounded to 16 bits.
            factor = torch.div(self._limit, norm.double()).clamp(max=1.0)
            factor = torch.where(norm.isfinite(), factor, 1.0)
            for dtype in {gradient.dtype for gradient in gradients}:
                alike = [gradient for gradient in gradients if gradient.dtype == dtype]
                torch._foreach_mul_(alike, factor.to(dtype))
        return norm

    def _record(self, is_loss_finite: torch.Tensor, is_used: torch.Tensor) -> None:
        """Record whether this step ends training, by the rules of ``SkipPolicy``."""
        may_skip = self._health.non_finite == "skip"
        if not may_skip and not self._scaler.is_enabled():
            self._has_ended |= ~is_used
            return
        # In place, because graphs read it at a fixed address.
        self._num_bad_in_a_row.copy_(torch.where(is_used, 0, self._num_bad_in_a_row + 1))
        is_end = self._num_bad_in_a_row > self._health.max_skipped_steps
        self._has_ended |= is_end if may_skip else is_end | ~is_loss_finite

    def _prepare(self) -> None:
        """Initialize the momentum buffers of fused SGD with zeros.

        Fused SGD creates them uninitialized in its first step, and a skipped step leaves them uninitialized.
        It also fails if parameters get their first gradient in different steps. Without dampening, zeros give
        the same result.
        """
        count = sum(len(group["params"]) for group in self._optimizer.param_groups)
        if count == self._num_prepared:
            return
        self._num_prepared = count
        for group in self._optimizer.param_groups:
            for parameter in group["params"] if group.get("momentum") else ():
                state = self._optimizer.state[parameter]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)

    def resume_updates(self) -> None:
        """Allow updates again after a step has ended training; optimizer state may have been replaced."""
        self._has_ended.zero_()
        self._num_bad_in_a_row.zero_()
        self._num_prepared = -1


class DeviceScaler(torch.amp.GradScaler):
    """A loss scaler whose decisions stay on the device; disabled, it changes nothing."""

    def has_overflowed(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Return whether unscaling has found a gradient that is not finite, shape []."""
        found = list(self._found_inf_per_device(optimizer).values())
        return torch.stack(found).sum() > 0

    def reset(self) -> None:
        """Discard the per-step state of gradients that were unscaled but not used."""
        if self.is_enabled():
            self._per_optimizer_states.clear()

    def step_where(
        self, optimizer: torch.optim.Optimizer, *, is_used: torch.Tensor, updates_scale: torch.Tensor
    ) -> None:
        """Run the optimizer's step if ``is_used``, and update the loss scale if ``updates_scale``.

        The optimizer must support ``found_inf``, and gradients must be unscaled. ``updates_scale`` must be
        false if the loss is not finite.
        """
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.found_inf = (~is_used).float()  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        if not self.is_enabled():
            return
        assert self._scale is not None
        assert self._growth_tracker is not None
        before = self._scale.clone(), self._growth_tracker.clone()
        self.update()
        for tensor, old in zip((self._scale, self._growth_tracker), before, strict=True):
            tensor.copy_(torch.where(updates_scale, tensor, old))


def can_be_masked(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer can skip a step by a tensor on the device (``found_inf``).

    PyTorch's fused optimizers can, unless step hooks are registered, or dampening makes the momentum of
    the first step differ from that of zero-initialized buffers.
    """
    own_hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)  # noqa: SLF001
    everybodys_hooks = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    return (
        type(optimizer) in MASKABLE
        and not any((*own_hooks, *everybodys_hooks))
        and all(group.get("fused") and not group.get("dampening") for group in optimizer.param_groups)
    )


class TaskAfterUpdate:
    """Caller of a task's ``after_update`` method, if it exists; ``task`` is None in a user's own loop.

    Raises:
        UserError: The task has the method, and ranks do not store each weight under this strategy.
    """

    def __init__(self, task: TorchTask | None, model: torch.nn.Module, strategy: Strategy) -> None:
        self._call = getattr(task, "after_update", None)
        self._model, self._strategy = model, strategy
        if self.exists and not strategy.capabilities.after_update:
            raise UserError(
                "the task has after_update(model), and under this strategy the model of a rank does not hold "
                "each weight",
                hint="choose strategy allreduce, zero, ddp or fsdp, or leave after_update out",
            )

    @property
    def exists(self) -> bool:
        """Whether the task has the method."""
        return self._call is not None

    def after_update(self, *, is_used: torch.Tensor | bool) -> None:
        """Call the method, unless the step was skipped."""
        if self._call is not None and may_be_used(is_used):
            with self._strategy.whole_weights():
                self._call(self._model)


NAME = "horovod_train.denominator"


class StepLoss:
    """Accumulator of the loss of the current step.

    A task returns a mean over the samples of a micro-batch, which is weighted by the micro-batch's part of
    the step's samples; or a sum and a count, for a mean over other units (tokens except padding, samples
    that ``collate`` has retained, class weights). Sums and counts are added over the whole step; at its
    end, the total loss and the gradients are divided by the total count.

    Args:
        strategy: Sums losses and gradients over ranks.
        data_ranks: The data-parallel group.
        all_ranks: All ranks of the job; differs from ``data_ranks`` under tensor and pipeline parallelism.
        device: Device of the losses.
        parameters: Returns the parameters that may have gradients; their hooks see the complete gradients.

    Attributes:
        local: This rank's part of the loss, shape [].
        noise: Receives the weights of micro-batches; None: the gradient noise scale is not measured.
        gathering: Gathered tensors of the passes; None: there are none.
        scale: Returns the loss scale, by which gradients are multiplied.
    """

    def __init__(
        self,
        strategy: Strategy,
        data_ranks: Communicator,
        all_ranks: Communicator,
        device: torch.device,
        parameters: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        self._strategy, self._data_ranks, self._all_ranks = strategy, data_ranks, all_ranks
        self._device, self._hooks = device, GradientHooks(parameters)
        self.local = torch.zeros((), device=device)
        self._num_samples = 1
        self._kinds: set[bool] = set()
        self._denominator: torch.Tensor | None = None
        self.count: torch.Tensor | None = None  # of the last step, if its loss was a sum and a count
        self.noise: NoiseMeter | None = None
        self.gathering: Gathering | None = None
        self.scale: Callable[[], float | torch.Tensor] = lambda: 1.0
        self._noise_numbers: Mapping[str, Number] = {}
        self._has_sums: bool | None = None

    def begin(self, step: PlannedStep) -> None:
        """Begin a step."""
        self.local.zero_()
        self._num_samples = step.share.num_samples
        self._kinds.clear()
        self._denominator = None
        self._hooks.defer()

    def add(self, weighted: torch.Tensor) -> None:
        """Add a micro-batch's weighted loss, as returned by ``weight_loss``."""
        self.local += weighted.detach()

    def weight_loss(self, loss: object, share: float) -> torch.Tensor:
        """Return a micro-batch's contribution to the loss of the step, shape [].

        Args:
            loss: Mean loss over the micro-batch; or a tuple of sum and count.
            share: Samples of the micro-batch divided by samples of the step over all ranks.

        Raises:
            UserError: The loss is neither, or is a sum and the strategy supports only means.
        """
        if self.gathering is not None:
            loss = self.gathering.tied(loss)
        is_sum = is_sum_and_count(loss)
        self._kinds.add(is_sum)
        if len(self._kinds) > 1:
            raise UserError(
                "the task's loss is a mean for one micro-batch, and a sum and a count for another",
                hint="return the same for all batches",
            )
        if not is_sum:
            if self.noise is not None and self.noise.is_due:
                self.noise.add_weight(share)
            return checked_loss(loss) * share
        assert isinstance(loss, tuple)
        return self._weighted_sum(*loss, is_counted=share > 0)

    def _weighted_sum(self, total: object, count: float | torch.Tensor, *, is_counted: bool) -> torch.Tensor:
        if not self._strategy.capabilities.sum_and_count_loss:
            raise UserError(
                "the task's loss is a sum and a count, and this strategy divides by the samples of each rank",
                hint="return the mean loss over the batch, or use another strategy",
            )
        check_count(count)
        # Divided by the number of samples first, because a sum could overflow fp16.
        factor = is_counted / self._num_samples
        denominator = torch.as_tensor(count, dtype=torch.float64, device=self._device) * factor
        if self.noise is not None and self.noise.is_due:
            self.noise.add_weight(denominator.float())
        self._denominator = denominator + (0.0 if self._denominator is None else self._denominator)
        return checked_loss(total) * factor

    def add_micro_batch(self, loss: object, share: float) -> torch.Tensor:
        """Add the contribution of a micro-batch to this rank's part of the loss; return it, shape []."""
        weighted = self.weight_loss(loss, share)
        self.add(weighted)
        return weighted

    def complete(self, clock: StepClock) -> torch.Tensor:
        """Complete loss and gradients of a step; return the loss over all ranks, shape [].

        Raises:
            PeerError: Another rank was lost.
        """
        loss = self._strategy.reduce(self.local)
        total = self.count = self._total_denominator()
        if total is not None:
            self._strategy.divide_gradients(total)
            loss = loss / total
        self._noise_numbers = self._moments(total)
        self._hooks.call()
        clock.end_phase(WAIT_PHASE)
        clock.settle(self._data_ranks, lambda: Sent(loss.reshape(1)).read())
        return loss

    def numbers(self) -> dict[str, Number]:
        """Return this rank's part of the loss, and the moments of the gradient noise if they are measured."""
        return {"local_loss": self.local, **self._noise_numbers}

    @torch.no_grad()
    def _moments(self, total: torch.Tensor | None) -> Mapping[str, Number]:
        """Return the moments of the step, whose gradients are summed and not clipped."""
        if self.noise is None or not self.noise.is_due:
            return {}
        of_batch = self._strategy.squares_by_group(self.noise)
        return self.noise.numbers(of_batch, total, self._num_samples, self.scale())

    def _total_denominator(self) -> torch.Tensor | None:
        """Return the divisor of this step's loss and gradients, shape []; None: losses are means."""
        own = self._denominator
        if not self._strategy.capabilities.owns_schedule:
            return None if own is None else self._summed(own)
        # In a model-parallel group, only some ranks compute the loss.
        if self._has_sums is None:
            self._has_sums = any_rank(self._all_ranks, flag=own is not None)
        if self._kinds and self._has_sums not in self._kinds:
            raise UserError(
                "the task's loss is a mean in one step, and a sum and a count in another",
                hint="return the same for all batches",
            )
        if not self._has_sums:
            return None
        mine = torch.zeros((), dtype=torch.float64, device=self._device) if own is None else own
        together = sum_over(tensor_communicator(self._all_ranks), mine.reshape(1), NAME)[0]
        return together / self._strategy.capabilities.num_loss_copies

    def _summed(self, number: torch.Tensor) -> torch.Tensor:
        """Return a number's sum over the data-parallel group."""
        if self._strategy.sum_in_pass is not None:
            return self._strategy.sum_in_pass(number.reshape(1), NAME)[0]
        return sum_over(tensor_communicator(self._data_ranks), number.reshape(1), NAME)[0]
