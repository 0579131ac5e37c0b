r"""Squared norms of the gradients of parts of a step, for the gradient noise scale (``training/noise.py``).

A part is the gradient that a rank passes to the all-reduce: that of its samples, or of one micro-batch if
each is reduced (``zero``). Each rank adds the squared norms of its parts, and the sums travel in the trailer
of the gradients. A single rank compares its first micro-batch with the whole step.

.. code-block:: text

    a part p has the gradient c_p = w_p g_p, with w_p: its fraction of the step's samples (or counted units)
    mean over parts of |g_p|^2, weighted by w_p:   sum of |c_p|^2 / w_p
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from horovod_train.data.planned_step import PlannedStep
from horovod_train.frameworks.torch.step.deferred import Number


class NoiseMeter:
    """Measures the squared norms of the parts of a step, by parameter group.

    Args:
        optimizer: The optimizer, before a strategy shards it.
        by_group: Separate the parameter groups; otherwise, there is one group.
        device: Device of the gradients.
        has_parts: The strategy passes the gradients of parts; otherwise, a single rank trains.

    Attributes:
        is_due: Whether the next step is measured; set between steps.
        num_groups: Number of groups.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, by_group: bool, device: torch.device, has_parts: bool
    ) -> None:
        self._optimizer, self._has_parts = optimizer, has_parts
        self.is_due = False
        self.num_groups = len(optimizer.param_groups) if by_group else 1
        self._group_of = {
            id(parameter): number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        self._device = device
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}
        self._reset()

    @property
    def length(self) -> int:
        """Number of elements in the trailer: a sum per group, and the number of parts."""
        return self.num_groups + 1

    def begin(self, _: PlannedStep) -> None:
        """Begin a step."""
        if self.is_due:
            self._reset()

    def _reset(self) -> None:
        self._squares = torch.zeros(self.num_groups, device=self._device)
        self._weight = torch.zeros((), device=self._device)
        self._parts = torch.zeros(self.length, device=self._device)
        self._first: tuple[torch.Tensor, torch.Tensor] | None = None
        self._sums: torch.Tensor | None = None
        self._is_discarded = False
        self._num_micro_batches = 0

    def add_weight(self, weight: float | torch.Tensor) -> None:
        """Add a micro-batch's fraction of the step's samples to the current part; precedes its backward."""
        if not self._has_parts and self._num_micro_batches == 1:
            self._first = self.squares_by_group(), torch.as_tensor(self._weight).clone()
        self._num_micro_batches += 1
        self._weight = self._weight + weight

    def add_gradients(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        flat: torch.Tensor | None = None,
    ) -> None:
        """Add gradients of parameters to the current part, before they are summed over ranks.

        ``flat`` contains all of them in one tensor, which takes less time without groups.
        """
        if self.num_groups == 1:
            self._squares += squares_of(gradients if flat is None else [flat]).sum()
            return
        key = tuple(map(id, parameters))
        if key not in self._indices:
            groups = [self._group_of.get(id(parameter), 0) for parameter in parameters]
            self._indices[key] = torch.tensor(groups, device=self._device)
        self._squares.index_add_(0, self._indices[key], squares_of(gradients))

    def end_part(self) -> None:
        """Complete the current part: its gradients are passed to the all-reduce."""
        has_samples = self._weight > 0
        mine = torch.where(has_samples, self._squares / self._weight, 0.0)
        self._parts += torch.cat([mine, has_samples.to(mine.dtype).reshape(1)])
        self._squares, self._weight = torch.zeros_like(self._squares), torch.zeros_like(self._weight)

    def discard(self) -> None:
        """Ignore this step, because its parts do not contain all gradients."""
        self._is_discarded = True

    @property
    def local(self) -> torch.Tensor:
        """Sums over this rank's parts, shape [length]."""
        return self._parts

    def receive(self, sums: torch.Tensor) -> None:
        """Store the sums over all ranks, shape [length]."""
        self._sums = sums.clone()

    @torch.no_grad()
    def squares_by_group(self, flat: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """Return the squared norm of the optimizer's current gradients by group, shape [num_groups].

        ``flat`` contains all gradients in a few tensors, which takes less time without groups.
        """
        if self.num_groups == 1 and flat:
            return squares_of(flat).sum().reshape(1)
        groups = [group["params"] for group in self._optimizer.param_groups]
        if self.num_groups == 1:
            groups = [[parameter for group in groups for parameter in group]]
        squares = [
            squares_of(found).sum() if (found := [p.grad for p in group if p.grad is not None]) else None
            for group in groups
        ]
        zero = torch.zeros((), device=self._device)
        return torch.stack([zero if each is None else each for each in squares])

    def numbers(
        self,
        of_batch: torch.Tensor,
        total: torch.Tensor | None,
        num_samples: int,
        scale: float | torch.Tensor,
    ) -> Mapping[str, Number]:
        """Return the moments of the step, as numbers of its outcome; empty: it was not measured.

        Args:
            of_batch: Squared norm of the gradient of the step by group, shape [num_groups].
            total: Divisor of gradients whose loss is a sum and a count, per sample; None: losses are means.
            num_samples: Samples of the step.
            scale: Loss scale by which all gradients are multiplied.
        """
        divisor = 1.0 if total is None else total
        if self._is_discarded:
            return {}
        if self._sums is not None:
            of_parts, inverse_part = self._sums[:-1] / divisor, self._sums[-1] / num_samples
        elif self._first is not None:
            squares, weight = self._first
            of_parts, inverse_part = squares / weight**2, divisor / (weight * num_samples)
        else:
            return {}
        return {
            "noise_inverse_part": inverse_part,
            **{f"noise_of_batch_{n}": each / scale**2 for n, each in enumerate(of_batch)},
            **{f"noise_of_parts_{n}": each / scale**2 for n, each in enumerate(of_parts)},
        }


def squares_of(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the squared norms of tensors in at least 32 bits, shape [number of tensors]."""
    dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
    wide = [each.float() if each.dtype in {torch.float16, torch.bfloat16} else each for each in dense]
    reals = [torch.view_as_real(each) if each.is_complex() else each for each in wide]
    if reals[0].device.type == "cpu":  # a dot product is faster, and more exact, than a norm (see norm.py)
        flat = [each.reshape(-1) for each in reals]
        return torch.stack([each.dot(each).float() for each in flat])
    return torch.stack(torch._foreach_norm(reals)).square().float()  # noqa: SLF001
