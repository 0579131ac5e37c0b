"""Interface between the training loop and frameworks. The loop imports no framework.

    StepClock, StepOutcome   wall time of a step by phase, and the result of a step
    Replica, Reader          model and optimizer of this rank, and reader of a dataset
    Framework                a framework, for one job: creates the replica and the readers
    Bridge                   a run, for a framework with its own training loop
    load_task                imports the task of a job
    make_optimizer           creates the optimizer of a job

Tasks are users' classes with the methods that the framework calls. No base class is required. Every task
has ``model()`` and ``train_data()``, and may have ``eval_data()``. The other methods depend on whether the
task computes the loss; each framework lists them in an interface, such as ``TorchTask``.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from difflib import get_close_matches
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import numpy as np

from horovod_train.checkpoint.arrays import ArrayBlob, ReplicaState
from horovod_train.collectives.base import Communicator, Mesh
from horovod_train.config.schema import Job
from horovod_train.data.dataset import evaluation_files, training_files
from horovod_train.data.shard import MicroBatch, Order, PlannedStep, PlannedSteps
from horovod_train.errors import HorovodTrainError, UserError, translated
from horovod_train.events.types import WAIT_PHASE
from horovod_train.lr.policy import ArgumentScaling
from horovod_train.registry import TASKS, load_location, optimizers_of


@dataclass(slots=True)
class StepClock:
    """Clock that splits a step's wall time into phases. Phases that cannot be measured are absent."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=perf_counter)
    _begun: float = -1.0

    def __post_init__(self) -> None:
        self._begun = self._last

    @property
    def total_s(self) -> float:
        """Seconds from the start to the end of the last phase."""
        return self._last - self._begun

    @property
    def own_s(self) -> float | None:
        """Seconds without the wait for the all-reduce; None: unknown."""
        wait_s = self.seconds.get(WAIT_PHASE)
        return None if wait_s is None else self.total_s - wait_s

    def end_phase(self, phase: str) -> None:
        """Add the time since the end of the last phase (or the start) to a phase."""
        now = perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def settle(self, ranks: Communicator, read: Callable[[], object]) -> None:
        """Wait for the device, if this clock requires it; no effect on a CPU."""

    def move(self, source: str, target: str, seconds: float) -> None:
        """Move seconds that were measured elsewhere from one phase to another."""
        self.seconds[source] -= seconds
        self.seconds[target] = self.seconds.get(target, 0.0) + seconds


@dataclass(slots=True)  # not frozen: creating a frozen instance takes four times as long
class StepOutcome:
    """Result of one optimizer step.

    Attributes:
        loss: Mean loss over the samples of the step on all ranks; equal on every rank.
        local_loss: This rank's contribution to that mean: the sum of share x loss.
        is_finite: False: the loss or a gradient was not finite, and the weights were not updated.
        clock: Time of each phase.
        numbers: Further numbers of the step by name; None: not computed. Among them are ``grad_norm`` (L2
            norm of the global gradient before clipping), ``sent_bytes`` (bytes that this rank passed to
            collectives) and ``flops`` (operations of its forward and backward passes). A metric of the
            catalog names the number that it exports.
        was_executed: False: an earlier step had stopped training, so this step had no effect.
    """

    loss: float
    local_loss: float
    is_finite: bool
    clock: StepClock
    numbers: Mapping[str, float | None] = field(default_factory=dict)
    was_executed: bool = True

    @property
    def grad_norm(self) -> float | None:
        """L2 norm of the global gradient before clipping; None: not computed."""
        return self.numbers.get("grad_norm")

    def outcome(self) -> StepOutcome:
        """Return this outcome."""
        return self

    def is_ready(self) -> bool:
        """Return True."""
        return True


class PendingOutcome(Protocol):
    """A future of a step's outcome. A ``StepOutcome`` is a completed one."""

    def outcome(self) -> StepOutcome:
        """Wait for the outcome, and return it; raise PeerError if another rank was lost."""
        ...

    def is_ready(self) -> bool:
        """Return whether the outcome is available."""
        ...


