"""Checks of a job before training starts, and in its first steps.

check_model        refuses weights and buffers that a checkpoint cannot contain
copy_of_task       copy of the task for the steps of the reference model
SharedState        state that a task and its copy share, and that a call must not change
StrategyVerifier   compares the first steps under a strategy with those of the plain model
FirstSteps         checks of a replica, its optimizer and its strategy in the first steps
"""

from __future__ import annotations

import copy
import io
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, MutableSet, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from horovod_train.checkpoint.arrays import DTYPE_CODES, METADATA, Part, ReplicaState
from horovod_train.collectives.base import Communicator, allgather_json, any_rank
from horovod_train.config.schema import Job
from horovod_train.data.shard import PlannedStep
from horovod_train.errors import UserError, describe_ranks, result_of, translated
from horovod_train.frameworks.base import StepClock
from horovod_train.frameworks.torch.comm.collectives import broadcast_model, tensor_communicator, wide_type
from horovod_train.frameworks.torch.state.local import optimizer_tensors
from horovod_train.frameworks.torch.state.rank_state import load_rng_state, python_state, rng_state
from horovod_train.frameworks.torch.step.gradient_hooks import has_hooks, num_hooks

LARGE_BYTES = 2**28
"""Larger tensors and arrays are shared between a task and its copy, like datasets."""
MAX_COUNTERS = 64
"""Largest number of elements of an integer buffer that is treated as a counter."""
COPIED = (
    MutableMapping, MutableSequence, MutableSet, dict, list, tuple, str, bytes, set, frozenset,
    torch.nn.Module, torch.Tensor, np.ndarray,
)  # fmt: skip
"""Types with a length and members that are not datasets."""
DATA = (bool, int, float, complex, *COPIED)
OF_A_LIBRARY = ("torch", "numpy", "builtins", "horovod_train", "horovod", "collections")


def copy_of_task(task: Any) -> Any:
    """Copy a task; datasets, large arrays, and objects that cannot be copied (files, modules) are shared.

    The copy has its own state, except shared state: class attributes, module variables, and variables
    captured by closures. A change of shared state is refused (``SharedState``), because the loss is called
    twice and would change it twice.
    """
    own = copy.copy(task)
    memo: dict[int, Any] = {}
    if hasattr(own, "__dict__"):
        vars(own).update({name: copy_of_value(value, memo) for name, value in vars(task).items()})
    return own


