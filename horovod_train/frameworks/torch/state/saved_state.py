"""Save and load the state of a replica in a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from horovod_train.checkpoint.arrays import ArrayBlob, ReplicaState
from horovod_train.errors import CheckpointError, UserError
from horovod_train.frameworks.torch.state.blobs import blobs_of, from_blob
from horovod_train.frameworks.torch.state.local_tensors import (
    load_model,
    model_blobs,
    optimizer_blobs,
    optimizer_document,
    optimizer_tensors,
)
from horovod_train.frameworks.torch.step.averaged_weights import AveragedWeights
from horovod_train.frameworks.torch.strategies.base import Strategy

log = logging.getLogger(__name__)

OWN_STATE = "@"
"""Prefix of the names of rank state in a checkpoint."""


class SavedState:
    """Saves and loads the state of a replica.

    Args:
        model: The model.
        optimizer: The optimizer of the model.
        strategy: Provides this rank's shard of weights and optimizer state.
        scaler: The loss scaler.
        averaged: Averaged weights, which are saved in addition to the trained weights.
        prints_notices: Whether this rank logs warnings that are the same on all ranks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        scaler: torch.amp.GradScaler,
        averaged: AveragedWeights,
        *,
        prints_notices: bool,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._strategy = strategy
        self._scaler = scaler
        self._averaged = averaged
        self._prints_notices = prints_notices
        self._copies: dict[str, torch.Tensor] = {}

    def take(self, *, copy: bool) -> ReplicaState:
        """Return the state. With ``copy``, it remains unchanged until the next copy."""
        cache = self._copies if copy else None
        with_state = self._strategy.capabilities.checkpoints_optimizer
        tree, arrays = optimizer_blobs(
            self._strategy.saved_optimizer,
            self._strategy.optimized(),
            cache,
            settings_only=not with_state,
        )
        assert isinstance(tree, dict)
        averaged_tree, averaged = self._averaged.packed(cache)
        return ReplicaState(
            model=model_blobs(self._strategy.local_tensors(), cache),
            optimizer={**arrays, **averaged},
            optimizer_tree={**tree, **averaged_tree},
            scaler={key: float(value) for key, value in self._scaler.state_dict().items()},
            is_sharded=self._strategy.capabilities.sharded,
        )

    def check(self) -> None:
        """Raise ``UserError`` if the optimizer's state contains objects other than plain data and tensors."""
        strategy = self._strategy
        try:
            optimizer_tensors(strategy.saved_optimizer, strategy.optimized())
        except CheckpointError as error:
            raise UserError(
                f"the state of the optimizer {type(self._optimizer).__name__} cannot be saved in a "
                "checkpoint: "
                f"{error.message}",
                hint="use another optimizer",
            ) from error

    def load(self, state: ReplicaState) -> None:
        """Load a state, except the optimizer's settings (weight decay, momentum, ...), which the job defines.

        Raises:
            CheckpointError: The state belongs to another model or optimizer.
        """
        try:
            found = state.optimizer_tree["class"]
            if found != type(self._optimizer).__qualname__:
                raise ValueError(f"it was trained with {found}")  # noqa: TRY301
            self._load_weights(state.model)
            self._load_optimizer(state.optimizer_tree["state"], state.optimizer)
            self._averaged.load(state.optimizer_tree, state.optimizer)
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint belongs to another model or optimizer: {error}",
                hint="train under another name, or set checkpoint.resume: never",
            ) from error
        if self._scaler.is_enabled() and state.scaler:
            self._scaler.load_state_dict(_scaler_state(state.scaler))

    def _load_weights(self, arrays: Mapping[str, ArrayBlob]) -> None:
        if self._strategy.capabilities.sharded:
            if unknown := sorted(set(arrays) - set(self._model.state_dict())):
                raise ValueError(f"it has {unknown[0]!r}, which this model does not have")
            load_model(self._strategy.local_tensors(), arrays)
        else:  # ``load_state_dict`` of a model may rename keys of older versions
            self._model.load_state_dict({name: from_blob(blob) for name, blob in arrays.items()})

    def _load_optimizer(self, tree: Any, arrays: Mapping[str, ArrayBlob]) -> None:
        strategy = self._strategy
        optimizer = strategy.saved_optimizer
        groups = optimizer.param_groups
        document = optimizer_document(
            tree,
            arrays,
            strategy.optimized(),
            groups,
            strategy.numbering(),
            is_sharded=strategy.capabilities.sharded,
        )
        # Settings are loaded first: the device of the optimizer's state depends on them.
        for saved, group in zip(document["param_groups"], groups, strict=True):
            own = {key: group[key] for key in (*optimizer.defaults, "lr_scale") if key in group}
            self._report_other_kernel(saved, own)
            saved.update(own)
        strategy.load_optimizer(optimizer, document)

    def _report_other_kernel(self, saved: Mapping[str, object], own: Mapping[str, object]) -> None:
        if bool(saved.get("fused")) != bool(own.get("fused")) and self._prints_notices:
            log.warning(
                "the checkpoint was trained with fused: %s, and training continues with fused: %s: "
                "results are "
                "equally accurate, but not bitwise equal",
                bool(saved.get("fused")),
                bool(own.get("fused")),
            )


def _scaler_state(plain: Mapping[str, float]) -> dict[str, float]:
    integers = {"growth_interval", "_growth_tracker"}
    return {key: int(value) if key in integers else value for key, value in plain.items()}


def rank_state_of(strategy: Strategy) -> dict[str, ArrayBlob]:
    """Return the rank state of a strategy; names contain ``rank_state_kind``."""
    kind = f"{OWN_STATE}{strategy.capabilities.rank_state_kind}/"
    return blobs_of({f"{kind}{name}": each for name, each in strategy.rank_state().items()}, None, prefix="")


def load_rank_states(
    strategy: Strategy, of_ranks: Sequence[Mapping[str, ArrayBlob]], device: torch.device
) -> None:
    """Load the rank states of all ranks. A state of another ``rank_state_kind`` is dropped."""
    kind = f"{OWN_STATE}{strategy.capabilities.rank_state_kind}/"
    others = {name for state in of_ranks for name in state if name.startswith(OWN_STATE)}
    if dropped := sorted({name.partition("/")[0] for name in others if not name.startswith(kind)}):
        log.warning(
            "the checkpoint contains per-rank state of %s, which is ignored",
            dropped[0].removeprefix(OWN_STATE),
        )
    strategy.load_rank_states(
        [
            {
                name.removeprefix(kind): from_blob(blob).to(device)
                for name, blob in state.items()
                if name.startswith(kind) or not name.startswith(OWN_STATE)  # older versions wrote no prefix
            }
            for state in of_ranks
        ]
    )
