"""Random generators during evaluations."""

from __future__ import annotations

from collections.abc import Mapping

from horovod_train.checkpoint.arrays import ArrayBlob
from horovod_train.frameworks.base import HasGenerators
from horovod_train.training.hooks.base import Hook, HookParts
from horovod_train.training.run import Run


class KeepGenerators(Hook):
    """Restores random generators after each evaluation, so that training does not depend on evaluations.

    Metrics may draw numbers, and so do readers of the frameworks.
    """

    def __init__(self, framework: HasGenerators) -> None:
        self._framework = framework
        self._state: tuple[object, Mapping[str, ArrayBlob]] = None, {}

    @classmethod
    def of(cls, parts: HookParts) -> KeepGenerators:
        """Return the hook."""
        assert parts.framework is not None
        return cls(parts.framework)

    def on_evaluation(self, run: Run, *, begins: bool) -> None:
        """Take the state before an evaluation, and load it after it."""
        if begins:
            self._state = self._framework.rng_state()
        else:
            self._framework.load_rng_state(*self._state)
