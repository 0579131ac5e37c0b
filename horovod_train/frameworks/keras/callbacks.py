"""Callbacks for ``model.fit``: equal weights at the start, exact metrics, the learning rate."""

from __future__ import annotations

from typing import Any

import keras

from horovod_train.collectives.base import Communicator, mean_over_ranks
from horovod_train.config.schema import LearningRate
from horovod_train.frameworks import arrays, variables
from horovod_train.frameworks.keras.back_ends.base import back_end
from horovod_train.lr.policy import LearningRatePolicy

Logs = dict[str, Any]
"""Metrics by name, which callbacks may replace."""


class BroadcastState(keras.callbacks.Callback):
    """Gives every rank rank 0's weights and optimizer state when training begins.

    Raises:
        UserError: Ranks have made different models.
    """

    def __init__(self, world: Communicator) -> None:
        super().__init__()
        self._world = world

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Take over rank 0's state."""
        broadcast(self.model, self._world)


def broadcast(model: keras.Model, world: Communicator) -> None:
    """Take over rank 0's weights and optimizer state.

    Raises:
        UserError: Ranks have made different models.
    """
    if world.size == 1:
        return
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    state = variables.named([*variables.shared_state(model), *model.optimizer.variables])
    arrays.check_same_layout(world, variables.arrays_of(state))
    for variable in state.values():
        variable.assign(arrays.from_rank_0(world, variable.numpy()))


class ExactMetrics(keras.callbacks.Callback):
    """Makes what ``fit`` and ``evaluate`` report the metrics over all samples of all ranks.

    What a metric has counted is summed over ranks before its result is taken, so the result is that
    of one process over all samples, also where ranks have different numbers of them. What is logged
    of training itself is the mean over ranks. Put it before callbacks that look at metrics.
    """

    def __init__(self, world: Communicator) -> None:
        super().__init__()
        self._world = world

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Replace the results of an evaluation."""
        if logs is not None:
            logs.update(exact_metrics(self.model, self._world))

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Replace the results of an epoch's training."""
        logs = {} if logs is None else logs
        mine = {name: float(value) for name, value in logs.items() if not name.startswith("val_")}
        if mine:
            means = mean_over_ranks(self._world, {name: (value, 1) for name, value in mine.items()})
            logs.update(means)


def exact_metrics(model: keras.Model, world: Communicator) -> dict[str, float]:
    """Return the metrics of a model from what they have counted on all ranks together."""
    if world.size > 1:
        for variable in model.metrics_variables:
            mine = variable.numpy()
            variable.assign(
                arrays.mean_over_ranks(world, mine.astype("float64") * world.size).astype(mine.dtype)
            )
    return {name: float(value) for name, value in model.get_metrics_result().items()}


class ScaledLearningRate(keras.callbacks.Callback):
    """Sets the learning rate before each step, by the policy that jobs use.

    Args:
        world: The ranks.
        batch_size_per_rank: Samples per rank and step.
        epochs: Length of the whole training.
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
        """Learn how large a step is."""
        global_batch_size = self._batch_size_per_rank * self._num_micro_steps() * self._world.size
        self._policy = LearningRatePolicy(self._section, global_batch_size, self._epochs)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Note the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Set the rate of the step that begins."""
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
    back_end().take_back_state(model)
    model.optimizer.learning_rate = lr
