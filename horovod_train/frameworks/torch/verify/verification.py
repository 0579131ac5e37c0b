"""Compare the first steps under a strategy with those of the plain model.

A strategy replaces a model's parameters, calls its modules in another way, or updates parts of its weights. A
model for which that changes the result must not be trained so. Therefore a reference replica is built by a
second call of the task's ``model()``: the plain model, under ``allreduce``. It makes the first steps too,
with a copy of the same micro-batches and the same random state, and is compared twice in each:

    before the update  loss, and each gradient
    after the update   each weight, buffer, and tensor of the optimizer's state; the reference makes its
    update
                       with the strategy's gradients, so that rounding does not add up and the limits are
                       tight

Python state (a counter, a temperature, a generator) shows its effect later. Where the task or the model
changes such state, more steps are compared. After that the reference is deleted.

What the plain model raises is the task's own error. What only the strategy raises is a refusal: the plain
model has just made the same step.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from horovod_train.checkpoint.arrays import Part
from horovod_train.collectives.base import Communicator, allgather_json, any_rank
from horovod_train.config.schema import Job
from horovod_train.data.planned_step import PlannedStep
from horovod_train.errors import UserError, describe_ranks, result_of, translated
from horovod_train.frameworks.base import StepClock
from horovod_train.frameworks.torch.comm.collectives import broadcast_model, with_tensors
from horovod_train.frameworks.torch.comm.exchange import wide_type
from horovod_train.frameworks.torch.state.generators import load_rng_state, rng_state
from horovod_train.frameworks.torch.state.local_tensors import optimizer_tensors
from horovod_train.frameworks.torch.verify.task_copy import SharedState, counted_state

log = logging.getLogger(__name__)

NUM_STEPS = 2
NUM_STEPS_WITH_STATE = 6
"""Where the task or the model counts something: in Python, or in a buffer of integers."""

GRADIENT_LIMITS = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: 5e-2,
    torch.float16: 5e-2,
}
"""Relative L2 difference of a gradient, by the type that the forward pass computes in."""
LOOSEST = 5e-2
GPU_LIMIT = 5e-3
"""On a GPU: convolutions in 32 bits are computed in TF32."""
NUM_ROUNDINGS = 8
"""A gradient may differ by so many roundings of the largest one: those that are zero by their mathematics (a
bias before a normalization, of keys in attention) are rounding alone."""
NUM_ULPS = 64
"""Weights and optimizer state may differ by so many units in the last place of the largest number."""


@dataclass(frozen=True)
class Difference:
    """The first number in which a strategy's step differs from the plain model's.

    Attributes:
        what: Such as ``the gradient of layers.0.weight``.
        found: Under the strategy.
        expected: With the plain model.
        stage: When it was seen: loss, gradient, buffer or update.
    """

    what: str
    found: str
    expected: str
    stage: str


CAUSES = {
    "loss": "the forward pass computes something else: code of forward() outside of a module's call (a "
    "context manager, an attribute that changes), or a hook of the model",
    "gradient": "the backward pass computes something else: a hook of a parameter or module, an autograd "
    "function, or a tensor that is changed in place",
    "buffer": "a buffer is not changed exactly once by the forward pass of each micro-batch",
    "update": "the update computes something else: an optimizer that looks at whole tensors, or weights "
    "that the task or the forward pass changes",
}


class StrategyVerifier:
    """Compares the steps of a strategy with those of a reference replica.

    Args:
        job: The job.
        reference: The plain model under ``allreduce`` (a ``TorchReplica``).
        replica: What is compared.
        world: All ranks of the job.
        is_explained: Whether an error of a step has a known cause besides the strategy: a lost rank, or
            memory.
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
        self._world = with_tensors(world)
        self._is_explained = is_explained
        self._state: object = None
        self._shared = SharedState(replica.task, reference.model)
        self._num_made = 0
        self._num_steps = NUM_STEPS

    @property
    def is_done(self) -> bool:
        """Whether all steps that are to be compared have been."""
        return self._num_made >= self._num_steps

    def broadcast(self) -> None:
        """Give the reference rank 0's weights, as all ranks of the strategy have."""
        broadcast_model(self.reference.model, self._world)

    @contextmanager
    def compared(self, step: PlannedStep) -> Iterator[PlannedStep]:
        """Make a step with the reference, then yield the same step for the replica; compare what both did.

        Raises:
            UserError: They differ, or only the reference could make the step.
        """
        micro_batches = list(step)
        copied = self._copied(micro_batches)
        if copied is None:
            self._num_made = self._num_steps
            yield _rerun(step, micro_batches)
            return
        random_state = rng_state()
        self._shared.remember()
        self._state = counted_state(self.reference.task, self.reference.model)
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
        """Compare more steps if such state changes in a step: its effect may come later."""
        if counted_state(self.reference.task, self.reference.model) != self._state:
            self._num_steps = NUM_STEPS_WITH_STATE

    def _copied(self, micro_batches: list[Any]) -> list[Any] | None:
        """Return copies of batches, or None if a rank cannot copy its own: that is reported."""
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
        """Compare loss and gradients; give the strategy's gradients to the reference.

        Args:
            loss: Of the whole step, shape [].

        Raises:
            UserError: They differ.
        """
        if self.is_done:
            return
        self._refuse(self._differing_gradients(loss))
        self._take_gradients()

    def compare_update(self, lr: float, *, want_norm: bool) -> None:
        """Let the reference make its update, and compare weights, buffers and optimizer state.

        Raises:
            UserError: They differ.
        """
        if self.is_done:
            return
        self._shared.remember()
        self.reference.update(self._loss, lr, want_norm=want_norm)
        self._check_state()
        self._shared.check()
        self._refuse(self._differing_state(lr))

    def _unused(self) -> list[str]:
        """Return the names of parameters that the last pass of this step leaves out on some rank."""
        used = {id(p) for p in self.reference.strategy.used_in_last_pass()}
        mine = [
            name
            for name, p in self.reference.model.named_parameters()
            if p.requires_grad and id(p) not in used
        ]
        return sorted({name for names in allgather_json(self._world, mine) for name in names})

    # -- what differs

    def _differing_gradients(self, loss: torch.Tensor) -> Difference | None:
        limit, rounding = self._gradient_limit(), NUM_ROUNDINGS * self._eps()
        ours, theirs = float(loss), float(self._loss)
        # A rank's part of the loss is summed in 32 bits.
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
            if not _rms(difference) <= allowed and _both_finite(found, wanted):
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
        """Return the relative error of the factor that gradients are clipped with."""
        if self._job.train.clip_grad_norm is None:
            return 0.0
        # The norm is computed in the least exact type of all gradients.
        dtypes = {
            p.dtype for p in self.reference.model.parameters() if p.is_floating_point() or p.is_complex()
        }
        return 4 * max(torch.finfo(dtype).eps for dtype in dtypes)

    def _is_close_buffer(self, found: torch.Tensor, wanted: torch.Tensor) -> bool:
        if not (wanted.is_floating_point() or wanted.is_complex()):
            return torch.equal(found, wanted)
        limit = max(self._gradient_limit(), NUM_ULPS * torch.finfo(wanted.dtype).eps)
        difference = found.to(wide_type(wanted.dtype)) - wanted.to(wide_type(wanted.dtype))
        return _rms(difference) <= limit * max(_rms(wanted), 1e-30) or not _both_finite(found, wanted)

    def _refuse(self, difference: Difference | None) -> None:
        """Raise on all ranks what any of them has seen."""
        mine = None if difference is None else list(vars(difference).values())
        everyone = allgather_json(self._world, mine)
        seen = [rank for rank, each in enumerate(everyone) if each is not None]
        if not seen:
            return
        what, found, expected, stage = everyone[seen[0]]
        strategy = self._job.strategy.name
        later = "" if self._num_made == 0 else " It was alike before: state kept in Python may be the reason."
        raise UserError(
            f"strategy {strategy} does not train this model as one process does: in step "
            f"{self._num_made + 1} of this process {what} is {found} on {describe_ranks([seen[0]])}, and "
            f"{expected} with the plain model. Likely cause: {CAUSES[stage]}.{later}",
            hint="use strategy: allreduce, or change the model; health.verify_strategy: false does "
            "not compare",
        )

    # -- gradients

    def _take_gradients(self) -> None:
        """Give the reference the strategy's gradients: of each part, that of the first rank that holds it."""
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
        """Return the rounding of the least exact type that passes compute in."""
        return max((torch.finfo(dtype).eps for dtype in self._dtypes()), default=0.0)

    def _dtypes(self) -> set[torch.dtype]:
        dtypes = {p.dtype.to_real() for p in self.reference.model.parameters() if p.dtype.is_floating_point}
        if self._job.train.precision != "fp32":
            dtypes.add(torch.bfloat16)
        return dtypes

    def _gradient_limit(self) -> float:
        """Return the largest relative difference of a gradient that rounding explains."""
        limits = [GRADIENT_LIMITS.get(dtype, LOOSEST) for dtype in self._dtypes()]
        limit = max(limits, default=GRADIENT_LIMITS[torch.float32])
        return max(limit, GPU_LIMIT) if self._loss.is_cuda else limit


