r"""The learning rate as a pure function of progress and global batch.

The rate of a step depends only on the epochs passed (a fraction, independent of the number of steps), the
global batch and the job's ``lr`` section. A job that resumes on another number of ranks has the correct rate.

.. code-block:: text

    k      = global batch / reference batch
    peak   = base_lr * k          scaling: linear   (Goyal et al. 2017, arXiv:1706.02677)
             base_lr * sqrt(k)    scaling: sqrt     (Krizhevsky 2014, arXiv:1404.5997)
             base_lr              scaling: none

    e      = epochs passed, w = warmup_epochs, E = epochs of the whole job
    e < w:   rate = start + (peak - start) * e / w     start = warmup_start_lr, or min(base_lr, peak)
    e >= w:  rate = peak * decay(e)

    decay  = 1                                               constant
             gamma ** (number of milestones <= e)            step
             f + (1 - f) * (1 + cos(pi * t)) / 2             cosine       f = end_factor
             f + (1 - f) * (1 - t) ** power                  polynomial   t = (e - w) / (E - w)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from horovod_train.config.schema import LearningRate


@dataclass(frozen=True)
class LearningRatePolicy:
    """Learning-rate policy of a job at one global batch size.

    Attributes:
        section: The job's ``lr`` section.
        global_batch_size: Samples per optimizer step, over all ranks; under adasum, those of one rank.
        total_epochs: Length of the whole job; cosine and polynomial decay end there.
    """

    section: LearningRate
    global_batch_size: int
    total_epochs: float

    @property
    def peak_lr(self) -> float:
        """The base rate, scaled to the global batch.

        >>> LearningRatePolicy(LearningRate(base_lr=0.1, reference_batch_size=256), 8192, 90).peak_lr
        3.2
        """
        return self.section.base_lr * scale_factor(
            self.section.scaling, self.global_batch_size, self.section.reference_batch_size
        )

    def at(self, epochs: float) -> float:
        """Return the rate after a number of epochs, including the fraction of the current epoch."""
        warmup = self.section.warmup_epochs
        if epochs < warmup:
            start = self._warmup_start_lr()
            return start + (self.peak_lr - start) * epochs / warmup
        return self.peak_lr * self._decay(epochs)

    def _warmup_start_lr(self) -> float:
        given = self.section.warmup_start_lr
        return min(self.section.base_lr, self.peak_lr) if given is None else given

    def _decay(self, epochs: float) -> float:
        section = self.section
        if section.decay == "step":
            return section.gamma ** sum(milestone <= epochs for milestone in section.milestones_epochs)
        if section.decay == "constant":
            return 1.0
        length = self.total_epochs - section.warmup_epochs
        t = min(1.0, (epochs - section.warmup_epochs) / length) if length > 0 else 1.0
        shapes: dict[str, float] = {
            "cosine": (1 + math.cos(math.pi * t)) / 2,
            "polynomial": (1 - t) ** section.power,
        }
        shape = shapes[section.decay]
        return section.end_factor + (1 - section.end_factor) * shape


def scale_factor(scaling: str, global_batch_size: int, reference_batch_size: int) -> float:
    """Return the factor by which the base rate is multiplied.

    >>> scale_factor("linear", 128, 32), scale_factor("sqrt", 128, 32), scale_factor("none", 128, 32)
    (4.0, 2.0, 1.0)
    """
    k = global_batch_size / reference_batch_size
    return {"linear": k, "sqrt": math.sqrt(k), "none": 1.0}[scaling]
