"""What happens when a loss or gradient is not a finite number."""

from __future__ import annotations

import math

from horovod_train.collectives.base import Communicator
from horovod_train.config.schema import Health
from horovod_train.errors import NumericError, describe_ranks


class FiniteGuard:
    """Lets training continue, or ends it, when a step was not finite.

    The replica has left the weights alone by then. Every rank sees the same losses and gradients
    and so comes here together.
    """

    def __init__(self, health: Health, world: Communicator, *, scaler_skips: bool) -> None:
        self._health = health
        self._world = world
        self._scaler_skips = scaler_skips
        self.num_skipped_in_a_row = 0

    def check(self, step: int, *, is_finite: bool, loss: float, local_loss: float) -> None:
        """Look at a step.

        Raises:
            NumericError: The job does not allow the step to be skipped.
        """
        if is_finite:
            self.num_skipped_in_a_row = 0
            return
        self.num_skipped_in_a_row += 1
        # A loss scaler looks for the largest scale by overflowing now and then: that is its way.
        is_search = self._scaler_skips and math.isfinite(loss)
        may_skip = is_search or self._health.non_finite == "skip"
        if may_skip and self.num_skipped_in_a_row <= self._health.max_skipped_steps:
            return
        error = NumericError(self._describe(step, loss, local_loss), hint=self._hint())
        self.reset()  # a user's loop that continues may skip as many steps again
        raise error

    def reset(self) -> None:
        """Reset the count: training continues from another state."""
        self.num_skipped_in_a_row = 0

    def _describe(self, step: int, loss: float, local_loss: float) -> str:
        if math.isfinite(loss):
            return f"step {step}: the loss is {loss:g}, but a gradient is not finite"
        flags = self._world.allgather(b"\0" if math.isfinite(local_loss) else b"\1")
        bad = [rank for rank, flag in enumerate(flags) if flag == b"\1"]
        return f"step {step}: the loss is {loss} because of {describe_ranks(bad)}"

    def _hint(self) -> str:
        skipped = self.num_skipped_in_a_row
        if skipped > 1:
            return f"{skipped} steps in a row could not be used: lower base_lr or set clip_grad_norm"
        return "lower base_lr, set clip_grad_norm, or leave such steps out with non_finite: skip"
