"""TensorFlow on Horovod, for jobs and for users' own training loops.

TensorflowTask            the interface of a task
TensorflowCommunicator    communicator that uses Horovod's TensorFlow binding
Exchange                  sums of tensors over ranks, in a graph or eagerly
init                      starts Horovod in a user's training loop
DistributedGradientTape   averages gradients over ranks in a user's training loop
TensorflowReplica         training step in one graph
TensorflowFramework       replica, readers and random state of a job
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import keras
import numpy as np
import tensorflow as tf

from horovod_train.checkpoint.arrays import ArrayBlob
from horovod_train.collectives.base import Communicator, Mesh
from horovod_train.collectives.horovod import Array, HorovodCommunicator, connect
from horovod_train.config.schema import Job
from horovod_train.data.shard import MicroBatch, PlannedStep
from horovod_train.errors import UserError
from horovod_train.frameworks import exchange
from horovod_train.frameworks.base import (
    StepClock,
    StepOutcome,
    add_metric,
    check_is_one_number,
    eval_data_of,
    load_task,
    make_optimizer,
    report_unused_methods,
    train_data_of,
)
from horovod_train.frameworks.devices import join, own_gpu
from horovod_train.frameworks.exchange import name_of_exchange
from horovod_train.frameworks.python_state import PythonState, state_of_task
from horovod_train.frameworks.reader import NumpyReader, load_rng_state, mix, rng_state, start_loader_server
from horovod_train.plugins.frameworks import variables
from horovod_train.plugins.frameworks.variables import LossComparison, LossScale, VariablesReplica
from horovod_train.plugins.frameworks.variables import broadcast as broadcast_variables

REQUIRED = ("model", "loss")
OPTIONAL = ("train_data", "eval_data", "metrics")


class TensorflowTask(Protocol):
    """The required methods of a task.

    A task is a class with these methods. The optional ones are not in the protocol.

        class MyTask:
            def model(self): ...                         a keras.Model or tf.Module
            def train_data(self): ...                    samples: __len__ and __getitem__, NumPy arrays
            def loss(self, model, batch, training): ...  mean loss over the samples of a batch
            def eval_data(self): ...                     optional: data for evaluation
            def metrics(self, model, batch): ...         optional: {name: one value per sample}

    ``loss`` and ``metrics`` are compiled with ``tf.function``.
    """

    def model(self) -> Any:
        """Return a new model."""
        ...

    def train_data(self) -> Any:
        """Return the training samples."""
        ...

    def loss(self, model: Any, batch: Any, training: bool) -> tf.Tensor:
        """Return the mean loss over a batch, shape []."""
        ...


class TensorflowCommunicator(HorovodCommunicator):
    """Communicator for TensorFlow."""

    BINDING = "tensorflow"

    def __init__(self, settings: Mapping[str, str]) -> None:
        super().__init__(settings)
        # Operations in a graph raise these instead of Horovod's error.
        self.lost = (*self.lost, tf.errors.UnknownError, tf.errors.FailedPreconditionError)

    def allreduce_array(self, array: Array, name: str) -> Array:
        with tf.device("CPU:0"):
            total = self.hvd.allreduce(tf.constant(array), op=self.hvd.Sum, name=name)
        result: Array = total.numpy()
        return result

    def allgather_arrays(self, array: Array, name: str) -> Array:
        """Return the concatenated arrays of all ranks, by rank."""
        with tf.device("CPU:0"):
            joined: Array = self.hvd.allgather(tf.constant(array), name=name).numpy()
        return joined


NARROW = (tf.bfloat16, tf.float16)  # summed in float32: Horovod has no bfloat16, and fp16 overflows


class Exchange(exchange.Exchange):
    """Sums lists of TensorFlow tensors over ranks, in a graph or eagerly.

    Each bucket is one all-reduce. TensorFlow runs an operation of a graph as soon as its inputs are
    available: a bucket is sent while the backward pass computes the next one.

    Do not pass constants of a graph: TensorFlow folds operations on constants when it optimizes the graph,
    so their collective would run on one rank and not on others.

    ``seconds`` is 0: waiting cannot be measured in a graph.
    """

    def dense(self, array: tf.Tensor) -> tf.Tensor:
        """Return a dense tensor: the gradient of an embedding is ``IndexedSlices``."""
        return tf.convert_to_tensor(array)

    def kind(self, array: tf.Tensor) -> tf.DType:
        if array.dtype in NARROW:
            return tf.float32
        return (self.wire_dtype or tf.float32) if array.dtype == tf.float32 else array.dtype

    def size_on_wire_bytes(self, array: tf.Tensor) -> int:
        return int(array.shape.num_elements()) * int(self.kind(array).size)

    def pack(self, arrays: Sequence[tf.Tensor], kind: tf.DType) -> tf.Tensor:
        """Return one flat tensor in the wire dtype with the elements of all tensors."""
        flat = [tf.reshape(tf.cast(array, kind), [-1]) for array in arrays]
        return tf.concat(flat, 0) if len(flat) > 1 else flat[0]

    def reduce(self, buckets: Iterable[tf.Tensor], names: Iterable[str]) -> Iterator[tf.Tensor]:
        """Yield the sum of each bucket over ranks."""
        assert isinstance(self.world, TensorflowCommunicator)
        hvd = self.world.hvd
        for bucket, name in zip(buckets, names, strict=False):
            # The name must be equal in all graphs that contain this operation, on all ranks.
            yield hvd.allreduce(bucket, op=hvd.Sum, name=name, ignore_name_scope=True)

    def unpack(self, total: tf.Tensor, arrays: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the parts of a summed bucket in the types and shapes of its tensors."""
        lengths = [int(array.shape.num_elements()) for array in arrays]
        parts = tf.split(total, lengths) if len(arrays) > 1 else [total]
        return [tf.cast(tf.reshape(p, a.shape), a.dtype) for p, a in zip(parts, arrays, strict=True)]


