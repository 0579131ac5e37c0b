"""Checks of the first steps: of replicas and optimizer, and of the strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
        checks: Called once, after the first step.

    Attributes:
        verifier: Compares the first steps with those of the plain model; None: disabled, or done.
    """

    def __init__(self, checks: Sequence[Callable[[], None]]) -> None:
        self._checks = list(checks)
        self.verifier: StrategyVerifier | None = None

    @contextmanager
    def checked(self, step: PlannedStep) -> Iterator[PlannedStep]:
        """Yield the step to perform in the block, and check it.

        Raises:
            UserError: The strategy does not train as the plain model does, or ranks differ.
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
        """Compare loss and gradients.

        Args:
            loss: Loss of the step over all ranks, shape [].
        """
        if self.verifier is not None:
            self.verifier.compare_gradients(loss)

    def after_update(self, lr: float, *, want_norm: bool) -> None:
        """Compare weights, buffers and optimizer state."""
        if self.verifier is not None:
            self.verifier.compare_update(lr, want_norm=want_norm)

    def broadcast(self) -> None:
        """Copy rank 0's weights to the plain model on all ranks."""
        if self.verifier is not None:
            self.verifier.broadcast()

    def load_state(self, state: ReplicaState) -> None:
        """Load a state into the plain model."""
        if self.verifier is not None:
            self.verifier.reference.load_state(state)
