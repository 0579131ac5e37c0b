"""Keras on Horovod: replica, readers and random state of a job, and training by ``model.fit``.

KerasTask          the interface of a task
KerasReplica       the model of one rank: state, evaluation, running statistics
check_joint_loss   refuses losses whose mean over ranks is not the loss of the joint batch
KerasFramework     training of a job
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, Protocol

import keras
from keras.src.backend import get_keras_mask

from horovod_train.checkpoint.arrays import ArrayBlob
from horovod_train.collectives.base import Communicator, Mesh, any_rank, mean_over_ranks
from horovod_train.collectives.horovod import connect
from horovod_train.config.schema import Job
from horovod_train.data.shard import MicroBatch, PlannedStep
from horovod_train.errors import UserError
from horovod_train.frameworks.base import (
    Bridge,
    StepClock,
    StepOutcome,
    eval_data_of,
    load_task,
    make_optimizer,
    report_unused_methods,
    train_data_of,
)
from horovod_train.frameworks.callbacks import (
    Attributes,
    CallbackState,
    GuardedLearningRate,
    SavesCallbacks,
    check_callbacks,
    report_unsaved,
)
from horovod_train.frameworks.exchange import Exchange
from horovod_train.frameworks.python_state import state_of_task
from horovod_train.frameworks.reader import NumpyReader, load_rng_state, mix, rng_state, start_loader_server
from horovod_train.plugins.frameworks import variables
from horovod_train.plugins.frameworks.variables import VariablesReplica
from horovod_train.plugins.keras.back_ends import back_end
from horovod_train.plugins.keras.data import feed
from horovod_train.plugins.keras.optimizer import (
    Logs,
    broadcast,
    distribute,
    exact_metrics,
    exchange_of,
    set_learning_rate,
)


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


REQUIRED = ("model", "compile")
OPTIONAL = ("train_data", "eval_data", "callbacks")


class KerasTask(Protocol):
    """The required methods of a task.

    A task is a class with these methods. The optional ones are not in the protocol.

        class MyTask:
            def model(self): ...        a keras.Model, not compiled
            def train_data(self): ...   samples (x, y): __len__ and __getitem__, NumPy arrays
            def compile(self): ...      arguments of model.compile except the optimizer: {"loss": ...}
            def eval_data(self): ...    optional: data for evaluation
            def callbacks(self): ...    optional: a list of Keras callbacks
    """

    def model(self) -> keras.Model:
        """Return a new model."""
        ...

    def train_data(self) -> Any:
        """Return the training samples."""
        ...

    def compile(self) -> dict[str, Any]:
        """Return the arguments of ``model.compile`` except the optimizer, with the loss."""
        ...


def check_reduction(loss: object) -> None:
    """Raise UserError if a loss is not a mean over samples."""
    for one in keras.tree.flatten(loss):
        reduction = getattr(one, "reduction", "sum_over_batch_size")
        if reduction not in {"sum_over_batch_size", "mean"}:
            raise UserError(
                f"the loss {one.name} has reduction {reduction!r}: it is not a mean over samples, and "
                "the mean over ranks would not be the loss of the joint batch",
                hint="use reduction='sum_over_batch_size', Keras's default",
            )


def check_joint_loss(model: keras.Model, inputs: Any, loss: object) -> None:
    """Refuse a built model whose loss on a batch is not the mean of the losses on the batch's parts.

    In the last step of an epoch, ranks have different numbers of samples. Sample weights correct a loss
    that is a mean over samples. They have no effect on losses that layers add, or on a mean over the values
    that a mask keeps.

    The model is called with ``inputs`` of one sample.

    Raises:
        UserError: Layers add losses of a batch, or a mask selects the values that are averaged.
    """
    before = [(variable, variable.numpy()) for variable in model.variables]
    outputs = model(inputs, training=False)
    own = [loss for layer in [model, *model._flatten_layers()] for loss in layer._get_own_losses()]  # noqa: SLF001
    for variable, value in before:  # such as the state of a recurrent layer
        variable.assign(value)
    if own:
        raise UserError(
            "layers of the model add losses of a batch (activity_regularizer, add_loss), which sample "
            "weights do not scale: their mean over ranks is not the loss of the joint batch",
            hint="add the term to the loss that compile() gets, or use framework: torch, tensorflow or jax",
        )
    ignoring = [each for each in keras.tree.flatten(loss) if getattr(each, "ignore_class", None) is not None]
    if ignoring or any(get_keras_mask(each) is not None for each in keras.tree.flatten(outputs)):
        origin = "ignore_class" if ignoring else "mask_zero, Masking"
        raise UserError(
            f"the loss is a mean over unmasked values ({origin}), whose number differs between ranks",
            hint="take the mask off the model's output, and give weights with the samples: (x, y, weights)",
        )


POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp16": "mixed_float16"}


class KerasFramework:
    """Keras, for one job in one process."""

    def __init__(self) -> None:
        self._seeds: list[Any] = []

    def connect(self, job: Job) -> Communicator:
        """Initialize Horovod, and return the communicator; of one rank, if this process was started alone."""
        if job.launch.threads_per_rank is not None:
            back_end().limit_threads(job.launch.threads_per_rank)
        if job.train.deterministic:
            back_end().be_deterministic()
        if job.data.num_workers:
            start_loader_server("horovod_train.frameworks.reader")
        return connect(back_end().communicator_class(), job)

    def prepare(self, job: Job, mesh: Mesh) -> tuple[KerasReplica, NumpyReader, NumpyReader | None]:
        """Return this rank's replica and the readers of training and evaluation data."""
        world = mesh.data
        self._job, self._world = job, world
        back_end().choose_device(job, mesh.world)
        keras.utils.clear_session()  # layer names, which checkpoints contain, are numbered from 1
        keras.config.set_dtype_policy(POLICIES[job.train.precision])
        keras.utils.set_random_seed(mix(job.train.seed, 0, 0) % 2**32)
        self._task: KerasTask = load_task(job.task, job.task_args, REQUIRED)
        report_unused_methods(self._task, (*REQUIRED, *OPTIONAL), world)
        read = partial(NumpyReader, data=job.data, seed=job.train.seed, task=job.task)
        self._train_reader = read(train_data_of(job, self._task))
        eval_data = eval_data_of(job, self._task)
        model = self._task.model()
        if not model.built:
            model(self._train_reader.first()[0])
        optimizer = distribute(
            make_optimizer(job, world.size, partial(self._make_optimizer, job)),
            world,
            bucket_size_mib=job.allreduce.bucket_size_mib,
            wire_dtype=job.allreduce.wire_dtype,
        )
        self._exchange = exchange_of(optimizer)
        arguments = self._task.compile()
        check_reduction(arguments.get("loss"))
        refuse_joined_steps(arguments)
        if world.size > 1:
            back_end().check_compile(arguments)
        if world.size > 1 or job.train.accumulation_steps > 1:
            check_joint_loss(model, self._train_reader.first()[0], arguments.get("loss"))
        model.compile(optimizer=optimizer, **arguments)
        optimizer.build(model.trainable_variables)
        self._seeds = variables.seed_states(model)
        self.model = model
        self._callbacks = [*getattr(self._task, "callbacks", list)()]
        check_callbacks(self._callbacks, "keras")
        report_unsaved(self._callbacks, world)
        self._replica = KerasReplica(model, world)
        eval_reader = None if eval_data is None else read(eval_data)
        readers = [self._train_reader, eval_reader]
        self._replica.python_state = state_of_task(mesh, self._task, readers)
        return self._replica, self._train_reader, eval_reader

    def fit(self, bridge: Bridge) -> None:
        """Train to the end of the job, with one call of ``model.fit`` per epoch."""
        state = Attributes(self._callbacks)
        rate = GuardedLearningRate(self._read_rate, self._write_rate)
        accumulation_steps = self._job.train.accumulation_steps
        bytes_per_step = self._exchange.bytes_on_wire([v.value for v in self.model.trainable_variables])
        bridge.begin()
        own = [_OneTraining(callback, bridge.num_epochs) for callback in self._callbacks]
        is_trained, finalize = not bridge.is_done, self.model.optimizer.finalize_variable_values
        # Keras calls it at the end of each fit: averages (use_ema) would replace the weights in each epoch.
        self.model.optimizer.finalize_variable_values = lambda _: None
        while not bridge.is_done:
            steps = bridge.rest_of_epoch()
            if steps:
                timer = _StepTimer(
                    bridge, self._world, self._exchange, rate, steps, accumulation_steps, bytes_per_step
                )
                batches = feed(
                    steps,
                    self._train_reader.first(),
                    accumulation_steps=accumulation_steps,
                    world_size=self._world.size,
                )
                with back_end().stream(batches) as data:
                    self.model.fit(
                        data,
                        steps_per_epoch=len(steps) * accumulation_steps,
                        initial_epoch=bridge.epoch,
                        epochs=bridge.epoch + 1,
                        shuffle=False,
                        verbose=0,
                        callbacks=[timer, *own, _StepReporter(timer, state, self._replica.callbacks)],
                    )
            elif bridge.is_epoch_complete:
                bridge.finish_epoch()
                bridge.after_epoch()
            if any_rank(self._world, flag=bool(steps and self.model.stop_training)):
                break
        if own:
            bridge.before_on_train_end()
        for callback in own:
            callback.end()
        if is_trained:
            finalize(self.model.trainable_weights)
        bridge.end()

    def _read_rate(self) -> list[float]:
        back_end().sync_variables(self.model)
        return [float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))]

    def _write_rate(self, rates: list[float]) -> None:
        if self._job.lr.momentum_correction:
            back_end().sync_variables(self.model)
            variables.correct_momentum(self.model.optimizer, rates[0])
        set_learning_rate(self.model, rates[0])

    def _make_optimizer(self, job: Job, factory: Any, args: Mapping[str, Any]) -> keras.Optimizer:
        settings = {**args, "learning_rate": job.lr.base_lr}
        if job.train.clip_grad_norm is not None:
            settings["global_clipnorm"] = job.train.clip_grad_norm
        if job.train.accumulation_steps > 1:
            settings["gradient_accumulation_steps"] = job.train.accumulation_steps
        return factory(**settings)

    def rng_state(self) -> tuple[object, Mapping[str, ArrayBlob]]:
        """Return the state of Python's, NumPy's, the back end's and the model's generators."""
        back_end().sync_variables(self.model)
        return rng_state({"model": [v.numpy() for v in self._seeds], "torch": back_end().generators()})

    def load_rng_state(self, tree: object, arrays: Mapping[str, ArrayBlob]) -> None:
        """Load the state of all random generators."""
        own = load_rng_state(tree, arrays)
        for variable, value in zip(self._seeds, own["model"], strict=True):
            variable.assign(value)
        back_end().load_generators(own["torch"])

    def seed(self, seed: int, rank: int, epoch: int) -> None:
        """Seed all random generators of this rank."""
        mixed = mix(seed, rank, epoch)
        keras.utils.set_random_seed(mixed % 2**32)
        random.seed(mixed)
        variables.seed(self._seeds, mixed)