Sources = TypeVar("Sources")
"""A nested structure of variables."""


def init() -> Communicator:
    """Initialize Horovod, and return the communicator; of one rank, if this process was started alone.

    Raises:
        EngineError: The process is one of several ranks, and Horovod is missing or cannot start.
    """
    return join(TensorflowCommunicator)


class DistributedGradientTape:
    """A gradient tape that averages gradients over ranks.

    It works in ``tf.function`` or eagerly. Example::

        ranks = init()
        broadcast(ranks, model.variables)
        with tf.GradientTape() as tape:
            loss = ...
        gradients = DistributedGradientTape(tape, ranks).gradient(loss, variables)

    Args:
        tape: The tape that recorded the loss.
        world: The communicator.
        bucket_size_mib: Approximate size of a bucket of gradients.
        wire_dtype: Data type in which float32 gradients are sent: fp32 or fp16.
    """

    def __init__(
        self,
        tape: tf.GradientTape,
        world: Communicator,
        *,
        bucket_size_mib: float = 8.0,
        wire_dtype: Literal["fp32", "fp16"] = "fp32",
    ) -> None:
        self._tape = tape
        wire = {"fp32": tf.float32, "fp16": tf.float16}[wire_dtype]
        self._exchange = Exchange(world, int(bucket_size_mib * 2**20), wire)

    def gradient(
        self, target: tf.Tensor, sources: Sources, output_gradients: tf.Tensor | None = None
    ) -> Sources:
        """Return the mean gradient over ranks; None for a source on which the target does not depend.

        Collective: the target must depend on the same sources on all ranks; otherwise, ranks are reported
        as missing from the exchange.

        Args:
            target: A loss.
            sources: A nested structure of TensorFlow or Keras variables.
            output_gradients: As in ``tf.GradientTape.gradient``.
        """
        values = tf.nest.map_structure(lambda v: getattr(v, "value", v) if _is_keras(v) else v, sources)
        found = self._tape.gradient(target, values, output_gradients)
        flat = tf.nest.flatten(found)
        used = [gradient for gradient in flat if gradient is not None]
        means = iter(self._exchange.mean(used, name_of_exchange(flat)))
        return tf.nest.pack_sequence_as(found, [None if g is None else next(means) for g in flat])


def broadcast(world: Communicator, variables: Iterable[tf.Variable | keras.Variable]) -> None:
    """Assign rank 0's values to variables. Call this before the first step.

    Raises:
        UserError: Ranks have different variables.
    """
    broadcast_variables(world, {str(number): variable for number, variable in enumerate(variables)})


def _is_keras(variable: object) -> bool:
    return type(variable).__module__.startswith("keras.")


Out = TypeVar("Out")

WIRE_DTYPES = {"fp32": tf.float32, "fp16": tf.float16}


