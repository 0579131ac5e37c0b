"""Handling of a loss or gradient that is not finite."""

from __future__ import annotations

import math

from horovod_train.collectives.base import Communicator
from horovod_train.config.schema import Health
from horovod_train.errors import NumericError, describe_ranks


class SkipPolicy:
    """Decides whether training ends with a step that was skipped because it was not finite.

    Args:
        health: Which steps may be skipped, and how many in a row.
        scaler_skips: Whether a loss scaler is in use, which causes overflows to find the largest scale.
    """

    def __init__(self, health: Health, *, scaler_skips: bool) -> None:
        self._health = health
        self._scaler_skips = scaler_skips
        self.num_skipped_in_a_row = 0
        self.has_ended = False

    def record(self, *, is_used: bool, is_loss_finite: bool) -> None:
        """Record a step, and set ``has_ended``: whether training ends with this step."""
        self.num_skipped_in_a_row = 0 if is_used else self.num_skipped_in_a_row + 1
        may_skip = self._health.non_finite == "skip" or (self._scaler_skips and is_loss_finite)
        is_too_many = self.num_skipped_in_a_row > self._health.max_skipped_steps
        self.has_ended = not is_used and (is_too_many or not may_skip)

    def reset(self) -> None:
        """Reset the count of skipped steps when training continues, possibly from another state."""
        self.num_skipped_in_a_row, self.has_ended = 0, False


NOTHING_COUNTED_HINT = (
    "leave out samples without anything to count, use larger batches, or skip such steps with "
    "health.non_finite: skip"
)


class FiniteGuard:
    """Raises an error if a step was not finite and the job does not allow it to be skipped.

    The weights were not updated in such a step. All ranks have the same loss and gradients, so they decide
    identically. ``health`` and ``scaler_skips`` are the arguments of ``SkipPolicy``.
    """

    def __init__(self, health: Health, world: Communicator, *, scaler_skips: bool) -> None:
        self._world = world
        self._policy = SkipPolicy(health, scaler_skips=scaler_skips)

    def check(self, step: int, *, is_finite: bool, loss: float, local_loss: float) -> None:
        """Raise ``NumericError`` if a step was not finite and must not be skipped. Collective."""
        self._policy.record(is_used=is_finite, is_loss_finite=math.isfinite(loss))
        if not self._policy.has_ended:
            return
        bad = self._ranks_without_loss(loss, local_loss)
        is_uncounted = math.isnan(loss) and not bad  # 0 / 0; an overflow of finite numbers is infinite
        error = NumericError(
            _describe(step, loss, bad), hint=NOTHING_COUNTED_HINT if is_uncounted else self._hint()
        )
        self.reset()  # for a user's loop that continues after this error
        raise error

    def reset(self) -> None:
        """Reset the count of skipped steps when training continues from another state."""
        self._policy.reset()

    def _ranks_without_loss(self, loss: float, local_loss: float) -> list[int]:
        """Return the ranks whose part of the loss is not finite. Collective if the loss is not finite."""
        if math.isfinite(loss):
            return []
        flags = self._world.allgather(b"\0" if math.isfinite(local_loss) else b"\1")
        return [rank for rank, flag in enumerate(flags) if flag == b"\1"]

    def _hint(self) -> str:
        skipped = self._policy.num_skipped_in_a_row
        if skipped > 1:
            return f"{skipped} steps in a row could not be used: lower base_lr or set clip_grad_norm"
        return "lower base_lr, set clip_grad_norm, or skip such steps with health.non_finite: skip"


def _describe(step: int, loss: float, bad: list[int]) -> str:
    if math.isfinite(loss):
        return f"step {step}: the loss is {loss:g}, but a gradient is not finite"
    cause = describe_ranks(bad) if bad else "an overflow in the sum over ranks"
    if math.isnan(loss) and not bad:
        cause = "a count of 0: the loss is a sum and a count, and no sample of this step is counted"
    return f"step {step}: the loss is {loss} because of {cause}"
