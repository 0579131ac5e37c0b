"""Parts that several frameworks have in common.

named, blobs_of    variables of TensorFlow and Keras, with ``numpy`` and ``assign`` on all back ends
LossScale          dynamic loss scaling
VariablesReplica   replica of TensorFlow or Keras: a model and an optimizer of variables
TrainerReplica     replica whose steps and evaluations the framework's own ``Trainer`` performs
LossComparison     compares the loss of several ranks with that of one process, for frameworks without
                   hooks of gradients
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from horovod_train.checkpoint.arrays import ArrayBlob, ReplicaState
from horovod_train.collectives.base import Communicator, allgather_json
from horovod_train.config.schema import Job
from horovod_train.data.shard import MicroBatch
from horovod_train.errors import UserError, result_of
from horovod_train.frameworks.base import IdenticalReplica
from horovod_train.frameworks.callbacks import SavesCallbacks
from horovod_train.frameworks.plain_data import (
    Array,
    check_fits,
    check_same_layout,
    check_same_optimizer,
    from_blob,
    from_rank_0,
    mean_over_ranks,
    to_blob,
    unique_names,
)
from horovod_train.frameworks.python_state import PythonState
from horovod_train.frameworks.reader import mix
from horovod_train.frameworks.torch.step.replica import TorchReplica


class Variable(Protocol):
    """A variable of TensorFlow or Keras."""

    def numpy(self) -> Array:
        """Return the value."""
        ...

    def assign(self, value: Any) -> Any:
        """Overwrite the value."""
        ...


def refuse_synchronized(layers: Iterable[Any], world: Communicator) -> None:
    """Raise ``UserError`` if a layer requests statistics over ranks, which Keras computes on its own rank.

    Keras synchronizes ``BatchNormalization(synchronized=True)`` over the replicas of ``tf.distribute`` only.
    """
    found = [layer.name for layer in layers if getattr(layer, "synchronized", False) is True]
    if found and world.size > 1:
        raise UserError(
            f"the layer {found[0]!r} has synchronized=True, but Keras would normalize over the samples of "
            "each rank",
            hint="leave synchronized out, to normalize over the samples of each rank; or use framework: "
            "torch with train.sync_batch_norm",
        )


def named(variables: Iterable[Any]) -> dict[str, Any]:
    """Return variables by name; the name is the path in the model, if the variable has one."""
    found = list(variables)
    return dict(zip(unique_names([getattr(v, "path", v.name) for v in found]), found, strict=True))


def blobs_of(variables: Mapping[str, Variable]) -> dict[str, ArrayBlob]:
    """Return copies of the values of variables, as bytes."""
    return {name: to_blob(variable.numpy().copy()) for name, variable in variables.items()}


def load_blobs(variables: Mapping[str, Variable], blobs: Mapping[str, ArrayBlob], what: str) -> None:
    """Assign the values of the same names to variables.

    Raises:
        CheckpointError: Names or shapes differ; no variable has changed.
    """
    check_fits({name: tuple(variable.numpy().shape) for name, variable in variables.items()}, blobs, what)
    for name, variable in variables.items():
        variable.assign(from_blob(blobs[name]))


def variables_of(optimizer: Any) -> dict[str, Variable]:
    """Return the variables of a Keras optimizer that a checkpoint contains, by name.

    Sums of gradients over micro-batches are zero between steps, and are not among them.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    sums = {id(each) for each in getattr(inner, "_accumulated_gradients", ())}
    return {name: each for name, each in named(optimizer.variables).items() if id(each) not in sums}


def counts_of(optimizer: Any) -> tuple[set[str], int]:
    """Return the names of the variables that count micro-batches, and the number of them in a step."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    counts = {id(getattr(each, "_iterations", None)) for each in (optimizer, inner)}
    names = {name for name, each in named(optimizer.variables).items() if id(each) in counts}
    return names, getattr(inner, "gradient_accumulation_steps", None) or 1


def correct_momentum(optimizer: Any, lr: float) -> None:
    """Multiply the momentum of a Keras SGD optimizer by (new rate / current rate), before the rate is set.

    Keras' momentum contains the rate: v = m v - rate g. With the correction, a step equals that of the form
    v = m v + g, w = w - rate v (Goyal et al., arXiv:1706.02677, section 3). Other optimizers are unchanged.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    before = float(np.asarray(inner.learning_rate))
    if before in (0.0, lr):
        return
    for momentum in getattr(inner, "momentums", ()):
        momentum.assign(momentum * (lr / before))