class TensorflowReplica(VariablesReplica):
    """The model and optimizer of one rank.

    A step is one graph: forward pass, backward pass, sum over ranks, update. TensorFlow runs an operation
    of a graph as soon as its inputs are available: one weight is updated while the gradient of another is
    being summed.

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
            clock.end_phase("data")
            weight = tf.constant(micro_batch.share)
            if place == len(step) - 1:
                loss_before = tf.constant(local_loss)
                gradients, numbers = self._with_loss(self._last, batch, weight, scale, loss_before, looks)
            else:
                local_loss += float(self._with_loss(self._add, batch, weight, scale))
                clock.end_phase("compute")
        if numbers is None:
            gradients, numbers = self._call(self._exchange_nothing)
        local, loss, norm, *num_users = numbers.numpy().tolist()
        if gradients:
            used = tuple(place for place, users in enumerate(num_users) if users > 0)
            gradients = [gradients[place] for place in used]
            norm = float(self._update(gradients, tf.constant(loss), scale, looks, used))
        is_finite = self._judge(loss, norm)
        clock.end_phase("compute")
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


POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp16": "mixed_float16"}


class TensorflowFramework:
    """TensorFlow, for one job in one process."""

    def __init__(self) -> None:
        self._seeds: list[tf.Variable] = []

    def connect(self, job: Job) -> Communicator:
        """Initialize Horovod, and return the communicator; of one rank, if this process was started alone."""
        if keras.backend.backend() != "tensorflow":
            raise UserError(
                f"Keras uses the back end {keras.backend.backend()}, but the job's framework is tensorflow",
                hint="unset KERAS_BACKEND",
            )
        if job.launch.threads_per_rank is not None:
            tf.config.threading.set_intra_op_parallelism_threads(job.launch.threads_per_rank)
        if job.data.num_workers:
            start_loader_server("horovod_train.frameworks.reader")
        return connect(TensorflowCommunicator, job)

    def prepare(self, job: Job, mesh: Mesh) -> tuple[TensorflowReplica, NumpyReader, NumpyReader | None]:
        """Return this rank's replica and the readers of training and evaluation data."""
        world = mesh.data
        if job.train.deterministic:
            tf.config.experimental.enable_op_determinism()
        choose_device(job, mesh.world)
        keras.utils.clear_session()  # layer names, which checkpoints contain, are numbered from 1
        keras.config.set_dtype_policy(POLICIES[job.train.precision])
        keras.utils.set_random_seed(mix(job.train.seed, 0, 0) % 2**32)
        task = load_task(job.task, job.task_args, REQUIRED)
        report_unused_methods(task, (*REQUIRED, *OPTIONAL), world)
        read = partial(NumpyReader, data=job.data, seed=job.train.seed, task=job.task)
        train_reader = read(train_data_of(job, task))
        eval_data = eval_data_of(job, task)
        model = task.model()
        if isinstance(model, keras.Layer) and not model.built:
            task.loss(model, train_reader.first(), training=False)
        self._seeds = variables.seed_states(model)
        replica = TensorflowReplica(
            model=model,
            optimizer=make_optimizer(
                job, world.size, lambda factory, args: factory(learning_rate=job.lr.base_lr, **args)
            ),
            world=world,
            job=job,
            task=task,
        )
        eval_reader = None if eval_data is None else read(eval_data)
        replica.python_state = state_of_task(mesh, task, [train_reader, eval_reader])
        replica.one_process = LossComparison(world, train_reader, replica, job)
        return replica, train_reader, eval_reader

    def rng_state(self) -> tuple[object, Mapping[str, ArrayBlob]]:
        """Return the state of Python's, NumPy's, TensorFlow's and the model's generators."""
        state = tf.random.get_global_generator().state.numpy()
        return rng_state({"tensorflow": state, "model": [v.numpy() for v in self._seeds]})

    def load_rng_state(self, tree: object, arrays: Mapping[str, ArrayBlob]) -> None:
        """Load the state of all random generators."""
        own = load_rng_state(tree, arrays)
        tf.random.get_global_generator().state.assign(own["tensorflow"])
        for variable, value in zip(self._seeds, own["model"], strict=True):
            variable.assign(value)

    def seed(self, seed: int, rank: int, epoch: int) -> None:
        """Seed all random generators of this rank."""
        mixed = mix(seed, rank, epoch)
        random.seed(mixed)
        np.random.seed(mixed % 2**32)
        tf.random.set_seed(mixed % 2**32)
        tf.random.get_global_generator().reset_from_seed(mixed % 2**63)
        variables.seed(self._seeds, mixed)


def choose_device(job: Job, world: Communicator) -> None:
    """Make only the rank's GPU visible to TensorFlow, or none.

    Raises:
        UserError: The job requires a GPU, and this rank has none.
    """
    gpus = tf.config.list_physical_devices("GPU")
    own = own_gpu(job, world, len(gpus))
    if own is None:
        tf.config.set_visible_devices([], "GPU")
        return
    tf.config.set_visible_devices(gpus[own], "GPU")
    tf.config.experimental.set_memory_growth(gpus[own], enable=True)
