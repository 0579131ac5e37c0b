"""Whether a step is used, and the optimizer's update: unscale, clip and step, in this order.

The loss is equal on all ranks, and so are gradients that were summed: every rank decides alike without
asking. A strategy whose gradients differ asks in ``is_finite``.

Where numbers can be read, the host decides. On a device it would have to wait for them in each step. There
the decision is made, on the device, by the same rules, and handed to the optimizer as a number: the fused
ones of PyTorch leave everything unchanged where ``found_inf`` is 1. After a step that ends training, all
others are skipped, too, until the host has read the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from horovod_train.config.schema import Health
from horovod_train.frameworks.torch.step.deferred import Number
from horovod_train.frameworks.torch.strategies.base import Strategy
from horovod_train.health.finite import SkipPolicy

MASKABLE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


@dataclass(frozen=True, slots=True)
class Updated:
    """Result of the update of a step.

    Attributes:
        is_used: Whether weights have changed; if only the device knows, a tensor of shape [].
        numbers: Fields of ``StepOutcome`` and further numbers, by name.
    """

    is_used: torch.Tensor | bool
    numbers: Mapping[str, Number] = field(default_factory=dict)

    def with_numbers(self, **more: Number) -> Updated:
        """Return the result with further numbers."""
        return Updated(self.is_used, {**self.numbers, "is_finite": self.is_used, **more})


def may_be_used(is_used: torch.Tensor | bool) -> bool:
    """Whether a step was used, or only the device knows it."""
    return isinstance(is_used, torch.Tensor) or is_used


class Update(Protocol):
    """Makes the update of a step."""

    def __call__(self, loss: torch.Tensor, *, want_norm: bool) -> Updated:
        """Update the weights, or leave them unchanged.

        Args:
            loss: Of the whole step, shape [].
            want_norm: Take the gradient norm even when there is nothing to clip.
        """
        ...

    def resume_updates(self) -> None:
        """Make updates again, though training had ended."""
        ...


def clip(strategy: Strategy, limit: float | None) -> float:
    """Scale the gradient to a norm of at most ``limit`` (None: any); return its norm before.

    A gradient whose norm is not finite is left unchanged.
    """
    norm = float(strategy.norm())
    if limit is not None and limit < norm < math.inf:
        torch._foreach_mul_(strategy.gradients(), limit / norm)
    return norm


class UpdateOnHost:
    """Reads loss and norm, and decides whether the step is used.

    Args:
        optimizer: Updates the weights.
        strategy: Completes the gradients.
        scaler: Loss scaler; disabled except with fp16.
        clip_grad_norm: Largest norm; None: no clipping.
        health: Which steps may be skipped, and how many in a row.
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
    """Decides on the device, by the rules of ``UpdateOnHost`` and of ``FiniteGuard``, and waits for nothing.

    Args:
        optimizer: Makes the update; one that ``can_be_masked``.
        strategy: Has the gradients.
        scaler: Of the loss; disabled except with fp16.
        clip_grad_norm: Largest norm; None: no clipping.
        health: Says which steps may be left out, and how many.
        device: Where the weights are.
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
        """Update the weights, or leave them unchanged; returns while the device works."""
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
        self._scaler.step_where(self._optimizer, is_used=is_used, is_seen=is_loss_finite & was_made)
        return Updated(is_used, {"loss": loss, "grad_norm": norm, "was_executed": was_made})

    def _clipped(self) -> torch.Tensor:
        """Clip gradients; return their norm before."""
        norm, gradients = self._strategy.norm().to(self._has_ended.device), self._strategy.gradients()
        if self._limit is not None:
            # Divided in 64 bits and then rounded, as by the host. (A number divided by a tensor is rounded
            # twice.) A factor of 1 changes nothing. For gradients in 16 bits it is rounded to those.
            factor = torch.div(self._limit, norm.double()).clamp(max=1.0)
            for dtype in {gradient.dtype for gradient in gradients}:
                alike = [gradient for gradient in gradients if gradient.dtype == dtype]
                torch._foreach_mul_(alike, factor.to(dtype))
        return norm

    def _record(self, is_loss_finite: torch.Tensor, is_used: torch.Tensor) -> None:
        """Record whether training ends with this step, as ``FiniteGuard`` will decide."""
        may_skip = self._health.non_finite == "skip"
        if not may_skip and not self._scaler.is_enabled():
            self._has_ended |= ~is_used
            return
        # In place, because graphs read it at a fixed address.
        self._num_bad_in_a_row.copy_(torch.where(is_used, 0, self._num_bad_in_a_row + 1))
        is_end = self._num_bad_in_a_row > self._health.max_skipped_steps
        self._has_ended |= is_end if may_skip else is_end | ~is_loss_finite

    def _prepare(self) -> None:
        """Give fused SGD its momenta.

        It makes them in its first step without a value, and leaves them so where that step is masked; and
        it stumbles over a parameter whose first gradient comes later than those of others. Zeros are what
        both come to.
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
        """Make updates again, though training had ended; with another state of the optimizer, perhaps."""
        self._has_ended.zero_()
        self._num_bad_in_a_row.zero_()
        self._num_prepared = -1


class DeviceScaler(torch.amp.GradScaler):
    """A loss scaler whose decisions stay on the device; disabled, it changes nothing."""

    def has_overflowed(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Return whether a gradient was found not to be finite when it was unscaled, shape []."""
        found = list(self._found_inf_per_device(optimizer).values())
        return torch.stack(found).sum() > 0

    def reset(self) -> None:
        """Drop what is known of gradients that were unscaled, and not used after all."""
        if self.is_enabled():
            self._per_optimizer_states.clear()

    def step_where(
        self, optimizer: torch.optim.Optimizer, *, is_used: torch.Tensor, is_seen: torch.Tensor
    ) -> None:
        """Make the update of a step that is used, and adapt the scale to one that is to be seen.

        Args:
            optimizer: With ``found_inf``; its gradients are unscaled.
            is_used: Whether weights change.
            is_seen: Whether the scale does: it knows overflows, and nothing of a loss that is NaN.
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
            tensor.copy_(torch.where(is_seen, tensor, old))


def can_be_masked(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer can skip a step by a number on the device.

    PyTorch's fused ones do, unless hooks run with each step, or the momentum of the first
    step is not that of zeros.
    """
    own_hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)  # noqa: SLF001
    everybodys_hooks = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    return (
        type(optimizer) in MASKABLE
        and not any((*own_hooks, *everybodys_hooks))
        and all(group.get("fused") and not group.get("dampening") for group in optimizer.param_groups)
    )