def broadcast(world: Communicator, variables: Mapping[str, Variable]) -> None:
    """Assign rank 0's values to the variables of all ranks.

    Raises:
        UserError: Ranks have different variables.
    """
    if world.size == 1:
        return
    check_same_layout(world, {name: variable.numpy() for name, variable in variables.items()})
    for variable in variables.values():
        variable.assign(from_rank_0(world, variable.numpy()))


def seed_states(model: Any) -> list[Any]:
    """Return the state variables of a Keras model's random generators, which differ between ranks."""
    weights = {id(variable) for variable in model.weights} if hasattr(model, "weights") else None
    return [] if weights is None else [v for v in model.variables if id(v) not in weights]


def shared_state(model: Any) -> list[Any]:
    """Return the variables that must be equal on all ranks: weights and running statistics."""
    return list(model.weights if hasattr(model, "weights") else model.variables)


def running_statistics(layers: Sequence[Any]) -> list[Any]:
    """Return the running means and variances of batch normalization, which each rank updates on its own."""
    return [
        variable
        for layer in layers
        if type(layer).__name__ == "BatchNormalization"
        for variable in layer.non_trainable_variables
        if getattr(variable, "path", "").endswith(("moving_mean", "moving_variance"))
    ]


def seed(states: Sequence[Any], seed: int) -> None:
    """Seed the random generators of a model with different numbers, derived from one seed."""
    for place, variable in enumerate(states):
        old = variable.numpy()
        numbers = [mix(seed % 2**32, place, part) % 2**31 for part in range(old.size)]
        variable.assign(np.array(numbers).astype(old.dtype).reshape(old.shape))


@dataclass
class LossScale:
    """Factor on the loss: halved if a gradient overflows, doubled after 2000 steps without overflow.

    Dynamic loss scaling prevents underflow of fp16 gradients by the largest scale without overflow. The
    scale is updated after the all-reduce, when all ranks have the same gradients. All ranks therefore skip
    the same steps, without further communication.

    Attributes:
        is_enabled: False: the scale is always 1.
        scale: The current factor.
        num_good_steps: Number of steps since the last change.
    """

    is_enabled: bool
    scale: float = 2.0**16
    num_good_steps: int = 0

    GROWTH_INTERVAL = 2000

    def __post_init__(self) -> None:
        if not self.is_enabled:
            self.scale = 1.0

    def update(self, *, is_finite: bool) -> None:
        """Update the scale after a step whose gradients were finite or not."""
        if not self.is_enabled:
            return
        if not is_finite:
            self.scale, self.num_good_steps = self.scale / 2, 0
            return
        self.num_good_steps += 1
        if self.num_good_steps == self.GROWTH_INTERVAL:
            self.scale, self.num_good_steps = self.scale * 2, 0

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint; empty if disabled."""
        if not self.is_enabled:
            return {}
        return {"scale": self.scale, "num_good_steps": float(self.num_good_steps)}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Load the result of ``state``."""
        if self.is_enabled and state:
            self.scale, self.num_good_steps = state["scale"], int(state["num_good_steps"])


