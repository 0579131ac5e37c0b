"""The part of a replica that TensorFlow and Keras have in common: a model of variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod_train.checkpoint.arrays import ReplicaState
from horovod_train.collectives.base import Communicator
from horovod_train.frameworks import variables
from horovod_train.frameworks.arrays import check_same_optimizer, from_rank_0, mean_over_ranks
from horovod_train.frameworks.base import IdenticalReplica
from horovod_train.frameworks.loss_scale import LossScale


class VariablesReplica(IdenticalReplica):
    """A replica whose model and optimizer consist of variables.

    Args:
        model: The model.
        optimizer: A Keras optimizer.
        world: The communicator.
        layers: All layers of the model.
        scale: The loss scale; default: none.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        world: Communicator,
        layers: Sequence[Any],
        scale: LossScale | None = None,
    ) -> None:
        variables.refuse_synchronized(layers, world)
        self.model = model
        self.optimizer = optimizer
        self.scale = scale or LossScale(is_enabled=False)
        self._world = world
        self._statistics = variables.running_statistics(layers)

    def fetch_variables(self) -> None:
        """Update the variables, where the framework stores their values elsewhere during training."""

    def sync_buffers(self) -> None:
        """Average running statistics over ranks; broadcast other untrained variables from rank 0."""
        self.fetch_variables()
        if self._world.size == 1:
            return
        averaged = {id(v) for v in self._statistics}
        trained = {id(v) for v in self.model.trainable_variables}
        for variable in variables.shared_state(self.model):
            if id(variable) in averaged:
                variable.assign(mean_over_ranks(self._world, variable.numpy()))
            elif id(variable) not in trained:
                variable.assign(from_rank_0(self._world, variable.numpy()))

    def is_finite(self) -> bool:
        """Return whether all weights are finite."""
        self.fetch_variables()
        values = [variable.numpy() for variable in variables.shared_state(self.model)]
        # NumPy does not classify bfloat16 and float8 of ml_dtypes as floating-point types.
        return all(np.isfinite(v).all() for v in values if "float" in v.dtype.name or v.dtype.kind == "c")

    def state(self, *, copy: bool) -> ReplicaState:
        """Return a copy of the state."""
        self.fetch_variables()
        return ReplicaState(
            model=variables.blobs_of(variables.named(variables.shared_state(self.model))),
            optimizer=variables.blobs_of(variables.named(self.optimizer.variables)),
            optimizer_tree={"class": type(self.optimizer).__name__},
            scaler=self.scale.state(),
        )

    def load_state(self, state: ReplicaState) -> None:
        """Load a state.

        Raises:
            CheckpointError: The state is that of another model or optimizer.
        """
        check_same_optimizer(state, self.optimizer)
        variables.load_blobs(variables.named(variables.shared_state(self.model)), state.model, "model")
        variables.load_blobs(variables.named(self.optimizer.variables), state.optimizer, "optimizer")
        self.scale.load_state(state.scaler)

    def num_parameters(self) -> int:
        """Return the number of trained parameters."""
        return int(sum(np.prod(v.shape) for v in self.model.trainable_variables))
