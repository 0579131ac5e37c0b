"""Checks of a replica, its optimizer and its strategy in the first steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from horovod_train.checkpoint.arrays import ReplicaState
from horovod_train.data.planned_step import PlannedStep

if TYPE_CHECKING:
    from horovod_train.frameworks.torch.verify.verification import StrategyVerifier


class FirstSteps:
    """Checks of a replica's first steps.

    Args:
        checks: Functions that are called once, after the first step.

    Attributes:
        verifier: Compares the first steps with those of the plain model; None: disabled or finished.
    """

    def __init__(self, checks: Sequence[Callable[[], None]]) -> None:
        self._checks = list(checks)
        self.verifier: StrategyVerifier | None = None

    @contextmanager
    def checked(self, step: PlannedStep) -> Iterator[PlannedStep]:
        """Yield the step that the block must perform, and check it afterwards.

        Raises:
            UserError: The strategy does not train like the plain model, or ranks differ.
        """
        if self.verifier is None:
            yield step
        else:
            with self.verifier.compared(step) as same:
                yield same
            if self.verifier.is_done:
                self.verifier = None
        while self._checks:
            self._checks.pop(0)()

    def after_reduce(self, loss: torch.Tensor) -> None:
        """Compare gradients, and the loss of the step over all ranks, shape [], with the plain model."""
        if self.verifier is not None:
            self.verifier.compare_gradients(loss)

    def after_update(self, lr: float, *, want_norm: bool) -> None:
        """Compare weights, buffers and optimizer state with the plain model."""
        if self.verifier is not None:
            self.verifier.compare_update(lr, want_norm=want_norm)

    def set_arguments(self, values: Mapping[str, float]) -> None:
        """Set arguments of the plain model's optimizer."""
        if self.verifier is not None:
            self.verifier.reference.set_arguments(values)

    def broadcast(self) -> None:
        """Broadcast rank 0's weights to the plain models of all ranks."""
        if self.verifier is not None:
            self.verifier.broadcast()

    def load_state(self, state: ReplicaState) -> None:
        """Load a state into the plain model."""
        if self.verifier is not None:
            self.verifier.reference.load_state(state)