class Dataset(Protocol):
    """Dataset that a task's ``train_data()`` returns.

    Two methods are optional: ``__getitems__(indices)`` reads several samples at once, ``collate(samples)``
    joins them into a batch.
    """

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return a sample."""
        ...


class Replica(Protocol):
    """The model and optimizer of one rank.

    It performs optimizer steps, and converts its state to plain arrays.
    """

    @property
    def lag_steps(self) -> int:
        """Number of steps by which outcomes are read later; equal on every rank. 0: immediately."""
        ...

    @property
    def replicas_identical(self) -> bool:
        """Whether all ranks have equal weights and optimizer state; true after ``PlannedStep.is_last``."""
        ...

    @property
    def requires_equal_micro_batches(self) -> bool:
        """Whether all ranks must read the same number of micro-batches in a step."""
        ...

    @property
    def passes_are_collective(self) -> bool:
        """Whether forward passes contain collectives; then all ranks must run the same number of passes."""
        ...

    def step(self, step: PlannedStep, lr: float, *, want_norm: bool) -> PendingOutcome:
        """Perform one optimizer step with this rank's part of its samples.

        A non-finite step is skipped immediately; its outcome may become available after later steps.

        Raises:
            PeerError: Another rank was lost.
        """
        ...

    def evaluate(self, batches: Iterable[tuple[MicroBatch, object]]) -> dict[str, tuple[float, int]]:
        """Return (sum, count) of each metric over this rank's batches, pairs (number of samples, batch)."""
        ...

    def sync_buffers(self) -> None:
        """Average buffers that each rank updates independently, such as running means, over ranks."""
        ...

    def is_finite(self) -> bool:
        """Return whether all weights are finite; the result is equal on every rank."""
        ...

    def state(self, *, copy: bool) -> ReplicaState:
        """Return the state; with ``copy``, later steps do not change it until the next copy."""
        ...

    def load_state(self, state: ReplicaState) -> None:
        """Load a state; raise CheckpointError if it belongs to another model or optimizer."""
        ...

    def rank_state(self) -> Mapping[str, ArrayBlob]:
        """Return the state that is specific to this rank, for checkpoints; usually empty."""
        ...

    def load_rank_states(self, of_ranks: Sequence[Mapping[str, ArrayBlob]]) -> None:
        """Load rank states: the result of ``rank_state`` of each rank of the run that saved.

        Raises:
            LookupError: The state belongs to another model.
        """
        ...

    def broadcast(self) -> None:
        """Broadcast rank 0's weights and buffers to all ranks."""
        ...

    def device_name(self) -> str:
        """Return a human-readable name of the model's device."""
        ...

    def num_parameters(self) -> int:
        """Return the number of trainable parameters (elements)."""
        ...


class IdenticalReplica:
    """Base class of replicas that are identical after each step and return outcomes immediately."""

    lag_steps = 0
    replicas_identical = True
    requires_equal_micro_batches = False
    passes_are_collective = False
    python_state: PythonStateOfRank | None = None

    def rank_state(self) -> Mapping[str, ArrayBlob]:
        """Return an empty mapping: no state is specific to a rank."""
        return {}

    def load_rank_states(self, of_ranks: Sequence[Mapping[str, ArrayBlob]]) -> None:
        """Do nothing: no state is specific to a rank."""


class Reader(Protocol):
    """Reader of a dataset in a given order."""

    @property
    def dataset(self) -> Dataset:
        """The dataset of this process; loader processes have copies."""
        ...

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def read(self, epoch: int, order: Order, micro_batches: Iterable[MicroBatch]) -> Iterator[object]:
        """Yield the collated batch of each micro-batch."""
        ...


