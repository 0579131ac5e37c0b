"""Losses of a module that are compared with those of one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning
import torch

from horovod_train.frameworks.python_state import PythonState
from horovod_train.frameworks.torch.comm.sync_batch_norm import SyncBatchNormMixin
from horovod_train.frameworks.torch.state.generators import seed_generators
from horovod_train.frameworks.torch.verify.untouched import names_read, traceless


class ModuleLosses:
    """Computes the losses of ``training_step`` without a trace.

    Args:
        module: The module, which has a trainer.
        python_state: State in Python of the job.
    """

    def __init__(self, module: lightning.LightningModule, python_state: PythonState) -> None:
        self._module, self.python_state = module, python_state
        self.read: list[str] = []
        self._has_gathered = False

    @property
    def batch_norm(self) -> str:
        """Name of a layer that normalizes over the samples of a rank; empty: there is none."""
        kind = torch.nn.modules.batchnorm._BatchNorm  # noqa: SLF001
        layers = ((name, each) for name, each in self._module.named_modules() if isinstance(each, kind))
        return next((name for name, each in layers if each.training), "")

    def losses_of(self, batches: Sequence[object]) -> tuple[list[float], str]:
        """Return the losses of some batches, and why they cannot be compared; empty: they can."""
        module = self._module
        if any(isinstance(each, SyncBatchNormMixin) for each in module.modules()):
            return [], "layers use the samples of all ranks"
        tensors, _ = self.python_state.not_restored_values()
        with self._without_logging(), traceless(module, tensors.values()) as mode:
            losses = [self._loss_of(batch) for batch in (*batches, batches[-1])]
        self.read = names_read(tensors, mode.read)
        if self._has_gathered:
            return [], "the module gathers the samples of all ranks"
        if mode.unknown or losses[-1] != losses[-2]:
            return [], "they are random, or depend on state"
        return losses[:-1], ""

    def _loss_of(self, batch: object) -> float:
        seed_generators(0, 0, 0)
        with self._module.trainer.precision_plugin.train_step_context():
            found: Any = self._module.training_step(copy.deepcopy(batch), 0)
        return float(found["loss"] if isinstance(found, dict) else found)

    @contextmanager
    def _without_logging(self) -> Iterator[None]:
        """Let the module log nothing, and note whether it gathers, in the block."""
        gather = self._module.all_gather

        def noted(*args: Any, **more: Any) -> Any:
            self._has_gathered = True
            return gather(*args, **more)

        own: dict[str, Any] = {"log": _nothing, "log_dict": _nothing, "all_gather": noted}
        before = {name: vars(self._module)[name] for name in own if name in vars(self._module)}
        vars(self._module).update(own)
        try:
            yield
        finally:
            for name in own:
                del vars(self._module)[name]
            vars(self._module).update(before)


def _nothing(*_: object, **__: object) -> None:
    """Log nothing."""
