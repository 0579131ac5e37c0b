"""What the training loop needs from a framework. The loop never imports one.

A framework hands out a ``Replica``: the model and optimizer of this rank, which knows how to make
one step and how to show its state as plain arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import numpy as np

from horovod_train.checkpoint.arrays import ArrayBlob, ReplicaState
from horovod_train.collectives.base import Communicator
from horovod_train.collectives.mesh import Mesh
from horovod_train.config.schema import Job
from horovod_train.data.planned_step import PlannedStep
from horovod_train.data.shard import MicroBatch, Order
from horovod_train.errors import HorovodTrainError, UserError, translated
from horovod_train.events.types import WAIT_PHASE


@dataclass(slots=True)
class StepClock:
    """Splits the wall time of a step into phases. A phase that cannot be seen is absent.

    Attributes:
        seconds: Time of each phase.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=perf_counter)
    _begun: float = -1.0

    def __post_init__(self) -> None:
        self._begun = self._last

    @property
    def total_s(self) -> float:
        """Time from the start to the last lap."""
        return self._last - self._begun

    @property
    def own_s(self) -> float | None:
        """Time without waiting for the all-reduce; None: unknown."""
        wait_s = self.seconds.get(WAIT_PHASE)
        return None if wait_s is None else self.total_s - wait_s

    def lap(self, phase: str) -> None:
        """Add the time since the last lap (or the start) to a phase."""
        now = perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def settle(self, ranks: Communicator, read: Callable[[], object]) -> None:
        """Wait for the device, if a step on it is to be waited for now; a CPU has finished."""

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count some of a phase's time, measured elsewhere, as another phase's."""
        self.seconds[source] -= seconds
        self.seconds[target] = self.seconds.get(target, 0.0) + seconds


@dataclass(slots=True)  # frozen, it would take four times as long to make, in each step
class StepOutcome:
    """What one optimizer step did.

    Attributes:
        loss: Mean loss over the samples of the step, over all ranks: equal on every rank.
        local_loss: This rank's part of that mean: its sum of share x loss.
        is_finite: False: loss or gradient was not finite, and the weights were not updated.
        clock: Time of each phase.
        numbers: Further numbers of the step by name; None: not computed. Among them are ``grad_norm`` (L2
            norm of the global gradient before clipping), ``sent_bytes`` (bytes that this rank passed to
            collectives) and ``flops`` (operations of its forward and backward passes). A metric of the
            catalog names the number that it exports.
        was_executed: False: an earlier step had stopped training when this one, already enqueued, ran; it
            changed nothing.
    """

    loss: float
    local_loss: float
    is_finite: bool
    clock: StepClock
    numbers: Mapping[str, float | None] = field(default_factory=dict)
    was_executed: bool = True

    @property
    def grad_norm(self) -> float | None:
        """L2 norm of the global gradient before clipping; None: it was not computed."""
        return self.numbers.get("grad_norm")

    def outcome(self) -> StepOutcome:
        """Return it."""
        return self

    def is_ready(self) -> bool:
        """Return that it is."""
        return True


class Reading(Protocol):
    """What a step turned out to be, perhaps later. A ``StepOutcome`` is one that is there at once."""

    def outcome(self) -> StepOutcome:
        """Return it; waits until it is known.

        Raises:
            PeerError: Another rank was lost.
        """
        ...

    def is_ready(self) -> bool:
        """Return whether it is known by now."""
        ...


class Dataset(Protocol):
    """What a task's ``train_data()`` returns.

    Two methods more are used where there are: ``__getitems__(indices)`` reads several samples at once,
    ``collate(samples)`` joins them into a batch.
    """

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return a sample."""
        ...


class Replica(Protocol):
    """The model and optimizer of one rank."""

    @property
    def lag_steps(self) -> int:
        """Steps after which the outcome of a step is read: the same number on every rank.

        0 where it is known at once.
        """
        ...

    @property
    def replicas_identical(self) -> bool:
        """Whether all ranks hold the same weights and optimizer state now.

        Where they do not after each step, they do after a planned step that is the last.
        """
        ...

    @property
    def requires_equal_micro_batches(self) -> bool:
        """Whether all ranks have to read as many micro-batches in a step."""
        ...

    @property
    def passes_are_collective(self) -> bool:
        """Whether forward passes are collectives: ranks make equally many in an evaluation, too."""
        ...

    def step(self, step: PlannedStep, lr: float, *, want_norm: bool) -> Reading:
        """Make one optimizer step with this rank's share of it.

        A step that is not finite is left out where it is made: its reading may come when others follow.

        Raises:
            PeerError: Another rank was lost.
        """
        ...

    def evaluate(self, batches: Iterable[tuple[int, object]]) -> dict[str, tuple[float, int]]:
        """Return (sum, count) of each metric over this rank's batches.

        Args:
            batches: How many samples are in each, and the batch.
        """
        ...

    def sync_buffers(self) -> None:
        """Make buffers that ranks update by themselves, such as running means, equal again."""
        ...

    def is_finite(self) -> bool:
        """Return whether all weights are finite numbers: the same on every rank."""
        ...

    def state(self, *, copy: bool) -> ReplicaState:
        """Return the state; with ``copy``, later steps do not change it until the next copy."""
        ...

    def load_state(self, state: ReplicaState) -> None:
        """Take over a state.

        Raises:
            CheckpointError: The state belongs to another model or optimizer.
        """
        ...

    def rank_state(self) -> Mapping[str, ArrayBlob]:
        """Return what this rank alone has, and a checkpoint has to keep; most have nothing."""
        ...

    def load_rank_states(self, of_ranks: Sequence[Mapping[str, ArrayBlob]]) -> None:
        """Take over what ``rank_state`` returned on each rank, of as many ranks as there were then.

        Raises:
            LookupError: It belongs to another model.
        """
        ...

    def broadcast(self) -> None:
        """Take over rank 0's weights and buffers."""
        ...

    def device_name(self) -> str:
        """Return where the model lives, for a person."""
        ...

    def num_parameters(self) -> int:
        """Return how many numbers are trained."""
        ...


