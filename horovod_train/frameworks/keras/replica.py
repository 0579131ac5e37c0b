"""A Keras model as the rest of the product sees it: state, evaluation, statistics."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from itertools import chain

import keras
import numpy as np

from horovod_train.checkpoint.arrays import ReplicaState
from horovod_train.collectives.base import Communicator
from horovod_train.data.planned_step import PlannedStep
from horovod_train.frameworks import variables
from horovod_train.frameworks.arrays import check_same_optimizer, from_rank_0, mean_over_ranks
from horovod_train.frameworks.base import IdenticalReplica, StepOutcome
from horovod_train.frameworks.callbacks import CallbackState, SavesCallbacks
from horovod_train.frameworks.keras.back_ends.base import back_end
from horovod_train.frameworks.keras.callbacks import broadcast, exact_metrics


class KerasReplica(SavesCallbacks, IdenticalReplica):
    """The compiled model of one rank.

    Args:
        model: Compiled, with a distributed optimizer.
        world: The ranks.
    """

    def __init__(self, model: keras.Model, world: Communicator) -> None:
        self.model = model
        self._world = world
        self.callbacks = CallbackState(world)
        layers = list(model._flatten_layers())  # noqa: SLF001  (Keras has no public way to all layers)
        self._statistics = variables.running_statistics(layers)

    def step(self, step: PlannedStep, lr: float, *, want_norm: bool) -> StepOutcome:
        """Keras makes steps itself."""
        raise NotImplementedError

    def evaluate(self, batches: Iterable[tuple[int, Sequence[object]]]) -> dict[str, tuple[float, int]]:
        """Return the metrics over the batches of all ranks, on rank 0; others return nothing.

        What metrics have counted is summed over ranks, so any Keras metric is exact: the result
        needs no further mean.
        """
        self.model.reset_metrics()
        found = iter(batches)
        first = next(found, None)
        if first is not None:
            with warnings.catch_warnings():
                # Keras cannot know that a stream ends where it should.
                warnings.filterwarnings("ignore", message=".*ran out of data")
                stream = (tuple(batch) for _, batch in chain([first], found))
                self.model.evaluate(back_end().stream(stream), verbose=0)
        metrics = exact_metrics(self.model, self._world)
        return {name: (value, 1) for name, value in metrics.items()} if self._world.rank == 0 else {}

    def sync_buffers(self) -> None:
        """Make what ranks update by themselves equal: running statistics are averaged, others rank 0's."""
        back_end().take_back_state(self.model)
        if self._world.size == 1:
            return
        averaged = {id(v) for v in self._statistics}
        trained = {id(v) for v in self.model.trainable_variables}
        for variable in variables.shared_state(self.model):
            if id(variable) in averaged:
                variable.assign(mean_over_ranks(self._world, variable.numpy()))
            elif id(variable) not in trained:
                variable.assign(from_rank_0(self._world, variable.numpy()))

    def broadcast(self) -> None:
        """Take over rank 0's weights and optimizer state."""
        broadcast(self.model, self._world)

    def is_finite(self) -> bool:
        """Return whether all weights are finite numbers."""
        back_end().take_back_state(self.model)
        return all(
            bool(np.isfinite(v.numpy().astype(np.float32)).all())
            for v in variables.shared_state(self.model)
            if "float" in keras.backend.standardize_dtype(v.dtype)
        )

    def state(self, *, copy: bool) -> ReplicaState:
        """Return the state; later steps do not change it."""
        back_end().take_back_state(self.model)
        return ReplicaState(
            model=variables.blobs_of(variables.named(variables.shared_state(self.model))),
            optimizer=variables.blobs_of(variables.named(self.model.optimizer.variables)),
            optimizer_tree={"class": type(self.model.optimizer).__name__},
            scaler={},  # Keras keeps it among the optimizer's variables
        )

    def load_state(self, state: ReplicaState) -> None:
        """Take over a state, of whatever back end.

        Raises:
            CheckpointError: The state belongs to another model or optimizer.
        """
        check_same_optimizer(state, self.model.optimizer)
        variables.load_blobs(variables.named(variables.shared_state(self.model)), state.model, "model")
        optimizer = variables.named(self.model.optimizer.variables)
        variables.load_blobs(optimizer, state.optimizer, "optimizer")

    def device_name(self) -> str:
        """Return where the model lives, for a person."""
        value = self.model.trainable_variables[0].value
        return str(value.device).rpartition("device:")[2].lower()

    def num_parameters(self) -> int:
        """Return how many numbers are trained."""
        return int(sum(np.prod(v.shape) for v in self.model.trainable_variables))
