"""The Keras model of one rank: state, evaluation, running statistics."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import keras

from horovod_train.collectives.base import Communicator
from horovod_train.data.planned_step import PlannedStep
from horovod_train.data.shard import MicroBatch
from horovod_train.frameworks.base import StepOutcome
from horovod_train.frameworks.callbacks import CallbackState, SavesCallbacks
from horovod_train.frameworks.keras.back_ends.base import back_end
from horovod_train.frameworks.keras.callbacks import broadcast, exact_metrics
from horovod_train.frameworks.variables_replica import VariablesReplica


class KerasReplica(SavesCallbacks, VariablesReplica):
    """The compiled model of one rank. Its checkpoints do not depend on the back end.

    Args:
        model: Compiled with a distributed optimizer.
        world: The communicator.
    """

    def __init__(self, model: keras.Model, world: Communicator) -> None:
        # Keras has no public function for all layers.
        super().__init__(model, model.optimizer, world, list(model._flatten_layers()))  # noqa: SLF001
        self.callbacks = CallbackState(world)

    def step(self, step: PlannedStep, lr: float, *, want_norm: bool) -> StepOutcome:
        """Not implemented: ``model.fit`` performs steps."""
        raise NotImplementedError

    def fetch_variables(self) -> None:
        """Update the variables from ``fit``, which stores them in JAX arrays during an epoch."""
        back_end().sync_variables(self.model)

    def evaluate(
        self, batches: Iterable[tuple[MicroBatch, Sequence[object]]]
    ) -> dict[str, tuple[float, int]]:
        """Return the metrics over the batches of all ranks, on rank 0; an empty mapping on other ranks.

        The internal sums of the metrics are summed over ranks: the result of any Keras metric is exact.
        """
        with self._kept_training():
            return self._evaluate(batches)

    @contextmanager
    def _kept_training(self) -> Iterator[None]:
        """Keep metrics and mode of ``fit``, within which the block evaluates."""
        self.fetch_variables()
        metrics = [(each, keras.ops.convert_to_numpy(each)) for each in self.model.metrics_variables]
        stops = self.model.stop_training
        yield
        self.fetch_variables()
        for variable, value in metrics:
            variable.assign(value)
        self.model.stop_training = stops
        back_end().set_training(self.model)

    def _evaluate(
        self, batches: Iterable[tuple[MicroBatch, Sequence[object]]]
    ) -> dict[str, tuple[float, int]]:
        self.model.reset_metrics()
        found = iter(batches)
        first = next(found, None)
        if first is not None:
            with warnings.catch_warnings():
                # The end of the iterator is expected.
                warnings.filterwarnings("ignore", message=".*ran out of data")
                stream = (tuple(batch) for _, batch in chain([first], found))
                with back_end().stream(stream) as data:
                    self.model.evaluate(data, verbose=0)
        metrics = exact_metrics(self.model, self._world)
        return {name: (value, 1) for name, value in metrics.items()} if self._world.rank == 0 else {}

    def broadcast(self) -> None:
        """Broadcast weights and optimizer state from rank 0."""
        broadcast(self.model, self._world)

    def device_name(self) -> str:
        """Return the name of the model's device."""
        value = self.model.trainable_variables[0].value
        return str(value.device).rpartition("device:")[2].lower()