class IdenticalReplica:
    """What a replica says that is the same on all ranks after each step, and known at once."""

    lag_steps = 0
    replicas_identical = True
    requires_equal_micro_batches = False
    passes_are_collective = False

    def rank_state(self) -> Mapping[str, ArrayBlob]:
        """Return nothing: no rank has its own state."""
        return {}

    def load_rank_states(self, of_ranks: Sequence[Mapping[str, ArrayBlob]]) -> None:
        """Do nothing."""


class Reader(Protocol):
    """Reads a dataset in a given order."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def read(self, epoch: int, order: Order, micro_batches: Iterable[MicroBatch]) -> Iterator[object]:
        """Yield the collated batch of each micro-batch."""
        ...


class Bridge(Protocol):
    """One run, as a loop that is not ours sees it (see ``training/bridge.py``)."""

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to train."""
        ...

    @property
    def epoch(self) -> int:
        """Epochs completed."""
        ...

    @property
    def is_epoch_complete(self) -> bool:
        """Whether every sample of the current epoch was used."""
        ...

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        ...

    @property
    def wants_norm(self) -> bool:
        """Whether the next step is to take the gradient norm."""
        ...

    @property
    def evaluates_next(self) -> bool:
        """Whether the epoch under way ends with an evaluation."""
        ...

    def begin(self) -> None:
        """Training begins."""
        ...

    def rest_of_epoch(self) -> list[PlannedStep]:
        """Return the steps that are left in the current epoch, up to the job's limit."""
        ...

    def after_step(self, step: PlannedStep, reading: Reading, lr: float) -> None:
        """An optimizer step was made."""
        ...

    def finish_epoch(self) -> dict[str, float]:
        """All steps of an epoch were made; return the evaluation, empty when none was due."""
        ...

    def after_epoch(self) -> None:
        """The epoch was finished, and callbacks of its end were called: save it where that is due."""
        ...

    def before_last_callbacks(self) -> None:
        """The last step was made; callbacks of the end of training follow, and may change weights."""
        ...

    def end(self) -> None:
        """Training is complete."""
        ...


@runtime_checkable
class HasDevice(Protocol):
    """A framework that can tell what it computes on."""

    def gpu_uuid(self) -> str:
        """Return the identity of this rank's GPU, 32 hexadecimal digits; empty: it has none."""
        ...

    def device_memory(self) -> tuple[int, int | None, int] | None:
        """Return the bytes that tensors take, that are kept for them, and that they took at most.

        None in the second place: it does not say; altogether: no GPU.
        """
        ...


@runtime_checkable
class ExplainsErrors(Protocol):
    """A framework that can tell what an error of its device means."""

    def explain(self, error: Exception, job: Job, rank: int) -> HorovodTrainError | None:
        """Return our error for one that was raised; None: it says enough by itself."""
        ...


class Framework(Protocol):
    """Makes everything above for one job.

    A framework that owns its loop has a method ``fit(bridge)`` as well, which trains to the end of
    the job; the others are stepped by ours. One that knows its device is ``HasDevice``, too, and one
    that can tell what is wrong with it ``ExplainsErrors``.
    """

    def connect(self, job: Job) -> Communicator:
        """Join the ranks the process was started with; a world of one when there are none.

        Raises:
            EngineError: The process was started as one of several ranks and Horovod cannot start.
        """
        ...

    def prepare(self, job: Job, mesh: Mesh) -> tuple[Replica, Reader, Reader | None]:
        """Return this rank's replica and the readers of training and evaluation data.

        A replica takes its steps together with those of ``mesh.data``.

        Raises:
            UserError: The task or the optimizer cannot be made.
        """
        ...

    def rng_state(self) -> tuple[object, Mapping[str, ArrayBlob]]:
        """Return the state of all random generators: a JSON tree and the arrays it refers to."""
        ...

    def load_rng_state(self, tree: object, arrays: Mapping[str, ArrayBlob]) -> None:
        """Take over the state of all random generators."""
        ...

    def seed(self, seed: int, rank: int, epoch: int) -> None:
        """Seed all random generators of this rank."""
        ...


def add_metric(sums: dict[str, tuple[float, int]], name: str, value: Any, num_samples: int) -> None:
    """Add a batch's value of a metric to its (sum, count).

    A metric with one value per sample is summed. A single value is taken for the mean of the batch
    and weighted by the batch's samples. A pair is a sum and a count.

    Args:
        sums: What was found so far.
        name: The metric.
        value: An array, shape [batch] or [], or a pair of numbers.
        num_samples: Samples of the batch.

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
    """Return a context whose exceptions a framework explains, if it can."""
    return translated(
        lambda error: framework.explain(error, job, rank) if isinstance(framework, ExplainsErrors) else None
    )