class Bridge(Protocol):
    """Interface of a run for the training loop of a framework (see ``training/loop.py``)."""

    @property
    def is_done(self) -> bool:
        """Whether training is complete or stopped."""

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""

    @property
    def num_epochs(self) -> int:
        """Epochs of the whole job, the last of which may be incomplete."""

    @property
    def is_epoch_complete(self) -> bool:
        """Whether every sample of the current epoch was used."""

    def report_incomplete_epoch(self) -> None:
        """Log that the job ends, because the framework has left an epoch early."""

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""

    @property
    def wants_norm(self) -> bool:
        """Whether the next step must compute the gradient norm."""

    @property
    def evaluates_now(self) -> bool:
        """Whether an evaluation follows the last step of an epoch, which was performed."""

    def begin(self) -> None:
        """Start training."""

    def rest_of_epoch(self) -> PlannedSteps:
        """Return the remaining steps of the current epoch, limited by the length of the job."""

    def after_step(self, step: PlannedStep, pending: PendingOutcome, lr: float) -> None:
        """Record an optimizer step."""

    def finish_epoch(self) -> dict[str, float]:
        """Complete an epoch after its last step; return the evaluation, empty if none was due."""

    def after_epoch(self) -> None:
        """Save a checkpoint, if due; called after the framework's end-of-epoch callbacks."""

    def before_on_train_end(self) -> None:
        """Record the weights after the last step; end-of-training callbacks follow, which may change them."""

    def end(self) -> None:
        """End training."""


@runtime_checkable
class MeasuresNoise(Protocol):
    """A replica that may measure the gradient noise scale."""

    noise: Any
    """Meter with the attribute ``is_due``: whether the next step is measured; None: disabled."""


@runtime_checkable
class SchedulesArguments(Protocol):
    """A replica whose optimizer's arguments may change between steps."""

    def set_arguments(self, values: Mapping[str, float]) -> None:
        """Set arguments of the optimizer, such as ``momentum``, for the next step."""
        ...


