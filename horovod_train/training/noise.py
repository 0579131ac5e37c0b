r"""Gradient noise scale: moments of the gradient, estimated from two batch sizes.

.. code-block:: text

    E |g_b|^2 = |G|^2 + S / b      g_b: mean gradient of b samples, G: expected gradient,
                                   S: trace of the covariance of the gradient of one sample

A step provides the squared norm for the whole batch, and the mean of the squared norms of its parts (ranks
or micro-batches). The two equations determine |G|^2 and S. The noise scale S / |G|^2 estimates the critical
batch size: the number of samples above which a larger batch reduces the benefit of each sample.

Source: McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv:1812.06162, appendix A.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_DECAY = 0.98
"""Weight of the previous average: about the last 50 measurements count."""


@dataclass(frozen=True)
class StepMoments:
    """Squared gradient norms of one step, by parameter group.

    Attributes:
        of_batch: Squared norm of the gradient of all samples.
        of_parts: Mean of the squared norms of the parts' gradients, weighted by their samples.
        inverse_part: Mean of 1 / (samples of a part), weighted by samples: n / N for n parts of N samples.
        num_samples: Samples of the step.
    """

    of_batch: Sequence[float]
    of_parts: Sequence[float]
    inverse_part: float
    num_samples: int

    @property
    def is_valid(self) -> bool:
        """Whether the numbers are finite, and the parts are smaller than the batch."""
        numbers = [*self.of_batch, *self.of_parts, self.inverse_part]
        return all(map(math.isfinite, numbers)) and self.inverse_part * self.num_samples > 1 + 1e-6

    def covariances(self) -> list[float]:
        """Return unbiased estimates of S by group; negative values are possible.

        >>> StepMoments([3.0], [6.0], 2 / 16, 16).covariances()
        [48.0]
        """
        difference = self.inverse_part - 1 / self.num_samples
        return [(p - b) / difference for b, p in zip(self.of_batch, self.of_parts, strict=True)]

    def square_norms(self) -> list[float]:
        """Return unbiased estimates of |G|^2 by group; negative values are possible.

        >>> StepMoments([3.0], [6.0], 2 / 16, 16).square_norms()
        [0.0]
        """
        return [b - s / self.num_samples for b, s in zip(self.of_batch, self.covariances(), strict=True)]


@dataclass(frozen=True)
class NoiseMoments:
    """Exponential moving averages of S and |G|^2, which checkpoints contain.

    Attributes:
        covariances: Average of S by parameter group.
        square_norms: Average of |G|^2 by parameter group.
        num_measured: Number of measured steps.
    """

    covariances: Sequence[float] = field(default_factory=list)
    square_norms: Sequence[float] = field(default_factory=list)
    num_measured: int = 0

    def with_step(self, step: StepMoments, decay: float) -> NoiseMoments:
        """Return the averages after another measured step.

        The average is a plain mean until the number of measurements exceeds 1 / (1 - decay).
        """
        num_groups = len(step.of_batch)
        before = self
        if len(self.covariances) != num_groups:  # the first measurement, or other groups than before
            before = NoiseMoments([0.0] * num_groups, [0.0] * num_groups)
        kept = min(decay, before.num_measured / (before.num_measured + 1))

        def mixed(old: Sequence[float], new: Sequence[float]) -> list[float]:
            return [kept * o + (1 - kept) * n for o, n in zip(old, new, strict=True)]

        return NoiseMoments(
            mixed(before.covariances, step.covariances()),
            mixed(before.square_norms, step.square_norms()),
            before.num_measured + 1,
        )

    @property
    def covariance(self) -> float:
        """Average of S over all parameters; 0 if no step was measured."""
        return sum(self.covariances)

    @property
    def square_norm(self) -> float:
        """Average of |G|^2 over all parameters; 0 if no step was measured."""
        return sum(self.square_norms)

    @property
    def noise_scale(self) -> float | None:
        """The noise scale in samples; None: not measured, or the estimates are not positive."""
        return noise_scale(self.covariance, self.square_norm)

    def by_group(self) -> list[float | None]:
        """Return the noise scale of each parameter group in samples."""
        return [noise_scale(*pair) for pair in zip(self.covariances, self.square_norms, strict=True)]


def noise_scale(covariance: float, square_norm: float) -> float | None:
    """Return S / |G|^2 in samples; None unless both are positive.

    >>> noise_scale(48.0, 0.5), noise_scale(48.0, -0.1)
    (96.0, None)
    """
    return covariance / square_norm if covariance > 0 and square_norm > 0 else None


def remaining_speedup(noise: float, batch: float) -> float:
    """Return the largest factor by which a larger batch can still reduce the number of steps.

    Steps to a loss: proportional to 1 + noise scale / batch (arXiv:1812.06162, equation 2.11).

    >>> remaining_speedup(100.0, 100.0), remaining_speedup(100.0, 400.0)
    (2.0, 1.25)
    """
    return 1 + noise / batch


def step_moments(numbers: Mapping[str, float | None], num_samples: int) -> StepMoments | None:
    """Return the squared norms among the numbers of a step's outcome; None: the step was not measured."""
    inverse_part = numbers.get("noise_inverse_part")
    if inverse_part is None:
        return None
    of_batch: list[float] = []
    of_parts: list[float] = []
    while (value := numbers.get(f"noise_of_batch_{len(of_batch)}")) is not None:
        of_parts.append(numbers[f"noise_of_parts_{len(of_batch)}"] or 0.0)
        of_batch.append(value)
    return StepMoments(of_batch, of_parts, inverse_part, num_samples)