def copy_of_value(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of a task's attribute, or the attribute itself if it is large or cannot be copied.

    Args:
        value: The attribute.
        memo: Objects that were copied (see ``copy.deepcopy``), so that copies share objects like attributes.
    """
    if isinstance(value, type | ModuleType | FunctionType | io.IOBase) or _is_large(value):
        return value
    is_dataset = hasattr(value, "__getitem__") and hasattr(value, "__len__") and not isinstance(value, COPIED)
    if is_dataset:
        return value
    copied, problem = result_of(lambda: copy.deepcopy(value, memo))
    return copied if problem is None else _attribute_by_attribute(value, memo)


def _attribute_by_attribute(value: Any, memo: dict[int, Any]) -> Any:
    """Copy an object with a member that cannot be copied, such as a file, which is shared."""
    if not hasattr(value, "__dict__") or isinstance(value, torch.nn.Module | MethodType):
        return value
    own, problem = result_of(lambda: copy.copy(value))
    if problem is not None:
        return value
    memo[id(value)] = own
    vars(own).update({name: copy_of_value(each, memo) for name, each in vars(value).items()})
    return own


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray) and value.nbytes > LARGE_BYTES


def generators_of(task: Any) -> list[str]:
    """Return the names of a task's attributes that are generators, whose position cannot be copied."""
    return [name for name, value in vars(task).items() if isinstance(value, GeneratorType)]


def counter_state(task: Any, model: torch.nn.Module) -> object:
    """Return the Python state of a task and a model and the model's integer buffers, for comparison."""
    counters = [
        buffer.tolist()
        for name, buffer in model.named_buffers()
        if not (buffer.is_floating_point() or buffer.is_complex() or name.endswith("num_batches_tracked"))
        and buffer.numel() <= MAX_COUNTERS
    ]
    return python_state(task, model), counters


class SharedState:
    """State that a task and its copy share, and that a call of the copy must not change."""

    def __init__(self, task: Any, model: torch.nn.Module) -> None:
        self._task = task
        classes = [type(task), *(type(module) for module in model.modules())]
        own = {each for found in classes for each in found.__mro__ if not _is_of_a_library(each.__module__)}
        self._classes = sorted(own, key=lambda each: (each.__module__, each.__qualname__))
        names = {each.__module__ for each in self._classes}
        self._modules = [sys.modules[name] for name in sorted(names) if name in sys.modules]
        self._before: dict[str, str] = {}

    def remember(self) -> None:
        """Record the current state."""
        self._before = dict(self._states())

    def check(self) -> None:
        """Raise ``UserError`` with the first attribute or variable that has changed since ``remember``."""
        for name, state in self._states():
            if self._before.get(name, state) != state:
                raise UserError(
                    f"the task's loss, or its model, changes {name} when it is called, and the comparison of "
                    "the first steps with the plain model has to call it twice",
                    hint="keep it in an attribute of the task or the model (self.x), or set "
                    "health.verify_strategy: false",
                )

    def _states(self) -> Iterator[tuple[str, str]]:
        for name, value in vars(self._task).items():
            yield f"self.{name}", python_state(value)
        for owner in self._classes:
            for name, value in vars(owner).items():
                if not name.startswith("__") and isinstance(value, DATA):
                    yield f"{owner.__qualname__}.{name}", python_state(value)
        for module in self._modules:
            for name, value in vars(module).items():
                is_own = getattr(type(value), "__module__", "") == module.__name__
                if not name.startswith("__") and (isinstance(value, DATA) or is_own):
                    yield f"{module.__name__}.{name}", python_state(value)
                if isinstance(value, FunctionType) and vars(value):
                    yield f"{module.__name__}.{name}", python_state(vars(value))


def _is_of_a_library(module: str) -> bool:
    return module.partition(".")[0] in OF_A_LIBRARY


log = logging.getLogger(__name__)

NUM_STEPS = 2
NUM_STEPS_WITH_STATE = 6
"""Number of compared steps if a step changes Python state or integer buffers of the task or the model."""

GRADIENT_LIMITS = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: 5e-2,
    torch.float16: 5e-2,
}
"""Tolerated relative L2 difference of a gradient, by the dtype of the forward pass."""
LOOSEST = 5e-2
GPU_LIMIT = 5e-3
"""Lower bound of the limit on GPUs, which compute float32 convolutions in TF32."""
NUM_ROUNDINGS = 8
"""Tolerated difference of a gradient, in rounding errors of the largest gradient: a gradient that is zero in
theory (of a bias before a normalization, or of a key bias in attention) consists of rounding errors."""
NUM_ULPS = 64
"""Tolerated difference of weights and optimizer state, in units in the last place of the largest element."""


@dataclass(frozen=True)
class Difference:
    """The first difference between a strategy's step and the step of the plain model.

    Attributes:
        what: The quantity that differs, such as ``the gradient of layers.0.weight``.
        found: Its value under the strategy.
        expected: Its value with the plain model.
        stage: Key of ``CAUSES``: loss, gradient, buffer or update.
    """

    what: str
    found: str
    expected: str
    stage: str


CAUSES = {
    "loss": "the forward pass computes something else: code in forward() between calls of modules (a "
    "context manager, an attribute that changes), or a hook of the model",
    "gradient": "the backward pass computes something else: a hook of a parameter or module, an autograd "
    "function, or a tensor that is changed in place",
    "buffer": "the forward pass of some micro-batch changes the buffer never, or more than once",
    "update": "the update computes something else: an optimizer that looks at whole tensors, or weights "
    "that the task or the forward pass changes",
}


