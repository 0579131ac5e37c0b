"""The training step in one graph: forward pass, backward pass, sum over ranks, update.

TensorFlow runs an operation of a graph as soon as its inputs are available: one weight is updated while the
gradient of another is being summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import keras
import tensorflow as tf

from horovod_train.collectives.base import Communicator
from horovod_train.collectives.horovod import HorovodCommunicator
from horovod_train.config.schema import Job
from horovod_train.data.planned_step import PlannedStep
from horovod_train.data.shard import MicroBatch
from horovod_train.errors import UserError
from horovod_train.frameworks import variables
from horovod_train.frameworks.base import StepClock, StepOutcome, add_metric
from horovod_train.frameworks.loss_comparison import LossComparison
from horovod_train.frameworks.loss_scale import LossScale
from horovod_train.frameworks.python_state import PythonState
from horovod_train.frameworks.task import check_is_one_number
from horovod_train.frameworks.tensorflow.exchange import Exchange
from horovod_train.frameworks.tensorflow.task import TensorflowTask
from horovod_train.frameworks.variables_replica import VariablesReplica

Out = TypeVar("Out")

WIRE_DTYPES = {"fp32": tf.float32, "fp16": tf.float16}


class TensorflowReplica(VariablesReplica):
    """The model and optimizer of one rank.

    Args:
        model: A built Keras model, or a ``tf.Module``.
        optimizer: A Keras optimizer.
        world: The communicator.
        job: The job description.
        task: Provides loss and metrics.

    Raises:
        UserError: The model has no trainable variables.
    """

    python_state: PythonState
    one_process: LossComparison | None = None

    def __init__(
        self,
        *,
        model: keras.Model,
        optimizer: keras.Optimizer,
        world: Communicator,
        job: Job,
        task: TensorflowTask,
    ) -> None:
        scale = LossScale(is_enabled=job.train.precision == "fp16")
        super().__init__(model, optimizer, world, list(all_layers(model)), scale)
        self.task = task
        self._train = job.train
        self._guard_gradients = job.health.non_finite == "skip"
        self._always_looks = (
            self._guard_gradients or self.scale.is_enabled or job.train.clip_grad_norm is not None
        )
        self._sums = Exchange(
            world, int(job.allreduce.bucket_size_mib * 2**20), WIRE_DTYPES[job.allreduce.wire_dtype]
        )
        self._trained = list(model.trainable_variables)
        if not self._trained:
            raise UserError("the model trains nothing", hint="is any of its layers trainable?")
        optimizer.build(self._trained)
        self._tensors = [tf_variable(v) for v in self._trained]
        self._corrects_momentum = job.lr.momentum_correction
        self._bytes_per_step = self._sums.bytes_on_wire(self._tensors)
        self._statistics_before: list[tf.Tensor] = []
        self._accumulated = [
            tf.Variable(tf.zeros_like(t), trainable=False)
            for t in (self._tensors if job.train.accumulation_steps > 1 else [])
        ]
        self._zero = tf.Variable(0.0, trainable=False)  # constants must not be passed to an exchange
        self._loss_shape: list[int] = []
        self._add = tf.function(self._add_gradients, reduce_retracing=True)
        self._last = tf.function(self._exchange_and_update, reduce_retracing=True)
        self._exchange_nothing = tf.function(self._exchange_zeros)
        self._update = tf.function(self._apply)
        self._metrics = tf.function(self._compute_metrics, reduce_retracing=True)
        self._loss_alone = tf.function(self._compute_loss, reduce_retracing=True)

    # -- the step

    def step(self, step: PlannedStep, lr: float, *, want_norm: bool) -> StepOutcome:
        """Perform one optimizer step with this rank's micro-batches. Collective."""
        clock = StepClock()
        self._statistics_before = [v.numpy() for v in self._statistics] if self._guard_gradients else []
        if self._corrects_momentum:
            variables.correct_momentum(self.optimizer, lr)
        self.optimizer.learning_rate = lr
        local_loss = 0.0
        scale = tf.constant(self.scale.scale)
        looks = tf.constant(want_norm)
        gradients: list[tf.Tensor] = []
        numbers: tf.Tensor = None
        for place, (micro_batch, batch) in enumerate(step):
            clock.lap("data")
            weight = tf.constant(micro_batch.share)
            if place == len(step) - 1:
                loss_before = tf.constant(local_loss)
                gradients, numbers = self._with_loss(self._last, batch, weight, scale, loss_before, looks)
            else:
                local_loss += float(self._with_loss(self._add, batch, weight, scale))
                clock.lap("compute")
        if numbers is None:
            gradients, numbers = self._call(self._exchange_nothing)
        local, loss, norm, *num_users = numbers.numpy().tolist()
        if gradients:
            used = tuple(place for place, users in enumerate(num_users) if users > 0)
            gradients = [gradients[place] for place in used]
            norm = float(self._update(gradients, tf.constant(loss), scale, looks, used))
        is_finite = self._judge(loss, norm)
        clock.lap("compute")
        return StepOutcome(
            loss=loss,
            local_loss=local,
            is_finite=is_finite,
            numbers={
                "grad_norm": norm if want_norm or self._always_looks else None,
                "sent_bytes": self._bytes_per_step,
            },
            clock=clock,
        )

    def _gradients(
        self, batch: object, share: tf.Tensor, scale: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Return the gradients of share x loss (None: the variable is not used), and share x loss."""
        with tf.GradientTape() as tape:
            loss = self.task.loss(self.model, batch, training=True)
            self._loss_shape = [] if loss.shape.rank is None else [size or -1 for size in loss.shape]
            loss = tf.cast(tf.reshape(loss, []), tf.float32)
            weighted = loss * share
            scaled = weighted * scale
        gradients = tape.gradient(scaled, self._tensors)
        # Of a batch of any size, TensorFlow may not know the shape of a gradient (Dense of three dimensions).
        return [
            None if gradient is None else tf.ensure_shape(tf.convert_to_tensor(gradient), variable.shape)
            for gradient, variable in zip(gradients, self._tensors, strict=True)
        ], tf.stop_gradient(weighted)

    def _compute_loss(self, batch: object) -> tf.Tensor:
        return tf.reshape(self.task.loss(self.model, batch, training=True), [])

    @property
    def batch_norm(self) -> str:
        """Name of a layer that normalizes over the samples of a rank; empty: there is none."""
        layers = (
            each for each in all_layers(self.model) if isinstance(each, keras.layers.BatchNormalization)
        )
        return next((each.name for each in layers if each.trainable and not each.synchronized), "")

    def losses_of(self, batches: Sequence[object]) -> tuple[list[float], str]:
        """Return the losses of some batches, and whether the last one is another one if computed again."""
        of_task = [
            v for v in self.python_state.not_restored_values()[0].values() if isinstance(v, tf.Variable)
        ]
        state = [v for v in map(tf_variable, self.model.variables) if not v.trainable]
        before = [(variable, variable.numpy()) for variable in (*state, *of_task)]

        def restore() -> None:
            for variable, value in before:
                variable.assign(value)

        losses = []
        try:
            for batch in batches:
                restore()
                losses.append(float(self._with_loss(self._loss_alone, batch)))
            # What the last one has left is not restored before.
            again = float(self._with_loss(self._loss_alone, batches[-1]))
        finally:
            restore()
        return losses, "" if again == losses[-1] else "they are random, or depend on state"

    def _add_gradients(self, batch: object, share: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
        gradients, loss = self._gradients(batch, share, scale)
        for total, gradient in zip(self._accumulated, gradients, strict=True):
            if gradient is not None:
                total.assign_add(gradient)
        return loss

    def _exchange_and_update(
        self, batch: object, share: tf.Tensor, scale: tf.Tensor, loss_before: tf.Tensor, looks: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Process the last micro-batch, sum over ranks, and update if this rank uses all variables.

        Returns:
            The summed gradients (empty: already applied), and the step's numbers (see ``report``).
        """
        gradients, loss = self._gradients(batch, share, scale)
        is_used = [float(gradient is not None) for gradient in gradients]
        whole = [self._zeros(t) if g is None else g for g, t in zip(gradients, self._tensors, strict=True)]
        if self._accumulated:
            whole = [g + total for g, total in zip(whole, self._accumulated, strict=True)]
        local_loss = loss + loss_before
        sums, loss_of_all, num_users = self._sum(whole, local_loss, is_used)
        for total in self._accumulated:
            total.assign(tf.zeros_like(total))
        if not all(is_used):
            return sums, report(
                local_loss, loss_of_all, 0.0, num_users
            )  # num_users is not known in the graph
        norm = self._apply(sums, loss_of_all, scale, looks, tuple(range(len(sums))))
        return [], report(local_loss, loss_of_all, norm, num_users)

    def _exchange_zeros(self) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Sum over ranks without samples: the last step of an epoch may have less than one per rank."""
        zeros = [self._zeros(t) for t in self._tensors]
        sums, loss_of_all, num_users = self._sum(zeros, self._zero + 0.0, [0.0] * len(zeros))
        return sums, report(0.0, loss_of_all, 0.0, num_users)

    def _zeros(self, like: tf.Variable) -> tf.Tensor:
        return tf.fill(like.shape, tf.cast(self._zero, like.dtype))

    def _sum(
        self, gradients: Sequence[tf.Tensor], loss: tf.Tensor, is_used: Sequence[float]
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """Return the sums over ranks of gradients and loss, and each variable's number of ranks."""
        extra = tf.concat([[loss], tf.constant(is_used, tf.float32)], 0)
        *sums, extra = self._sums.sum([*gradients, extra])
        return sums, extra[0], extra[1:]

    def _apply(
        self,
        gradients: list[tf.Tensor],
        loss: tf.Tensor,
        scale: tf.Tensor,
        looks: tf.Tensor,
        used: tuple[int, ...],
    ) -> tf.Tensor:
        """Unscale and clip gradients; update the variables at these positions if loss and norm are finite.

        Gradients and loss are equal on all ranks here: all ranks make the same decision.

        Returns:
            The gradient norm; 0 if it was not computed.
        """
        if self.scale.is_enabled:
            gradients = [g * tf.cast(1.0 / scale, g.dtype) for g in gradients]

        def global_norm() -> tf.Tensor:
            return tf.linalg.global_norm([tf.cast(g, tf.float32) for g in gradients])

        norm = global_norm() if self._always_looks else tf.cond(looks, global_norm, lambda: 0.0)
        if (limit := self._train.clip_grad_norm) is not None:
            factor = tf.where(norm > limit, limit / norm, 1.0)
            gradients = [g * tf.cast(factor, g.dtype) for g in gradients]

        def update() -> tf.Tensor:
            self.optimizer.apply(gradients, [self._trained[place] for place in used])
            return norm

        return tf.cond(tf.math.is_finite(loss) & tf.math.is_finite(norm), update, lambda: norm)

    def _judge(self, loss: float, norm: float) -> bool:
        """Return whether the update was performed; if not, restore the running statistics."""
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        if math.isfinite(loss):
            self.scale.update(is_finite=is_finite)
        if not is_finite:
            for variable, before in zip(self._statistics, self._statistics_before, strict=False):
                variable.assign(before)
        return is_finite

    def _with_loss(self, work: Callable[..., Out], *arguments: object) -> Out:
        """Call a function that computes the task's loss.

        Raises:
            UserError: The loss is not a scalar.
        """
        try:
            return self._call(work, *arguments)
        except (ValueError, TypeError, tf.errors.InvalidArgumentError):
            check_is_one_number(self._loss_shape)
            raise

    def _call(self, exchange: Callable[..., Out], *arguments: object) -> Out:
        world = self._world
        return (
            world.call(lambda: exchange(*arguments), "the gradients of a step", self._bytes_per_step)
            if isinstance(world, HorovodCommunicator)
            else exchange(*arguments)
        )

    # -- other methods

    def evaluate(self, batches: Iterable[tuple[MicroBatch, object]]) -> dict[str, tuple[float, int]]:
        """Return (sum, number of samples) of each metric over this rank's batches."""
        sums: dict[str, tuple[float, int]] = {}
        for micro_batch, batch in batches:
            for name, value in self._metrics(batch).items():
                add_metric(sums, name, value.numpy(), len(micro_batch))
        return sums

    def _compute_metrics(self, batch: object) -> dict[str, tf.Tensor]:
        compute = getattr(self.task, "metrics", None)
        if compute is None:
            return {"loss": tf.convert_to_tensor(self.task.loss(self.model, batch, training=False))}
        return {name: tf.convert_to_tensor(value) for name, value in compute(self.model, batch).items()}

    def broadcast(self) -> None:
        """Broadcast weights and statistics from rank 0.

        Raises:
            UserError: Ranks have created different models.
        """
        variables.broadcast(self._world, variables.named(variables.shared_state(self.model)))

    def device_name(self) -> str:
        """Return the name of the model's device."""
        return str(self._tensors[0].device.rpartition("device:")[2].lower())


def report(local_loss: tf.Tensor, loss: tf.Tensor, norm: tf.Tensor, num_users: tf.Tensor) -> tf.Tensor:
    """Return the numbers of a step as one tensor, so that they are copied to the host at once."""
    return tf.concat([[local_loss], [loss], [norm], num_users], 0)


def tf_variable(variable: keras.Variable) -> tf.Variable:
    """Return the TensorFlow variable of a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def all_layers(model: keras.Model) -> Iterator[keras.Layer]:
    """Yield all layers of a Keras model, or all submodules of a ``tf.Module``."""
    if isinstance(model, keras.Layer):
        yield from model._flatten_layers()  # noqa: SLF001  (Keras has no public function for this)
    else:
        yield from model.submodules
