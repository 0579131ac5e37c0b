"""Dynamic loss scaling: prevents underflow of fp16 gradients by the largest scale without overflow.

The scale is updated after the all-reduce, when all ranks have the same gradients. All ranks therefore skip
the same steps, without further communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class LossScale:
    """Factor on the loss: halved if a gradient overflows, doubled after 2000 steps without overflow.

    Attributes:
        is_enabled: False: the scale is always 1.
        scale: The current factor.
        num_good_steps: Number of steps since the last change.
    """

    is_enabled: bool
    scale: float = 2.0**16
    num_good_steps: int = 0

    GROWTH_INTERVAL = 2000

    def __post_init__(self) -> None:
        if not self.is_enabled:
            self.scale = 1.0

    def update(self, *, is_finite: bool) -> None:
        """Update the scale after a step whose gradients were finite or not."""
        if not self.is_enabled:
            return
        if not is_finite:
            self.scale, self.num_good_steps = self.scale / 2, 0
            return
        self.num_good_steps += 1
        if self.num_good_steps == self.GROWTH_INTERVAL:
            self.scale, self.num_good_steps = self.scale * 2, 0

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint; empty if disabled."""
        if not self.is_enabled:
            return {}
        return {"scale": self.scale, "num_good_steps": float(self.num_good_steps)}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Load the result of ``state``."""
        if self.is_enabled and state:
            self.scale, self.num_good_steps = state["scale"], int(state["num_good_steps"])
