"""Callbacks and hooks of a Lightning module and its task: their state, and refusal of unsupported ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import lightning

from horovod_train.collectives.base import Communicator
from horovod_train.errors import UserError
from horovod_train.frameworks.callbacks import CallbackState, check_callbacks, named

log = logging.getLogger(__name__)
MODULE = "module"
NOT_CALLED = {
    "configure_optimizers": "the job's optimizer: and lr: are used",
    "train_dataloader": "the task's train_data() is read",
    "val_dataloader": "the task's eval_data() is read",
}
"""Methods of a module that a job does not call, and what the job uses instead."""


def own_callbacks(task: object, module: lightning.LightningModule) -> list[lightning.Callback]:
    """Return the callbacks of the task and of the module, if the job supports all of them.

    Raises:
        UserError: A callback is not supported, or the module uses manual optimization.
    """
    if not module.automatic_optimization:
        raise UserError(
            f"{type(module).__name__} has automatic_optimization = False, which jobs do not support",
            hint="use Lightning's Trainer with HorovodStrategy in a script (docs/own-loop.md)",
        )
    of_module = module.configure_callbacks()
    found = [
        *getattr(task, "callbacks", list)(),
        *(of_module if isinstance(of_module, Sequence) else [of_module]),
    ]
    module.configure_callbacks = list  # Trainer must not add them again
    check_callbacks(found, "lightning")
    return found


def report_not_called(module: lightning.LightningModule, world: Communicator) -> None:
    """Log the methods of a module that a job does not call, or calls without gradients, on rank 0."""
    found = [
        f"{name}() ({instead})"
        for name, instead in NOT_CALLED.items()
        if getattr(type(module), name) is not getattr(lightning.LightningModule, name)
    ]
    if found and world.rank == 0:
        log.warning("methods of %s that a job does not call: %s", type(module).__name__, "; ".join(found))
    name = "on_after_backward"
    if getattr(type(module), name) is not getattr(lightning.LightningModule, name) and world.rank == 0:
        log.warning(
            "%s.on_after_backward() sees no gradients, because ranks add them up later: use "
            "on_before_optimizer_step()",
            type(module).__name__,
        )


def state_of(trainer: lightning.Trainer, callbacks: Iterable[lightning.Callback]) -> dict[str, Any]:
    """Return the results of ``state_dict`` and ``on_save_checkpoint`` of callbacks and module, by name."""
    module = trainer.lightning_module
    state = {}
    for name, callback in named(callbacks):
        added = _added(trainer, partial(callback.on_save_checkpoint, trainer, module))
        state[name] = {"state": callback.state_dict(), "checkpoint": added}
    state[MODULE] = {"state": {}, "checkpoint": _added(trainer, module.on_save_checkpoint)}
    return {name: each for name, each in state.items() if any(each.values())}


def load_state(
    trainer: lightning.Trainer, callbacks: Iterable[lightning.Callback], saved: CallbackState
) -> None:
    """Load the result of ``state_of`` into callbacks and module."""
    module = trainer.lightning_module
    for name, callback in named(callbacks):
        if (found := saved.loaded(name)) is not None:
            callback.on_load_checkpoint(trainer, module, _checkpoint(trainer) | found["checkpoint"])
            callback.load_state_dict(found["state"])
    if (found := saved.loaded(MODULE)) is not None:
        module.on_load_checkpoint(_checkpoint(trainer) | found["checkpoint"])
    saved.report_unused()


def _checkpoint(trainer: lightning.Trainer) -> dict[str, Any]:
    """Return a checkpoint with the entries that hooks expect in a checkpoint of Lightning."""
    return {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": lightning.__version__,
        "state_dict": trainer.lightning_module.state_dict(),
        "optimizer_states": [],  # the job saves them
        "lr_schedulers": [],
        "callbacks": {},
    }


def _added(
    trainer: lightning.Trainer, on_save_checkpoint: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Return the entries that a hook adds to a checkpoint."""
    checkpoint = _checkpoint(trainer)
    given = set(checkpoint)
    on_save_checkpoint(checkpoint)
    return {name: value for name, value in checkpoint.items() if name not in given}