class StrategyVerifier:
    """Compares the steps of a strategy with those of a reference replica.

    A strategy may replace parameters, change how modules are called, or update parts of weights. If this
    changes the results of a model, the strategy must be refused. A second call of the task's ``model()``
    creates the reference replica: the plain model under ``allreduce``. It runs the first steps with copies
    of the same micro-batches and the same random state. Each step is compared twice:

        before the update  loss and gradients
        after the update   weights, buffers and optimizer state. The reference is updated with the
                           strategy's gradients, so rounding errors do not accumulate and tolerances
                           are tight.

    Python state (a counter, a temperature, a generator) may affect later steps only. If the task or the
    model changes such state, more steps are compared. Afterwards, the reference is deleted. An exception of
    the plain model is an error of the task. An exception under only the strategy is a refusal of the
    strategy.

    Args:
        job: The job.
        reference: Replica of the plain model under the strategy ``allreduce`` (a ``TorchReplica``).
        replica: Replica under the strategy (a ``TorchReplica``).
        world: Communicator of all ranks of the job.
        is_explained: Returns whether an error has a cause other than the strategy: a lost rank, or memory.
    """

    def __init__(
        self,
        job: Job,
        reference: Any,
        replica: Any,
        world: Communicator,
        is_explained: Callable[[Exception], bool],
    ) -> None:
        self._job = job
        self.reference = reference
        self._replica = replica
        self._world = tensor_communicator(world)
        self._is_explained = is_explained
        self._state: object = None
        self._shared = SharedState(replica.task, reference.model)
        self._num_made = 0
        self._num_steps = NUM_STEPS

    @property
    def is_done(self) -> bool:
        """Whether all required steps have been compared."""
        return self._num_made >= self._num_steps

    def broadcast(self) -> None:
        """Broadcast rank 0's weights to the reference models of all ranks."""
        broadcast_model(self.reference.model, self._world)

    @contextmanager
    def compared(self, step: PlannedStep) -> Iterator[PlannedStep]:
        """Run a step with the reference, then yield the same step, which the block must run with the replica.

        ``compare_gradients`` and ``compare_update`` must be called in the block. Collective.

        Raises:
            UserError: The task changes shared state, or only the reference could run the step.
        """
        micro_batches = list(step)
        copied = self._copied(micro_batches)
        if copied is None:
            self._num_made = self._num_steps
            yield _rerun(step, micro_batches)
            return
        random_state = rng_state()
        self._shared.remember()
        self._state = counter_state(self.reference.task, self.reference.model)
        self.reference.begin(step)
        plain_step = _rerun(step, copied)
        with self._replica.strategy.same_random_state(self.reference.model, plain_step) as alike:
            self.reference.run_schedule(alike, StepClock())
        self._replica.strategy.report_unused_parameters(self._unused())
        self._loss = self.reference.loss.complete(StepClock())
        if self._replica.strategy.capabilities.unused_have_zeros:
            for parameter in self.reference.model.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        self._check_state()
        self._shared.check()
        load_rng_state(*random_state)
        with refused(self._job, self._is_explained):
            yield _rerun(step, micro_batches)
        self._num_made += 1

    def _check_state(self) -> None:
        """Compare more steps if the step has changed state that may affect later steps."""
        if counter_state(self.reference.task, self.reference.model) != self._state:
            self._num_steps = NUM_STEPS_WITH_STATE

    def _copied(self, micro_batches: list[Any]) -> list[Any] | None:
        """Return copies of the batches; None, with a warning on rank 0, if a rank cannot copy its batches."""
        copied, problem = result_of(lambda: copy.deepcopy(micro_batches))
        if not any_rank(self._world, flag=problem is not None):
            return copied
        if self._world.rank == 0:
            log.warning(
                "the strategy is not compared with the plain model: batches cannot be copied%s",
                "" if problem is None else f": {problem}",
            )
        return None

    def compare_gradients(self, loss: torch.Tensor) -> None:
        """Raise ``UserError`` if loss or gradients differ; copy the gradients to the reference. Collective.

        Args:
            loss: Loss of the step over all ranks, shape [].
        """
        if self.is_done:
            return
        self._refuse(self._differing_gradients(loss))
        self._take_gradients()

    def compare_update(self, lr: float, *, want_norm: bool) -> None:
        """Update the reference; raise ``UserError`` if weights, buffers or optimizer differ. Collective."""
        if self.is_done:
            return
        self._shared.remember()
        self.reference.update(self._loss, lr, want_norm=want_norm)
        self._check_state()
        self._shared.check()
        self._refuse(self._differing_state(lr))

    def _unused(self) -> list[str]:
        """Return the names of parameters that the last pass of this step does not use on some rank."""
        used = {id(p) for p in self.reference.strategy.used_in_last_pass()}
        mine = [
            name
            for name, p in self.reference.model.named_parameters()
            if p.requires_grad and id(p) not in used
        ]
        return sorted({name for names in allgather_json(self._world, mine) for name in names})

    # -- differences

    def _differing_gradients(self, loss: torch.Tensor) -> Difference | None:
        limit, rounding = self._gradient_limit(), NUM_ROUNDINGS * self._eps()
        ours, theirs = float(loss), float(self._loss)
        # A rank sums its part of the loss in float32.
        if not _are_close(ours, theirs, max(limit, 1e-6) * max(abs(theirs), 1e-3)):
            return Difference("the loss", f"{ours:.9g}", f"{theirs:.9g}", "loss")
        expected = dict(self.reference.gradients_by_name())
        largest = max((_rms(g) for g in expected.values() if g is not None), default=0.0)
        for name, part, found in self._replica.strategy.local_gradients():
            whole = expected.get(name)
            wanted = None if whole is None or found is None else part_of(whole, part, found)
            if whole is None or wanted is None or found is None:
                if whole is not found and _is_not_zero(whole if found is None else found):
                    return Difference(
                        f"the gradient of {name}", _presence(found), _presence(whole), "gradient"
                    )
                continue
            difference = found.detach().to(wide_type(wanted.dtype)) - wanted.to(wide_type(wanted.dtype))
            allowed = max(limit * _rms(whole), rounding * largest)
            if not _rms(difference) <= allowed and _any_finite(found, wanted):
                return _difference_at(f"the gradient of {name}", found, wanted, "gradient")
        return None

    def _differing_state(self, lr: float) -> Difference | None:
        expected = {name: local.tensor for name, local in self.reference.strategy.local_tensors().items()}
        names = {name for name, _ in self.reference.model.named_parameters(remove_duplicate=False)}
        clip_error = self._clip_error()
        rounding = clip_error * lr * max(1.0, self._job.train.clip_grad_norm or 0.0)
        for name, local in self._replica.strategy.local_tensors().items():
            wanted = part_of(expected[name], local.part, local.tensor)
            if name in names:
                if not _are_alike(local.tensor, wanted, absolute=rounding):
                    return _difference_at(f"the weight {name}", local.tensor, wanted, "update")
            elif not self._is_close_buffer(local.tensor, wanted):
                return _difference_at(f"the buffer {name}", local.tensor, wanted, "buffer")
        state = optimizer_tensors(
            self.reference.strategy.saved_optimizer, self.reference.strategy.optimized()
        )
        own = self._replica.strategy
        for name, local in optimizer_tensors(own.saved_optimizer, own.optimized()).items():
            if name not in state:
                return Difference(f"the optimizer's {name}", "there", "absent", "update")
            wanted = part_of(state[name].tensor, local.part, local.tensor)
            if not _are_alike(local.tensor, wanted, relative=clip_error):
                return _difference_at(f"the optimizer's {name}", local.tensor, wanted, "update")
        return None

    def _clip_error(self) -> float:
        """Return the relative error of the clipping factor of gradients."""
        if self._job.train.clip_grad_norm is None:
            return 0.0
        # The norm is computed in the least precise dtype of all gradients.
        dtypes = {
            p.dtype for p in self.reference.model.parameters() if p.is_floating_point() or p.is_complex()
        }
        return 4 * max(torch.finfo(dtype).eps for dtype in dtypes)

    def _is_close_buffer(self, found: torch.Tensor, wanted: torch.Tensor) -> bool:
        if not (wanted.is_floating_point() or wanted.is_complex()):
            return torch.equal(found, wanted)
        limit = max(self._gradient_limit(), NUM_ULPS * torch.finfo(wanted.dtype).eps)
        difference = found.to(wide_type(wanted.dtype)) - wanted.to(wide_type(wanted.dtype))
        return _rms(difference) <= limit * max(_rms(wanted), 1e-30) or not _any_finite(found, wanted)

    def _refuse(self, difference: Difference | None) -> None:
        """Raise ``UserError`` on all ranks if a rank has found a difference. Collective."""
        mine = None if difference is None else list(vars(difference).values())
        everyone = allgather_json(self._world, mine)
        seen = [rank for rank, each in enumerate(everyone) if each is not None]
        if not seen:
            return
        what, found, expected, stage = everyone[seen[0]]
        strategy = self._job.strategy.name
        later = "" if self._num_made == 0 else " Earlier steps agreed: state in Python may be the reason."
        raise UserError(
            f"strategy {strategy} does not train this model as one process does: in step "
            f"{self._num_made + 1} since this start, {what} is {found} on {describe_ranks([seen[0]])}, and "
            f"{expected} with the plain model. Likely cause: {CAUSES[stage]}.{later}",
            hint="use strategy: allreduce, or change the model; health.verify_strategy: false does "
            "not compare",
        )

    # -- gradients

    def _take_gradients(self) -> None:
        """Copy the strategy's gradients to the reference: each shard from the first rank that stores it."""
        local = list(self._replica.strategy.local_gradients())
        keys = [_key(name, part, found) for name, part, found in local]
        of_ranks = allgather_json(self._world, keys)
        first: dict[str, int] = {}
        for rank, of_rank in enumerate(of_ranks):
            for local_part in map(repr, of_rank):
                first.setdefault(local_part, rank)
        is_whole = all(of_rank == of_ranks[0] for of_rank in of_ranks) and all(
            part is None for _, part, _ in local
        )
        present = {name for of_rank in of_ranks for name, _, shape in of_rank if shape is not None}
        for name, gradient in self.reference.gradients_by_name():
            if gradient is None or name not in present:
                continue
            whole = torch.zeros(gradient.shape, dtype=wide_type(gradient.dtype), device=gradient.device)
            for key, (of, part, found) in zip(keys, local, strict=True):
                if of == name and found is not None and (is_whole or first[repr(key)] == self._world.rank):
                    part_of(whole, part, found).copy_(found)
            if not is_whole:
                self._world.wait(self._world.start_allreduce(whole, f"horovod_train.verify.{name}"))
            gradient.copy_(whole)

    def _eps(self) -> float:
        """Return the machine epsilon of the least precise dtype of the passes."""
        return max((torch.finfo(dtype).eps for dtype in self._dtypes()), default=0.0)

    def _dtypes(self) -> set[torch.dtype]:
        dtypes = {p.dtype.to_real() for p in self.reference.model.parameters() if p.dtype.is_floating_point}
        if self._job.train.precision != "fp32":
            dtypes.add(torch.bfloat16)
        return dtypes

    def _gradient_limit(self) -> float:
        """Return the tolerated relative difference of a gradient."""
        limits = [GRADIENT_LIMITS.get(dtype, LOOSEST) for dtype in self._dtypes()]
        limit = max(limits, default=GRADIENT_LIMITS[torch.float32])
        return max(limit, GPU_LIMIT) if self._loss.is_cuda else limit


