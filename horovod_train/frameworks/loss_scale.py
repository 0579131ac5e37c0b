"""Loss scaling: keep fp16 gradients away from zero, and learn the largest scale that fits.

The scale is decided after the all-reduce, when every rank holds the same gradients: all of them skip
a step or none does, without asking each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class LossScale:
    """The factor on the loss: halved when a gradient overflows, doubled after many steps without.

    Attributes:
        is_enabled: Without, the scale is 1 for ever.
        scale: The factor now.
        num_good_steps: Steps since it has last changed.
    """

    is_enabled: bool
    scale: float = 2.0**16
    num_good_steps: int = 0

    GROWTH_INTERVAL = 2000

    def __post_init__(self) -> None:
        if not self.is_enabled:
            self.scale = 1.0

    def update(self, *, is_finite: bool) -> None:
        """Note whether the gradients of a step were finite."""
        if not self.is_enabled:
            return
        if not is_finite:
            self.scale, self.num_good_steps = self.scale / 2, 0
            return
        self.num_good_steps += 1
        if self.num_good_steps == self.GROWTH_INTERVAL:
            self.scale, self.num_good_steps = self.scale * 2, 0

    def state(self) -> dict[str, float]:
        """Return what a checkpoint keeps; nothing when disabled."""
        if not self.is_enabled:
            return {}
        return {"scale": self.scale, "num_good_steps": float(self.num_good_steps)}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Take over what ``state`` returned."""
        if self.is_enabled and state:
            self.scale, self.num_good_steps = state["scale"], int(state["num_good_steps"])
