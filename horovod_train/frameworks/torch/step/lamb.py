r"""LAMB: Adam's update plus weight decay, scaled in each weight tensor to the norm of the weights.

.. code-block:: text

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
    r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + epsilon) + weight_decay w
    w = w - rate (|w| / |r|) r   the trust ratio |w| / |r| is 1 if one of the norms is 0

Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
arXiv:1904.00962, algorithm 2 with the identity as scaling function; ``lamb`` of Optax has the same formula.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Lamb(torch.optim.Optimizer):
    """The optimizer LAMB.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: Decay of the averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Weight decay, inside of the trust ratio.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be at least 0 and below 1, not {betas}")
        if eps < 0 or weight_decay < 0:
            raise ValueError(f"eps and weight_decay must be at least 0, not {eps} and {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform an update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, (b1, b2) = self.state[parameter], group["betas"]
        weight, gradient = _real(parameter), _real(parameter.grad)
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        # A checkpoint of a former version has the number of steps in its group.
        step = state["step"] = state.get("step", torch.tensor(float(group.get("step", 0)))) + 1
        mean = state["exp_avg"].lerp_(gradient, 1 - b1)
        square = state["exp_avg_sq"].mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        root = (square / (1 - b2**step)).sqrt_().add_(group["eps"])
        update = (mean / (1 - b1**step)).div_(root).add_(weight, alpha=group["weight_decay"])
        ratio = weight.norm() / update.norm()
        ratio = torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0)
        weight.sub_(update.mul_(ratio * group["lr"]))


def _real(tensor: Any) -> torch.Tensor:
    """Return a tensor, or the pairs of real and imaginary parts of a complex one, which share its memory."""
    detached: torch.Tensor = tensor.detach()
    return torch.view_as_real(detached) if detached.is_complex() else detached