def _key(name: str, part: Part | None, found: torch.Tensor | None) -> list[Any]:
    return [name, None if part is None else list(part.start), None if found is None else list(found.shape)]


def refused(job: Job, is_explained: Callable[[Exception], bool]) -> AbstractContextManager[None]:
    """Return a context that replaces an exception by a ``UserError`` about the strategy.

    Exceptions with another known cause, for which ``is_explained`` returns True, are not replaced.
    """

    def refusal(error: Exception) -> UserError | None:
        if is_explained(error):
            return None
        lines = str(error).strip().splitlines() or [""]
        return UserError(
            f"strategy {job.strategy.name} cannot train this model: {type(error).__name__}: {lines[0][:400]}",
            hint="use strategy: allreduce, or change the model",
        )

    return translated(refusal)


def part_of(whole: torch.Tensor, part: Part | None, like: torch.Tensor) -> torch.Tensor:
    """Return a part of ``whole``, in the shape of ``like``; a view if ``whole`` is contiguous."""
    if part is None:
        return whole
    if len(part.start) != whole.dim():
        return whole.reshape(-1)[part.start[0] : part.start[0] + like.numel()].view(like.shape)
    for dim, (start, length) in enumerate(zip(part.start, like.shape, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), length)
    return whole


def _rerun(step: PlannedStep, micro_batches: Sequence[Any]) -> PlannedStep:
    """Return a copy of a step with batches that were already read."""
    return PlannedStep(step.share, iter([batch for _, batch in micro_batches]), step.is_last, step.epoch)