def refuse_joined_steps(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of ``compile`` that let Keras report several steps as one.

    Raises:
        UserError: There is one.
    """
    if (number := arguments.get("steps_per_execution", 1)) != 1:
        raise UserError(
            f"compile() says steps_per_execution={number!r}, and a job sets the learning rate of each step, "
            "and records its loss",
            hint="leave it out",
        )


class _StepTimer(keras.callbacks.Callback):
    """Callback that prepares and times the steps of one epoch; it is called before all other callbacks."""

    def __init__(
        self,
        bridge: Bridge,
        world: Communicator,
        exchange: Exchange,
        rate: GuardedLearningRate,
        steps: Sequence[PlannedStep],
        accumulation_steps: int,
        bytes_per_step: int,
    ) -> None:
        super().__init__()
        self._bridge = bridge
        self._world = world
        self._exchange = exchange
        self._rate = rate
        self._steps = steps
        self._accumulation_steps = accumulation_steps
        self._bytes_per_step = bytes_per_step
        self._clock = StepClock()
        self._loss = _LossOfStep()
        self._lr: float | None = None
        self._generators = back_end().generators()
        self._has_finished = False

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        """Set the learning rate before the first micro-batch of a step."""
        if batch == 0:
            # ``fit`` draws random numbers when it begins. A resumed epoch has two calls of ``fit``.
            back_end().load_generators(self._generators)
        if not back_end().reads_inside_step:
            self._clock.end_phase("data")
        if batch % self._accumulation_steps == 0:
            self._lr = self._bridge.lr
            self._rate.set([self._lr])

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Record the loss and the end of the update; a step's time does not include later callbacks."""
        number, place = divmod(batch, self._accumulation_steps)
        step = self._steps[number]
        has_batch = place < len(step)
        self._loss.add(float(logs["loss"]), len(step.share.micro_batches[place]) if has_batch else 1)
        self._clock.end_phase("compute")

    def end_step(self, batch: int) -> None:
        """Report a step after its last micro-batch."""
        number, place = divmod(batch, self._accumulation_steps)
        step = self._steps[number]
        if place < self._accumulation_steps - 1:
            return
        local_loss = self._loss.take() / self._world.size
        (loss,) = self._world.allreduce_sum([local_loss])
        wait_s, self._exchange.seconds = self._exchange.seconds, 0.0
        if wait_s:
            self._clock.move("compute", "allreduce_wait", wait_s)
        outcome = StepOutcome(
            loss=loss,
            local_loss=local_loss,
            is_finite=math.isfinite(loss),
            numbers={"sent_bytes": self._bytes_per_step},
            clock=self._clock,
        )
        assert self._lr is not None
        self._bridge.after_step(step, outcome, self._lr)
        if self._bridge.is_done and not self._bridge.is_epoch_complete:
            self.model.stop_training = True
        self._clock = StepClock()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Average training metrics over ranks, evaluate, and pass both to later callbacks in ``logs``."""
        mine = {name: (float(value), 1) for name, value in logs.items()}
        logs.update(mean_over_ranks(self._world, mine))
        if self._bridge.is_epoch_complete:
            metrics = self._bridge.finish_epoch()
            logs.update({f"val_{name}": value for name, value in metrics.items()})
            self._has_finished = True

    def end_epoch(self) -> None:
        """Report the end of an epoch, if the epoch is complete."""
        if self._has_finished:
            self._bridge.after_epoch()


class _StepReporter(keras.callbacks.Callback):
    """Callback that reports ends of steps and epochs; called last, to save effects of other callbacks."""

    def __init__(self, timer: _StepTimer, state: Attributes, saved: CallbackState) -> None:
        super().__init__()
        self._timer = timer
        self._state = state
        self._saved = saved

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Load the state of callbacks in the first call of ``fit``."""
        if not self._state.is_loaded:
            self._state.load(self._saved)

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Report a step after its last micro-batch."""
        self._timer.end_step(batch)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Report the end of an epoch."""
        self._timer.end_epoch()


class _LossOfStep:
    """Loss of a step, computed from the mean loss since the start of ``fit``, which Keras reports."""

    def __init__(self) -> None:
        self._num_samples = 0
        self._total = 0.0
        self._losses: list[float] = []

    def add(self, mean_of_epoch: float, num_samples: int) -> None:
        """Record the mean after a further micro-batch with ``num_samples`` samples."""
        self._num_samples += num_samples
        total = mean_of_epoch * self._num_samples
        self._losses.append((total - self._total) / num_samples)
        self._total = total

    def take(self) -> float:
        """Return the mean over the micro-batches since the last call."""
        mean = sum(self._losses) / len(self._losses)
        self._losses = []
        return mean


class _OneTraining(keras.callbacks.Callback):
    """Wrapper of a user's callback, which calls its ``on_train_begin`` and ``on_train_end`` once per run."""

    def __init__(self, inner: keras.callbacks.Callback, num_epochs: int) -> None:
        super().__init__()
        self._inner, self._num_epochs = inner, num_epochs
        self._has_begun = False
        for name in dir(keras.callbacks.Callback):
            if name.startswith("on_") and name not in {"on_train_begin", "on_train_end"}:
                setattr(self, name, getattr(inner, name))

    def set_model(self, model: keras.Model) -> None:
        """Pass the model to the callback."""
        super().set_model(model)
        self._inner.set_model(model)

    def set_params(self, params: Mapping[str, object]) -> None:
        """Pass the parameters to the callback, with the epochs of the whole job."""
        super().set_params({**params, "epochs": self._num_epochs})
        self._inner.set_params({**params, "epochs": self._num_epochs})

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Call ``on_train_begin`` of the callback, in the first call only."""
        if not self._has_begun:
            self._has_begun = True
            self._inner.on_train_begin(logs)

    def end(self) -> None:
        """Call ``on_train_end`` of the callback, if training has begun."""
        if self._has_begun:
            self._inner.on_train_end({})
