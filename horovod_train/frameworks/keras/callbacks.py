"""Callbacks for ``model.fit``: broadcast of the initial state, exact metrics, scaled learning rate."""

from __future__ import annotations

from typing import Any

import keras

from horovod_train.collectives.base import Communicator, mean_over_ranks
from horovod_train.config.optimization import LearningRate
from horovod_train.frameworks import arrays, variables
from horovod_train.frameworks.keras.back_ends.base import back_end
from horovod_train.lr.policy import EpochLength, LearningRatePolicy, policy_of_section

Logs = dict[str, Any]
"""Metrics by name; callbacks may replace them."""


class BroadcastState(keras.callbacks.Callback):
    """Broadcasts weights and optimizer state from rank 0 when training begins.

    Raises:
        UserError: Ranks have created different models.
    """

    def __init__(self, world: Communicator) -> None:
        super().__init__()
        self._world = world

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Broadcast the state.

        Raises:
            UserError: Ranks have created different models, or a layer requests statistics over ranks.
        """
        variables.refuse_synchronized(self.model._flatten_layers(), self._world)  # noqa: SLF001  (not public)
        broadcast(self.model, self._world)


def broadcast(model: keras.Model, world: Communicator) -> None:
    """Broadcast weights and optimizer state from rank 0.

    Raises:
        UserError: Ranks have created different models.
    """
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    variables.broadcast(world, variables.named([*variables.shared_state(model), *model.optimizer.variables]))


class ExactMetrics(keras.callbacks.Callback):
    """Replaces evaluation metrics by those of all samples of all ranks; averages training metrics.

    The internal sums of evaluation metrics are summed over ranks before the result is computed. The result
    equals that of one process, also if ranks have different numbers of samples. Training metrics are averaged
    over ranks. Put this callback before callbacks that read metrics.
    """

    def __init__(self, world: Communicator) -> None:
        super().__init__()
        self._world = world

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Replace the metrics of an evaluation."""
        if logs is not None:
            logs.update(exact_metrics(self.model, self._world))

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Replace the training metrics of an epoch."""
        logs = {} if logs is None else logs
        mine = {name: float(value) for name, value in logs.items() if not name.startswith("val_")}
        if mine:
            means = mean_over_ranks(self._world, {name: (value, 1) for name, value in mine.items()})
            logs.update(means)


def exact_metrics(model: keras.Model, world: Communicator) -> dict[str, float]:
    """Return the metrics of a model over the samples of all ranks. Collective."""
    if world.size > 1:
        for variable in model.metrics_variables:
            mine = variable.numpy()
            variable.assign(
                arrays.mean_over_ranks(world, mine.astype("float64") * world.size).astype(mine.dtype)
            )
    return {name: float(value) for name, value in model.get_metrics_result().items()}


class ScaledLearningRate(keras.callbacks.Callback):
    """Sets the learning rate before each step, by the policy of jobs.

    Args:
        world: The communicator.
        batch_size_per_rank: Samples per rank and step.
        epochs: Total number of epochs.
        lr: Fields of the job description's ``lr`` section, such as ``base_lr=0.1``.
    """

    def __init__(self, world: Communicator, *, batch_size_per_rank: int, epochs: int, **lr: Any) -> None:
        super().__init__()
        self._section = LearningRate(**lr)
        self._world = world
        self._batch_size_per_rank = batch_size_per_rank
        self._epochs = epochs
        self._policy: LearningRatePolicy | None = None
        self._epoch = 0
        self._lr: float | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Create the policy from the global batch size."""
        global_batch_size = self._batch_size_per_rank * self._num_micro_steps() * self._world.size
        num_batches = self.params["steps"]
        length = EpochLength(num_batches / self._num_micro_steps() if num_batches else None, None)
        self._policy = policy_of_section(self._section, global_batch_size, self._epochs, length)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Record the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Set the learning rate of this step."""
        num_micro_steps = self._num_micro_steps()
        if batch % num_micro_steps == 0:
            assert self._policy is not None
            lr = self._policy.at(self._epoch + batch / self.params["steps"])
            if lr != self._lr:
                set_learning_rate(self.model, lr)
                self._lr = lr

    def _num_micro_steps(self) -> int:
        optimizer = self.model.optimizer
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        return inner.gradient_accumulation_steps or 1


def set_learning_rate(model: keras.Model, lr: float) -> None:
    """Set the learning rate of the next step."""
    back_end().sync_variables(model)
    model.optimizer.learning_rate = lr