def _rms(tensor: torch.Tensor) -> float:
    """Return the root mean square of the elements."""
    if not tensor.numel():
        return 0.0
    return float(tensor.detach().abs().double().square().mean().sqrt())


def _are_alike(
    found: torch.Tensor, wanted: torch.Tensor, *, absolute: float = 0.0, relative: float = 0.0
) -> bool:
    """Return whether no element differs by more than ``NUM_ULPS`` units in the last place of the largest."""
    if found.shape != wanted.shape:
        return False
    if not (wanted.is_floating_point() or wanted.is_complex()) or not wanted.numel():
        return torch.equal(found.to(wanted.dtype), wanted)
    difference = (found.to(wide_type(wanted.dtype)) - wanted.to(wide_type(wanted.dtype))).abs()
    allowed = (NUM_ULPS * torch.finfo(wanted.dtype).eps + relative) * wanted.abs().max() + absolute
    return bool((difference <= allowed).all()) or not _any_finite(found, wanted)


def _any_finite(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether at least one of two tensors is finite, so that a comparison is meaningful.

    Empty shards are not compared: that of a gradient which overflowed would differ from it.
    """
    if not found.numel():
        return False
    return bool(found.isfinite().all()) or bool(wanted.isfinite().all())


def _are_close(found: float, wanted: float, allowed: float) -> bool:
    if not (math.isfinite(found) or math.isfinite(wanted)):
        return True
    return abs(found - wanted) <= allowed


def _is_not_zero(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and bool(tensor.any())


def _difference_at(what: str, found: torch.Tensor, wanted: torch.Tensor, stage: str) -> Difference:
    """Return the largest difference between elements of two tensors, or the difference of their shapes."""
    if found.shape != wanted.shape or not wanted.numel():
        return Difference(what, f"of shape {list(found.shape)}", f"of shape {list(wanted.shape)}", stage)
    numbers = torch.stack([found.reshape(-1), wanted.reshape(-1).to(found.dtype)])
    wide = numbers if numbers.is_complex() else numbers.double()
    at = int((wide[0] - wide[1]).abs().nan_to_num(nan=float("inf")).argmax())
    ours, theirs = wide[:, at].tolist()
    return Difference(f"element {at} of {what}", f"{ours:.9g}", f"{theirs:.9g}", stage)


def _presence(tensor: torch.Tensor | None) -> str:
    return "absent" if tensor is None else f"of norm {float(tensor.norm()):.9g}"


class FirstSteps:
    """Checks of a replica's first steps.

    Args:
        checks: Functions that are called once, after the first step.

    Attributes:
        verifier: Compares the first steps with those of the plain model; None: disabled or finished.
    """

    def __init__(self, checks: Sequence[Callable[[], None]]) -> None:
        self._checks = list(checks)
        self.verifier: StrategyVerifier | None = None

    @contextmanager
    def checked(self, step: PlannedStep) -> Iterator[PlannedStep]:
        """Yield the step that the block must perform, and check it afterwards.

        Raises:
            UserError: The strategy does not train like the plain model, or ranks differ.
        """
        if self.verifier is None:
            yield step
        else:
            with self.verifier.compared(step) as same:
                yield same
            if self.verifier.is_done:
                self.verifier = None
        while self._checks:
            self._checks.pop(0)()

    def after_reduce(self, loss: torch.Tensor) -> None:
        """Compare gradients, and the loss of the step over all ranks, shape [], with the plain model."""
        if self.verifier is not None:
            self.verifier.compare_gradients(loss)

    def after_update(self, lr: float, *, want_norm: bool) -> None:
        """Compare weights, buffers and optimizer state with the plain model."""
        if self.verifier is not None:
            self.verifier.compare_update(lr, want_norm=want_norm)

    def set_arguments(self, values: Mapping[str, float]) -> None:
        """Set arguments of the plain model's optimizer."""
        if self.verifier is not None:
            self.verifier.reference.set_arguments(values)

    def broadcast(self) -> None:
        """Broadcast rank 0's weights to the plain models of all ranks."""
        if self.verifier is not None:
            self.verifier.broadcast()

    def load_state(self, state: ReplicaState) -> None:
        """Load a state into the plain model."""
        if self.verifier is not None:
            self.verifier.reference.load_state(state)


def check_model(model: torch.nn.Module) -> None:
    """Raise ``UserError`` with the first weight or buffer of a model that a checkpoint cannot contain."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter | UninitializedBuffer):
            raise UserError(
                f"the parameter {name!r} has no shape yet: it is of a lazy module",
                hint="call the model with a batch in the task's model(), before it is returned",
            )
    for name, value in model.state_dict(keep_vars=True).items():
        _check_value(name, value)


def _check_value(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise UserError(
            f"the model's state has {name!r}, which is a {type(value).__name__}: a checkpoint holds tensors",
            hint="let get_extra_state() return a tensor, or keep the state in a buffer",
        )
    if name == METADATA:
        raise UserError(
            f"the name {name!r} is one that safetensors files keep for themselves",
            hint="give the parameter or buffer another name",
        )
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in DTYPE_CODES:
        raise UserError(
            f"{name!r} is of type {dtype}, which a checkpoint cannot hold",
            hint="use complex64 for complex128"
            if dtype == "complex128"
            else f"types are {', '.join(DTYPE_CODES)}",
        )
    if value.layout != torch.strided:
        layout = str(value.layout).removeprefix("torch.")
        raise UserError(
            f"{name!r} is a sparse tensor ({layout}), which ranks cannot compare and a checkpoint "
            "cannot hold",
            hint="keep its indices and values as two buffers, and make the sparse tensor in forward()",
        )


def refuse_hooks_of_parameters(
    model: torch.nn.Module, strategy: str, *, are_parameters_replaced: bool = False
) -> None:
    """Raise ``UserError`` with the first parameter that has a hook of its gradient.

    If the strategy replaces parameters, hooks that only observe gradients are refused, too.
    """
    for name, parameter in model.named_parameters():
        if num_hooks(parameter) if are_parameters_replaced else has_hooks(parameter):
            raise UserError(
                f"strategy {strategy}: {name!r} has a hook of its gradient, which needs the whole gradient, "
                "but a rank has only a part of it",
                hint="use strategy: allreduce, ddp or fsdp",
            )


def refuse_repeated_parameters(model: torch.nn.Module, groups: Sequence[object]) -> None:
    """Refuse groups of a task in which a parameter occurs twice."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen: set[int] = set()
    for group in groups:
        if not isinstance(group, dict) or isinstance(group.get("params", ()), torch.Tensor):
            continue
        group["params"] = list(group.get("params", ()))  # an iterator could be read only once
        for parameter in group["params"]:
            if id(parameter) in seen:
                raise UserError(
                    f"param_groups(model) returns {names.get(id(parameter), 'a parameter')!r} twice",
                    hint="let each parameter be in one group",
                )
            seen.add(id(parameter))