class VariablesReplica(IdenticalReplica):
    """A replica whose model and optimizer consist of variables.

    Args:
        model: The model.
        optimizer: A Keras optimizer.
        world: The communicator.
        layers: All layers of the model.
        scale: The loss scale; default: none.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        world: Communicator,
        layers: Sequence[Any],
        scale: LossScale | None = None,
    ) -> None:
        refuse_synchronized(layers, world)
        self.model = model
        self.optimizer = optimizer
        self.scale = scale or LossScale(is_enabled=False)
        self._world = world
        self._statistics = running_statistics(layers)

    def fetch_variables(self) -> None:
        """Update the variables, where the framework stores their values elsewhere during training."""

    def sync_buffers(self) -> None:
        """Average running statistics over ranks; broadcast other untrained variables from rank 0."""
        self.fetch_variables()
        if self._world.size == 1:
            return
        averaged = {id(v) for v in self._statistics}
        trained = {id(v) for v in self.model.trainable_variables}
        for variable in shared_state(self.model):
            if id(variable) in averaged:
                variable.assign(mean_over_ranks(self._world, variable.numpy()))
            elif id(variable) not in trained:
                variable.assign(from_rank_0(self._world, variable.numpy()))

    def is_finite(self) -> bool:
        """Return whether all weights are finite."""
        self.fetch_variables()
        values = [variable.numpy() for variable in shared_state(self.model)]
        # NumPy does not classify bfloat16 and float8 of ml_dtypes as floating-point types.
        return all(np.isfinite(v).all() for v in values if "float" in v.dtype.name or v.dtype.kind == "c")

    def state(self, *, copy: bool) -> ReplicaState:
        """Return a copy of the state."""
        self.fetch_variables()
        counts, num_micro_batches = counts_of(self.optimizer)
        optimizer = blobs_of(variables_of(self.optimizer))
        for name in counts:
            optimizer[name] = to_blob(from_blob(optimizer[name]) // num_micro_batches)
        return ReplicaState(
            model=blobs_of(named(shared_state(self.model))),
            optimizer=optimizer,
            # On other numbers of ranks, a step may have another number of micro-batches.
            optimizer_tree={"class": type(self.optimizer).__name__, "iterations": "steps"},
            scaler=self.scale.state(),
        )

    def load_state(self, state: ReplicaState) -> None:
        """Load a state.

        Raises:
            CheckpointError: The state is that of another model or optimizer.
        """
        check_same_optimizer(state, self.optimizer)
        load_blobs(named(shared_state(self.model)), state.model, "model")
        if state.optimizer_tree.get("iterations") == "steps":
            variables = variables_of(self.optimizer)
            counts, num_micro_batches = counts_of(self.optimizer)
        else:  # of version 0.1.0
            variables, counts, num_micro_batches = named(self.optimizer.variables), set(), 1
        load_blobs(variables, state.optimizer, "optimizer")
        for name in counts:
            variables[name].assign(variables[name].numpy() * num_micro_batches)
        self.scale.load_state(state.scaler)

    def num_parameters(self) -> int:
        """Return the number of trained parameters."""
        return int(sum(np.prod(v.shape) for v in self.model.trainable_variables))


class TrainerReplica(SavesCallbacks, TorchReplica):
    """The model and optimizer of one rank in a ``Trainer`` of Lightning or Transformers.

    Attributes:
        metrics: Result of an evaluation that ``Trainer`` has already performed at the end of an epoch.
        evaluate_now: Evaluates with ``Trainer``; returns the metrics over the samples of all ranks.
    """

    metrics: dict[str, float] | None = None
    evaluate_now: Callable[[], dict[str, float]]

    def evaluate(self, batches: Iterable[tuple[MicroBatch, object]]) -> dict[str, tuple[float, int]]:
        """Return the metrics over the samples of all ranks, on rank 0; an empty mapping on other ranks."""
        metrics = self.evaluate_now() if self.metrics is None else self.metrics
        self.metrics = None
        return {name: (value, 1) for name, value in metrics.items()} if self.data_ranks.rank == 0 else {}


log = logging.getLogger(__name__)

LIMITS = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 3e-2}
"""Largest relative difference that is attributed to rounding, by precision of the job."""


class ReadsParts(Protocol):
    """A reader of chosen samples."""

    def batches_of(self, numbers: Sequence[int], parts: Sequence[slice]) -> list[object]:
        """Return a batch of each part of some samples, which are read once."""
        ...


class ComputesLosses(Protocol):
    """A replica."""

    python_state: PythonState

    @property
    def batch_norm(self) -> str:
        """Name of a layer that normalizes over the samples of a rank; empty: none is known."""
        ...

    def losses_of(self, batches: Sequence[object]) -> tuple[Sequence[float], str]:
        """Return the losses of some batches, in training, without a trace.

        Also return why they cannot be compared: the last one differs if it is computed again, for example;
        empty: they can.
        """
        ...


class LossComparison:
    """Compares losses on all ranks.

    The reference of a job on n ranks is one process with all samples of a step. If the loss is a mean over
    samples, that of a batch is the mean of the losses of its halves. Each rank computes these three losses
    of the same few samples. PyTorch's jobs compare gradients instead (``torch/verify/one_process.py``).

    Args:
        world: All ranks.
        reader: Reader of the training data.
        replica: Computes losses.
        job: The job.
    """

    def __init__(self, world: Communicator, reader: ReadsParts, replica: ComputesLosses, job: Job) -> None:
        self._world, self._reader, self._replica = world, reader, replica
        self._batch_size, self._limit = job.train.batch_size_per_rank, LIMITS[job.train.precision]
        self._reason: str | None = None

    def compare(self, step: int, parts: Sequence[Sequence[int]]) -> str | None:
        """Compare losses after a step, and log a difference, once. Collective.

        Args:
            step: Number of the step.
            parts: Numbers of samples of that step, in two parts.

        Returns:
            What differs, or why nothing is compared; None: the losses are equal; empty: they are not finite.
        """
        if self._reason is not None:
            return self._reason
        size = min(max(1, self._batch_size // 2), *map(len, parts))
        numbers = [number for part in parts for number in part[:size]]
        found, problem = result_of(partial(self._losses, numbers))
        losses, reason = found or ([], "")
        error = "" if problem is None else f"{type(problem).__name__}: {problem}"[:300]
        # All ranks decide by the same numbers, which may differ in the last bits: those of rank 0.
        of_ranks = allgather_json(self._world, (error, reason, losses, getattr(self._replica, "read", [])))
        errors, reasons, all_losses, names = zip(*of_ranks, strict=True)
        self._replica.python_state.read.update(name for of_rank in names for name in of_rank)
        if why := next(filter(None, errors), ""):
            return self._ends(f"losses are not compared with those of one process: {why}")
        if why := next(filter(None, reasons), ""):
            self._reason = f"losses are not compared with those of one process: {why}"
            return self._reason
        first, second, joint = all_losses[0]
        if not all(map(math.isfinite, (first, second, joint))):
            return ""
        if abs(joint - (first + second) / 2) <= self._limit * max(abs(first), abs(second), abs(joint), 1e-3):
            return None
        return self._ends(
            f"step {step}: the loss of {2 * size} samples is {(first + second) / 2:.6g} on two ranks, and "
            f"{joint:.6g} on one: one process on the joint batch would train other weights. "
            f"{explanation(first, second, joint, self._replica.batch_norm)}"
        )

    def _losses(self, numbers: Sequence[int]) -> tuple[Sequence[float], str]:
        half = len(numbers) // 2
        with self._replica.python_state.restored(with_data=True):
            batches = self._reader.batches_of(numbers, [slice(None, half), slice(half, None), slice(None)])
            return self._replica.losses_of(batches)

    def _ends(self, text: str) -> str:
        """Compare no more, for a reason that rank 0 logs."""
        self._reason = text
        if self._world.rank == 0:
            log.warning("%s", text)
        return text


def explanation(first: float, second: float, joint: float, batch_norm: str = "") -> str:
    """Return why the loss of a batch may not be the mean of those of its halves, and what helps.

    >>> explanation(1.0, 2.0, 1.25)  # doctest: +ELLIPSIS
    'It is a mean over something else than samples, such as tokens: ...'
    """
    if batch_norm:
        return f"A layer normalizes over the samples of each rank: {batch_norm}"
    if first != second and 0 < (joint - second) / (first - second) < 1:
        return (
            "It is a mean over something else than samples, such as tokens: divide by a number that does not "
            "depend on the samples, such as the number of samples times the largest length"
        )
    return (
        "It is not a mean over samples: it may compare samples with each other (in-batch negatives), "
        "normalize over a batch, or add samples up"
    )
