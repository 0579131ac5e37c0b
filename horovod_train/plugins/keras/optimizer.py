"""Keras on Horovod in users' scripts: optimizers, and callbacks for ``model.fit``.

init                 starts Horovod, with the communicator for the back end of Keras
distribute           makes an optimizer average gradients over ranks
BroadcastState       callback: broadcast of the initial state
ExactMetrics         callback: exact metrics
ScaledLearningRate   callback: scaled learning rate
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from horovod_train.collectives.base import Communicator, mean_over_ranks
from horovod_train.config.optimization import LearningRate
from horovod_train.config.schema import Allreduce, Job
from horovod_train.errors import UserError
from horovod_train.frameworks import plain_data
from horovod_train.frameworks.devices import join
from horovod_train.frameworks.exchange import Exchange, name_of_exchange
from horovod_train.lr.policy import EpochLength, LearningRatePolicy, policy_of_section
from horovod_train.plugins.frameworks import variables
from horovod_train.plugins.keras.back_ends import back_end

WIRE_DTYPES = {"fp32": "float32", "fp16": "float16"}


def distribute(
    optimizer: keras.Optimizer,
    world: Communicator,
    *,
    bucket_size_mib: float = 8.0,
    wire_dtype: str = "fp32",
) -> keras.Optimizer:
    """Make an optimizer average gradients over ranks, and return it.

    Keras 3 calls none of the methods that Horovod's ``DistributedOptimizer`` overrides: with it, each rank
    trains its own model, without an error. This function overrides ``_clip_gradients``, which Keras calls
    once per update on all back ends, after accumulation and before clipping.

    Its class name and module do not change: a model that was compiled with it can be saved, and loaded
    without this package. With the policy ``mixed_float16``, it is wrapped in a loss scale that is equal on
    all ranks.

    Args:
        optimizer: The optimizer; changed in place.
        world: The communicator.
        bucket_size_mib: Approximate size of a bucket of gradients.
        wire_dtype: Data type in which float32 gradients are sent: fp32 or fp16.

    Raises:
        UserError: It is not a Keras optimizer, or distributed already; or ``wire_dtype`` is not supported.
    """
    if not isinstance(optimizer, keras.Optimizer):
        raise UserError(
            f"{optimizer!r} is a {type(optimizer).__name__}, not a Keras optimizer",
            hint="make one, such as keras.optimizers.SGD(0.1)",
        )
    allreduce = Allreduce.model_validate({"bucket_size_mib": bucket_size_mib, "wire_dtype": wire_dtype})
    if allreduce.wire_dtype not in WIRE_DTYPES:
        raise UserError(f"wire_dtype {wire_dtype!r} requires PyTorch", hint="use fp32 or fp16")
    size_bytes = int(allreduce.bucket_size_mib * 2**20)
    exchange = back_end().exchange(world, size_bytes, WIRE_DTYPES[allreduce.wire_dtype])
    scale_class = keras.optimizers.LossScaleOptimizer
    if keras.config.dtype_policy().name == "mixed_float16" and not isinstance(optimizer, scale_class):
        optimizer = scale_class(optimizer)
    if isinstance(optimizer, scale_class):
        _become(optimizer.inner_optimizer, _AppliesTheMean, world, exchange)
        _become(optimizer, _AgreesOnOverflow, world, exchange)
    else:
        _become(optimizer, _AppliesTheMean, world, exchange)
    return optimizer


def _become(optimizer: keras.Optimizer, mixin: type, world: Communicator, exchange: Exchange) -> None:
    base = type(optimizer)
    if issubclass(base, _Distributed):
        raise UserError("the optimizer is distributed already", hint="call distribute() once")
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    optimizer.__class__ = type(base.__name__, (mixin, base), names)
    optimizer._horovod = (world, exchange)  # noqa: SLF001  (our own attribute)


def exchange_of(optimizer: keras.Optimizer) -> Exchange:
    """Return the exchange of a distributed optimizer."""
    assert isinstance(optimizer, _Distributed)
    return optimizer._horovod[1]  # noqa: SLF001  (our own attribute)


class _Distributed:
    """Base of the mixins."""

    _horovod: tuple[Communicator, Exchange]


class _AppliesTheMean(_Distributed):
    """Mixin that averages gradients over ranks before they are clipped."""

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        self._name = name_of_exchange(grads)  # Keras removes gradients that are None before it clips
        found = trainable_variables or self._trainable_variables  # type: ignore[attr-defined]
        shaped = back_end().with_shapes(grads, found)
        return super().apply(shaped, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Sequence[keras.KerasTensor]) -> Sequence[keras.KerasTensor]:
        return super()._clip_gradients(self._mean_of_ranks(grads))  # type: ignore[misc]

    def _mean_of_ranks(self, grads: Sequence[keras.KerasTensor]) -> list[keras.KerasTensor]:
        world, exchange = self._horovod
        steps = self.gradient_accumulation_steps  # type: ignore[attr-defined]
        if world.size == 1:
            return list(grads)
        if not steps or not back_end().optimizer_sees_micro_steps:
            return exchange.mean(grads, self._name)
        is_last = (self._iterations + 1) % steps == 0  # type: ignore[attr-defined]
        result: list[keras.KerasTensor] = keras.ops.cond(
            is_last, lambda: exchange.mean(grads, self._name), lambda: list(grads)
        )
        return result

    def _backend_reset_gradient_accumulators(self) -> None:
        super()._backend_reset_gradient_accumulators()  # type: ignore[misc]
        totals = self._accumulated_gradients  # type: ignore[attr-defined]
        back_end().clear([total for total in totals if total is not None])

    def __setattr__(self, name: str, value: object) -> None:
        # LossScaleOptimizer sets this attribute to None in the optimizer that it wraps.
        if name == "loss_scale_factor" and value is None and self._horovod[0].size > 1:
            _refuse_foreign_scale()
        super().__setattr__(name, value)


class _AgreesOnOverflow(_Distributed):
    """Mixin that skips a step on all ranks if a gradient of any rank is not finite."""

    def check_finite(self, grads: Sequence[keras.KerasTensor]) -> Sequence[keras.KerasTensor]:
        world, exchange = self._horovod
        mine = super().check_finite(grads)  # type: ignore[misc]
        if world.size == 1:
            return mine
        (num_finite,) = exchange.sum([keras.ops.cast(mine, "float32")], "finite")
        return num_finite == world.size


def _refuse_foreign_scale() -> None:
    raise UserError(
        "a loss scale was put around a distributed optimizer: ranks would skip different steps, and hang",
        hint="distribute(keras.optimizers.LossScaleOptimizer(optimizer), ranks)",
    )


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
                plain_data.mean_over_ranks(world, mine.astype("float64") * world.size).astype(mine.dtype)
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


def init(job: Job | None = None) -> Communicator:
    """Initialize Horovod, and return the communicator; of one rank, if this process was started alone.

    Raises:
        EngineError: The process is one of several ranks, and Horovod is missing or cannot start.
        UserError: The back end of Keras is not supported.
    """
    return join(back_end().communicator_class(), job)
