"""Compare the loss of several ranks with that of one process, for frameworks without hooks of gradients.

The reference of a job on n ranks is one process with all samples of a step. If the loss is a mean over
samples, that of a batch is the mean of the losses of its halves. Each rank computes these three losses of the
same few samples. PyTorch's jobs compare gradients instead (``torch/verify/one_process.py``).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from horovod_train.collectives.base import Communicator, allgather_json
from horovod_train.config.schema import Job
from horovod_train.errors import result_of
from horovod_train.frameworks.python_state import PythonState

log = logging.getLogger(__name__)

LIMITS = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 3e-2}
"""Largest relative difference that is attributed to rounding, by precision of the job."""


class ReadsParts(Protocol):
    """A reader of chosen samples."""

    def batches_of(self, numbers: Sequence[int], parts: Sequence[slice]) -> list[object]:
        """Return a batch of each part of some samples, which are read once."""
        ...


class ComputesLosses(Protocol):
    """A replica."""

    python_state: PythonState

    @property
    def batch_norm(self) -> str:
        """Name of a layer that normalizes over the samples of a rank; empty: none is known."""
        ...

    def losses_of(self, batches: Sequence[object]) -> tuple[Sequence[float], str]:
        """Return the losses of some batches, in training, without a trace.

        Also return why they cannot be compared: the last one differs if it is computed again, for example;
        empty: they can.
        """
        ...


class LossComparison:
    """Compares losses on all ranks.

    Args:
        world: All ranks.
        reader: Reader of the training data.
        replica: Computes losses.
        job: The job.
    """

    def __init__(self, world: Communicator, reader: ReadsParts, replica: ComputesLosses, job: Job) -> None:
        self._world, self._reader, self._replica = world, reader, replica
        self._batch_size, self._limit = job.train.batch_size_per_rank, LIMITS[job.train.precision]
        self._reason: str | None = None

    def compare(self, step: int, parts: Sequence[Sequence[int]]) -> str | None:
        """Compare losses after a step, and log a difference, once. Collective.

        Args:
            step: Number of the step.
            parts: Numbers of samples of that step, in two parts.

        Returns:
            What differs, or why nothing is compared; None: the losses are equal; empty: they are not finite.
        """
        if self._reason is not None:
            return self._reason
        size = min(max(1, self._batch_size // 2), *map(len, parts))
        numbers = [number for part in parts for number in part[:size]]
        found, problem = result_of(partial(self._losses, numbers))
        losses, reason = found or ([], "")
        error = "" if problem is None else f"{type(problem).__name__}: {problem}"[:300]
        # All ranks decide by the same numbers, which may differ in the last bits: those of rank 0.
        of_ranks = allgather_json(self._world, (error, reason, losses, getattr(self._replica, "read", [])))
        errors, reasons, all_losses, names = zip(*of_ranks, strict=True)
        self._replica.python_state.read.update(name for of_rank in names for name in of_rank)
        if why := next(filter(None, errors), ""):
            return self._ends(f"losses are not compared with those of one process: {why}")
        if why := next(filter(None, reasons), ""):
            self._reason = f"losses are not compared with those of one process: {why}"
            return self._reason
        first, second, joint = all_losses[0]
        if not all(map(math.isfinite, (first, second, joint))):
            return ""
        if abs(joint - (first + second) / 2) <= self._limit * max(abs(first), abs(second), abs(joint), 1e-3):
            return None
        return self._ends(
            f"step {step}: the loss of {2 * size} samples is {(first + second) / 2:.6g} on two ranks, and "
            f"{joint:.6g} on one: one process on the joint batch would train other weights. "
            f"{explanation(first, second, joint, self._replica.batch_norm)}"
        )

    def _losses(self, numbers: Sequence[int]) -> tuple[Sequence[float], str]:
        half = len(numbers) // 2
        with self._replica.python_state.restored(with_data=True):
            batches = self._reader.batches_of(numbers, [slice(None, half), slice(half, None), slice(None)])
            return self._replica.losses_of(batches)

    def _ends(self, text: str) -> str:
        """Compare no more, for a reason that rank 0 logs."""
        self._reason = text
        if self._world.rank == 0:
            log.warning("%s", text)
        return text


def explanation(first: float, second: float, joint: float, batch_norm: str = "") -> str:
    """Return why the loss of a batch may not be the mean of those of its halves, and what helps.

    >>> explanation(1.0, 2.0, 1.25)  # doctest: +ELLIPSIS
    'It is a mean over something else than samples, such as tokens: ...'
    """
    if batch_norm:
        return f"A layer normalizes over the samples of each rank: {batch_norm}"
    if first != second and 0 < (joint - second) / (first - second) < 1:
        return (
            "It is a mean over something else than samples, such as tokens: divide by a number that does not "
            "depend on the samples, such as the number of samples times the largest length"
        )
    return (
        "It is not a mean over samples: it may compare samples with each other (in-batch negatives), "
        "normalize over a batch, or add samples up"
    )