class PythonStateOfRank(Protocol):
    """State in Python of a task and its model on one rank (``python_state.py``)."""

    part: int
    """Number of the part of the model that this rank has; ranks with the same one are compared."""
    not_restored: list[str]
    """Values that the checkpoint from which the job has resumed does not contain."""

    def kept(self) -> AbstractContextManager[None]:
        """Return a context that restores the state of random generators at its end."""
        ...

    def examined(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return digests of the changed values that ranks should share, and why others are not saved."""
        ...

    def differences(self) -> Mapping[str, str]:
        """Return a text with the values of two ranks for each value that differs. Collective."""
        ...

    def take(self) -> Mapping[str, ArrayBlob]:
        """Return the changed values for a checkpoint. Collective."""
        ...

    def load(self, of_ranks: Sequence[Mapping[str, ArrayBlob]]) -> Sequence[Mapping[str, ArrayBlob]]:
        """Load the values of a checkpoint; return the state of ranks without them."""
        ...


@runtime_checkable
class HasPythonState(Protocol):
    """A replica of a job whose task may have state in Python."""

    python_state: PythonStateOfRank | None


@runtime_checkable
class HasDevice(Protocol):
    """A framework that reports its device."""

    def gpu_uuid(self) -> str:
        """Return the UUID of this rank's GPU, 32 hexadecimal digits; empty: no GPU."""
        ...

    def device_memory(self) -> tuple[int, int | None, int] | None:
        """Return allocated, reserved (None: unknown) and peak allocated bytes; None: no GPU."""
        ...


@runtime_checkable
class ExplainsErrors(Protocol):
    """A framework that translates errors of its device."""

    def explain(self, error: Exception, job: Job, rank: int) -> HorovodTrainError | None:
        """Return an error with cause and hint for an exception; None: the exception is raised unchanged."""
        ...


class HasGenerators(Protocol):
    """The random generators of a framework."""

    def rng_state(self) -> tuple[object, Mapping[str, ArrayBlob]]:
        """Return the state of all random generators: a JSON tree and the arrays it refers to."""
        ...

    def load_rng_state(self, tree: object, arrays: Mapping[str, ArrayBlob]) -> None:
        """Load the state of all random generators."""
        ...

    def seed(self, seed: int, rank: int, epoch: int) -> None:
        """Seed all random generators of this rank."""
        ...


class Framework(HasGenerators, Protocol):
    """A framework, for one job: initializes Horovod, and creates the replica and the readers.

    A framework with its own training loop also has a method ``fit(bridge)``, which trains to the end of the
    job. The others use ``training/loop.py``. A framework may also implement ``HasDevice`` and
    ``ExplainsErrors``.
    """

    def connect(self, job: Job) -> Communicator:
        """Initialize Horovod, and return the communicator; of one rank, if this process was started alone.

        Raises:
            EngineError: The process is one of several ranks, and Horovod cannot be initialized.
        """
        ...

    def prepare(self, job: Job, mesh: Mesh) -> tuple[Replica, Reader, Reader | None]:
        """Return the replica, whose steps are collective over ``mesh.data``, and readers of both data sets.

        Raises:
            UserError: The task or the optimizer cannot be created.
        """
        ...


def add_metric(sums: dict[str, tuple[float, int]], name: str, value: Any, num_samples: int) -> None:
    """Add a batch's value of a metric to its (sum, count).

    An array of shape [batch] is summed. A scalar is the mean over the batch, and is multiplied by the number
    of samples. A pair contains a sum and a count. ``sums`` is updated in place.

    Raises:
        UserError: The value has another shape.
    """
    if isinstance(value, tuple) and len(value) == 2 and not hasattr(value, "_fields"):
        own = sums.get(name, (0.0, 0))
        sums[name] = own[0] + float(value[0]), own[1] + value[1]
        return
    numbers = np.asarray(value, np.float64)
    if numbers.ndim > 1:
        raise UserError(
            f"metric {name!r} has shape {numbers.shape}",
            hint="return one value per sample, shape [batch], or the mean, shape []",
        )
    count = len(numbers) if numbers.ndim else num_samples
    total = float(numbers.sum()) * (1 if numbers.ndim else count)
    old_total, old_count = sums.get(name, (0.0, 0))
    sums[name] = (old_total + total, old_count + count)


def explained_by(framework: object, job: Job, rank: int) -> AbstractContextManager[None]:
    """Return a context that translates exceptions, if the framework implements ``ExplainsErrors``."""
    return translated(
        lambda error: framework.explain(error, job, rank) if isinstance(framework, ExplainsErrors) else None
    )


log = logging.getLogger(__name__)

OF_OTHER_PACKAGES = {
    "configure_optimizers": ["param_groups()", "the job's optimizer: and lr: are used"],
    "optimizer": ["param_groups()", "the job's optimizer: is used"],
    "scheduler": ["the job's lr: is used"],
    "lr_scheduler": ["the job's lr: is used"],
    "collate": ["the dataset's collate() is called"],
    "collate_fn": ["collate()", "the dataset's collate() is called"],
    "val_data": ["eval_data()"],
    "valid_data": ["eval_data()"],
    "validation_data": ["eval_data()"],
    "test_data": ["eval_data()"],
    "train_dataloader": ["train_data()"],
    "val_dataloader": ["eval_data()"],
    "training_step": ["loss()", "the module's training_step() is called"],
    "validation_step": ["metrics()", "the module's validation_step() is called"],
    "compute_metrics": ["metrics()"],
    "after_step": ["after_update()", "a job has no such hook"],
}
"""Names of methods in other packages, and what a job uses instead; the first that applies is reported."""


def load_task(location: str, args: Mapping[str, Any], required: Sequence[str]) -> Any:
    """Import a task's class, and create an instance with the keyword arguments ``args``.

    ``location`` is the name of a shipped task, ``module:Class`` or ``/path/file.py:Class``.

    Raises:
        UserError: The class cannot be imported, refuses the arguments, or lacks a method.
    """
    task_class = load_task_class(location)
    try:
        inspect.signature(task_class).bind(**args)
    except (TypeError, ValueError) as error:  # ValueError: a class without a signature
        raise UserError(
            f"task {location}: {error}", hint="task_args must fit the arguments of the task's class"
        ) from error
    task = task_class(**args)
    missing = [name for name in required if not callable(getattr(task, name, None))]
    if missing:
        raise UserError(
            f"task {location} lacks {', '.join(name + '()' for name in missing)}",
            hint=f"a task has {', '.join(name + '()' for name in required)}",
        )
    return task


def train_data_of(job: Job, task: Any) -> Dataset:
    """Return the training data: the files that the job names, or what ``train_data()`` of the task returns.

    Raises:
        UserError: Files are missing or damaged; the task has no such method.
    """
    if (files := training_files(job.data, job.run_dir)) is not None:
        return files
    if not callable(getattr(task, "train_data", None)):
        raise UserError(
            f"task {job.task} lacks train_data()",
            hint="give it train_data(), or name the files of the data in data.source and data.files",
        )
    own: Dataset = task.train_data()
    return own


def eval_data_of(job: Job, task: Any) -> Dataset | None:
    """Return the evaluation data: the files that the job names, or what ``eval_data()`` of the task returns.

    Raises:
        UserError: Files are missing or damaged.
    """
    if (files := evaluation_files(job.data, job.run_dir)) is not None:
        return files
    own: Dataset | None = task.eval_data() if callable(getattr(task, "eval_data", None)) else None
    return own


def report_unused_methods(task: object, known: Sequence[str], world: Communicator) -> None:
    """Log the methods of a task that the job does not call although their names suggest it, on rank 0."""
    found = [
        f"{name}() ({instead})"
        for name in dir(type(task))
        if name not in known and (instead := _instead_of(name, task, known)) and callable(getattr(task, name))
    ]
    if found and world.rank == 0:
        log.warning("methods of %s that the job does not call: %s", type(task).__name__, "; ".join(found))


def _instead_of(name: str, task: object, known: Sequence[str]) -> str:
    """Return what a job uses instead of a method; empty: the name does not suggest that a job calls it."""
    if name in OF_OTHER_PACKAGES:
        candidates = OF_OTHER_PACKAGES[name]
        return next((each for each in candidates if not each.endswith("()") or each[:-2] in known), "")
    if name.startswith("on_"):
        return "a job has no such hook"
    near = get_close_matches(name, [each for each in known if not hasattr(task, each)], 1, cutoff=0.8)
    return f"did you mean {near[0]}()?" if near else ""


def load_task_class(location: str) -> Any:
    """Import a task's class; raise UserError if it cannot be imported."""
    return load_location(location, TASKS)


def check_is_one_number(shape: Sequence[int]) -> None:
    """Raise UserError if a loss is not one number: frameworks would sum it, or fail without a hint."""
    if math.prod(shape) != 1:
        raise UserError(
            f"the task's loss has shape {list(shape)}, but has to be one number",
            hint="return the mean over the samples of the batch",
        )


def make_optimizer(job: Job, num_data_ranks: int, make: Callable[[Any, Mapping[str, Any]], Any]) -> Any:
    """Create the job's optimizer.

    Args:
        job: The job description.
        num_data_ranks: Number of data-parallel ranks.
        make: Calls the class with the job's arguments and those that the framework adds.

    Raises:
        UserError: The optimizer is unknown, or its class refuses the arguments.
    """
    args, scaling = _with_tuples(job.optimizer.args), ArgumentScaling.of(job, num_data_ranks)
    return optimizers_of(job.framework).make(
        job.optimizer.name,
        lambda factory: make(factory, scaling.arguments(factory, args)),
        args_field="optimizer.args",
    )


def _with_tuples(args: Mapping[str, Any]) -> dict[str, Any]:
    """Replace lists by tuples, which optimizers require and YAML does not have (``betas: [0.9, 0.95]``)."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in args.items()}