def _key(name: str, part: Part | None, found: torch.Tensor | None) -> list[Any]:
    return [name, None if part is None else list(part.start), None if found is None else list(found.shape)]


def refused(job: Job, is_explained: Callable[[Exception], bool]) -> AbstractContextManager[None]:
    """Return a context in which an exception is a refusal of the strategy, if it has no other cause.

    Args:
        job: Names the strategy.
        is_explained: Whether an error has another known cause: a lost rank, or memory.
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
    """Return what a part of a tensor holds, in the shape of another tensor that is the same part.

    A view, where the whole is contiguous.
    """
    if part is None:
        return whole
    if len(part.start) != whole.dim():
        return whole.reshape(-1)[part.start[0] : part.start[0] + like.numel()].view(like.shape)
    for dim, (start, length) in enumerate(zip(part.start, like.shape, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), length)
    return whole


def _rerun(step: PlannedStep, micro_batches: Sequence[Any]) -> PlannedStep:
    """Return a step whose batches were read already."""
    return PlannedStep(step.share, iter([batch for _, batch in micro_batches]), step.is_last)


def _rms(tensor: torch.Tensor) -> float:
    """Return the root mean square."""
    if not tensor.numel():
        return 0.0
    return float(tensor.detach().abs().double().square().mean().sqrt())


def _are_alike(
    found: torch.Tensor, wanted: torch.Tensor, *, absolute: float = 0.0, relative: float = 0.0
) -> bool:
    """Whether no number differs by more than a few units in the last place of the largest."""
    if found.shape != wanted.shape:
        return False
    if not (wanted.is_floating_point() or wanted.is_complex()) or not wanted.numel():
        return torch.equal(found.to(wanted.dtype), wanted)
    difference = (found.to(wide_type(wanted.dtype)) - wanted.to(wide_type(wanted.dtype))).abs()
    allowed = (NUM_ULPS * torch.finfo(wanted.dtype).eps + relative) * wanted.abs().max() + absolute
    return bool((difference <= allowed).all()) or not _both_finite(found, wanted)


def _both_finite(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether at least one of two tensors is finite: where neither is, there is nothing to compare."""
    return bool(found.isfinite().all()) or bool(wanted.isfinite().all())


def _are_close(found: float, wanted: float, allowed: float) -> bool:
    if not (math.isfinite(found) or math.isfinite(wanted)):
        return True
    return abs(found - wanted) <= allowed


def _is_not_zero(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and bool(tensor.any())


def _difference_at(what: str, found: torch.Tensor, wanted: torch.Tensor, stage: str) -> Difference:
    """Return the largest difference of two tensors."""
    if found.shape != wanted.shape or not wanted.numel():
        return Difference(what, f"of shape {list(found.shape)}", f"of shape {list(wanted.shape)}", stage)
    numbers = torch.stack([found.reshape(-1), wanted.reshape(-1).to(found.dtype)])
    wide = numbers if numbers.is_complex() else numbers.double()
    at = int((wide[0] - wide[1]).abs().nan_to_num(nan=float("inf")).argmax())
    ours, theirs = wide[:, at].tolist()
    return Difference(f"number {at} of {what}", f"{ours:.9g}", f"{theirs:.9g}", stage)


def _presence(tensor: torch.Tensor | None) -> str:
    return "absent" if tensor is None else f"of norm {float(tensor.norm()):.9g}"
