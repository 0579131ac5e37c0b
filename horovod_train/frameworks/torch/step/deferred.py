"""Results of a step that are computed on a device.

DeviceClock       time on a device, measured by events in its queue: the host only enqueues work
DeferredOutcome   result of a step, which is read later, so that the host does not block
NoiseMeter        squared norms of the gradients of parts of a step, for the gradient noise scale
                  (``training/noise.py``)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any, Protocol

import torch

from horovod_train.collectives.base import Communicator, DeviceWork
from horovod_train.data.shard import PlannedStep
from horovod_train.frameworks.base import StepClock, StepOutcome


class Timer(Protocol):
    """Marks in the queue of a device's work."""

    def mark(self) -> Any:
        """Enqueue a mark after the work that is enqueued now; returns immediately."""
        ...

    def is_reached(self, mark: Any) -> bool:
        """Return whether the device has reached a mark; non-blocking, from any thread."""
        ...

    def seconds_between(self, first: Any, second: Any) -> float:
        """Return the device time between two reached marks."""
        ...

    def release(self, marks: Iterable[Any]) -> None:
        """Release marks that are no longer needed."""
        ...


class CudaTimer:
    """Timer with CUDA events on the current stream, which are reused."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        """Enqueue an event after the work that is enqueued now."""
        if not self._free:
            self._free.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        event = self._free.pop()
        event.record()
        return event

    def is_reached(self, mark: torch.cuda.Event) -> bool:
        """Return whether the device has reached a mark."""
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def seconds_between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """Return the device time between two events."""
        return first.elapsed_time(second) / 1e3

    def release(self, marks: Iterable[torch.cuda.Event]) -> None:
        """Release events for reuse."""
        self._free.extend(marks)


class HostTimer:
    """Timer for a CPU, where work is not enqueued."""

    def mark(self) -> float:
        """Return the time."""
        return perf_counter()

    def is_reached(self, mark: float) -> bool:
        """Return True."""
        return True

    def seconds_between(self, first: float, second: float) -> float:
        """Return the difference."""
        return second - first

    def release(self, marks: Iterable[float]) -> None:
        """Do nothing."""


class DeviceClock(StepClock):
    """Clock of a step's phases on the device; durations are available after ``read``.

    A phase is the device time between two laps. The optimizer phase is the time of its kernels, and reading
    data takes no time while the device has other work. ``synchronizes``: the update reads numbers from
    the device.
    """

    def __init__(self, timer: Timer, *, synchronizes: bool = False) -> None:
        super().__init__()
        self._timer = timer
        self._settles = synchronizes
        self._laps: list[tuple[str, Any]] = [("", timer.mark())]

    def end_phase(self, phase: str) -> None:
        self._laps.append((phase, self._timer.mark()))

    def settle(self, ranks: Communicator, read: Callable[[], object]) -> None:
        """If the update would wait for the device, wait by ``read`` here, where ``ranks`` records it."""
        if self._settles:
            ranks.wait_in(DeviceWork(self.phase), read)

    def phase(self) -> str:
        """Return the current phase of the device; empty: none. Another thread may call it."""
        return next((phase for phase, mark in self._laps if not self._timer.is_reached(mark)), "")

    def read(self) -> None:
        """Compute the durations of phases; called once, after the last phase has ended on the device."""
        marks = [mark for _, mark in self._laps]
        for (_, before), (phase, after) in pairwise(self._laps):
            seconds = self._timer.seconds_between(before, after)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        self._begun, self._last = 0.0, self._timer.seconds_between(marks[0], marks[-1])
        self._timer.release(marks)


LAG_STEPS = 2
"""Number of steps by which results are read later, so that the device always has enqueued work.

The lag is fixed instead of depending on completion: ranks act on results (end training, or communicate
to find the rank with the non-finite loss), and must do so after the same step.
"""

Number = torch.Tensor | float | None


def lag_steps_of(device: torch.device) -> int:
    """Return the number of steps by which results are read later: 0 on a CPU."""
    return LAG_STEPS if device.type == "cuda" else 0


class Sent:
    """An asynchronous copy of a vector of numbers, shape [n], from a device to the host."""

    def __init__(self, vector: torch.Tensor) -> None:
        # PyTorch copies to pinned memory, and retains it until the asynchronous copy has finished.
        self._arriving = vector.detach().to("cpu", non_blocking=True, copy=True)
        self._event: torch.cuda.Event | None = None
        if vector.is_cuda:
            # A blocking event: synchronize() yields the CPU instead of spinning.
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def is_ready(self) -> bool:
        """Return whether the copy has finished."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[float]:
        """Wait for the copy; return the numbers."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._arriving.numpy().tolist()
        return numbers


def outcome_from(numbers: Mapping[str, float | None], clock: StepClock) -> StepOutcome:
    """Return a step's outcome, given its fields and further numbers by name; booleans are 1 and 0."""
    further = dict(numbers)
    loss, local_loss = further.pop("loss"), further.pop("local_loss")
    is_finite, was_executed = further.pop("is_finite"), further.pop("was_executed", True)
    assert loss is not None
    assert local_loss is not None
    return StepOutcome(loss, local_loss, bool(is_finite), clock, further, bool(was_executed))


@dataclass(frozen=True)
class Packed:
    """The numbers of a step; the numbers on the device are packed in one vector.

    Attributes:
        names: Names of the elements of ``vector``.
        vector: Shape [len(names)]; float64 if any of the numbers is float64, else float32.
        known: Numbers on the host, by name.
    """

    names: Sequence[str]
    vector: torch.Tensor
    known: Mapping[str, float | None]

    def with_known(self, numbers: Mapping[str, float | None]) -> Packed:
        """Return these numbers, with further numbers on the host."""
        return Packed(self.names, self.vector, {**self.known, **numbers})


def pack(numbers: Mapping[str, Number]) -> Packed:
    """Stack the numbers on the device in one vector; at least one, each of shape []."""
    on_device = {name: value for name, value in numbers.items() if isinstance(value, torch.Tensor)}
    known = {name: value for name, value in numbers.items() if not isinstance(value, torch.Tensor)}
    wide = torch.float64 if any(v.dtype == torch.float64 for v in on_device.values()) else torch.float32
    vector = torch.stack([value.detach().reshape(()).to(wide) for value in on_device.values()])
    return Packed(list(on_device), vector, known)


class DeferredOutcome:
    """Outcome of a step. Its properties wait until the device finishes it, and ``world`` records the wait."""

    def __init__(self, packed: Packed, clock: DeviceClock, world: Communicator) -> None:
        self._names, self._known = packed.names, packed.known
        self._sent = Sent(packed.vector)
        self._clock = clock
        self._world = world
        self._found: StepOutcome | None = None

    def outcome(self) -> StepOutcome:
        """Return the outcome of the step; waits for the device if it has not finished the step."""
        if self._found is None:
            numbers = self._world.wait_in(DeviceWork(self._clock.phase), self._sent.read)
            found = {**self._known, **dict(zip(self._names, numbers, strict=True))}
            self._clock.read()
            self._found = outcome_from(found, self._clock)
        return self._found

    def is_ready(self) -> bool:
        """Return whether ``outcome`` would return without waiting."""
        return self._found is not None or self._sent.is_ready()

    @property
    def loss(self) -> float:
        """Mean loss over the samples of the step, over all ranks. This and the next properties wait."""
        return self.outcome().loss

    @property
    def local_loss(self) -> float:
        """This rank's contribution to the loss."""
        return self.outcome().local_loss

    @property
    def grad_norm(self) -> float | None:
        """Norm of the gradient before clipping; None: not computed."""
        return self.outcome().grad_norm

    @property
    def is_finite(self) -> bool:
        """Whether the step was used."""
        return self.outcome().is_finite

    @property
    def numbers(self) -> Mapping[str, float | None]:
        """Further numbers of the step by name; None: not computed."""
        return self.outcome().numbers

    @property
    def was_executed(self) -> bool:
        """False: an earlier step has ended training."""
        return self.outcome().was_executed

    @property
    def clock(self) -> StepClock:
        """Time of each phase."""
        return self.outcome().clock


Outcome = StepOutcome | DeferredOutcome
"""Result of a step, available now or deferred."""


def outcome_of(
    numbers: Mapping[str, Number] | Packed,
    of_host: Mapping[str, float | None],
    clock: StepClock,
    ranks: Communicator,
) -> Outcome:
    """Return a step's outcome, deferred if the clock is a ``DeviceClock``.

    ``numbers`` contains the fields of ``StepOutcome`` and further numbers; ``of_host``, numbers on the host.
    """
    if isinstance(clock, DeviceClock):
        packed = numbers if isinstance(numbers, Packed) else pack(numbers)
        return DeferredOutcome(packed.with_known(of_host), clock, ranks)
    assert not isinstance(numbers, Packed)
    known = {name: None if value is None else float(value) for name, value in numbers.items()}
    return outcome_from({**known, **of_host}, clock)


class NoiseMeter:
    """Measures the squared norms of the parts of a step, by parameter group.

    A part is the gradient that a rank passes to the all-reduce: that of its samples, or of one micro-batch
    if each is reduced (``zero``). Each rank adds the squared norms of its parts, and the sums travel in the
    trailer of the gradients. A single rank compares its first micro-batch with the whole step.

    .. code-block:: text

        a part p has the gradient c_p = w_p g_p
        w_p: its fraction of the step's samples (or counted units)
        mean over parts of |g_p|^2, weighted by w_p:   sum of |c_p|^2 / w_p

    Args:
        optimizer: The optimizer, before a strategy shards it.
        by_group: Separate the parameter groups; otherwise, there is one group.
        device: Device of the gradients.
        has_parts: The strategy passes the gradients of parts; otherwise, a single rank trains.

    Attributes:
        is_due: Whether the next step is measured; set between steps.
        num_groups: Number of groups.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, by_group: bool, device: torch.device, has_parts: bool
    ) -> None:
        self._optimizer, self._has_parts = optimizer, has_parts
        self.is_due = False
        self.num_groups = len(optimizer.param_groups) if by_group else 1
        self._group_of = {
            id(parameter): number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        self._device = device
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}
        self._reset()

    @property
    def length(self) -> int:
        """Number of elements in the trailer: a sum per group, and the number of parts."""
        return self.num_groups + 1

    def begin(self, _: PlannedStep) -> None:
        """Begin a step."""
        if self.is_due:
            self._reset()

    def _reset(self) -> None:
        self._squares = torch.zeros(self.num_groups, device=self._device)
        self._weight = torch.zeros((), device=self._device)
        self._parts = torch.zeros(self.length, device=self._device)
        self._first: tuple[torch.Tensor, torch.Tensor] | None = None
        self._sums: torch.Tensor | None = None
        self._is_discarded = False
        self._num_micro_batches = 0

    def add_weight(self, weight: float | torch.Tensor) -> None:
        """Add a micro-batch's fraction of the step's samples to the current part; precedes its backward."""
        if not self._has_parts and self._num_micro_batches == 1:
            self._first = self.squares_by_group(), torch.as_tensor(self._weight).clone()
        self._num_micro_batches += 1
        self._weight = self._weight + weight

    def add_gradients(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        flat: torch.Tensor | None = None,
    ) -> None:
        """Add gradients of parameters to the current part, before they are summed over ranks.

        ``flat`` contains all of them in one tensor, which takes less time without groups.
        """
        if self.num_groups == 1:
            self._squares += squares_of(gradients if flat is None else [flat]).sum()
            return
        key = tuple(map(id, parameters))
        if key not in self._indices:
            groups = [self._group_of.get(id(parameter), 0) for parameter in parameters]
            self._indices[key] = torch.tensor(groups, device=self._device)
        self._squares.index_add_(0, self._indices[key], squares_of(gradients))

    def end_part(self) -> None:
        """Complete the current part: its gradients are passed to the all-reduce."""
        has_samples = self._weight > 0
        mine = torch.where(has_samples, self._squares / self._weight, 0.0)
        self._parts += torch.cat([mine, has_samples.to(mine.dtype).reshape(1)])
        self._squares, self._weight = torch.zeros_like(self._squares), torch.zeros_like(self._weight)

    def discard(self) -> None:
        """Ignore this step, because its parts do not contain all gradients."""
        self._is_discarded = True

    @property
    def local(self) -> torch.Tensor:
        """Sums over this rank's parts, shape [length]."""
        return self._parts

    def receive(self, sums: torch.Tensor) -> None:
        """Store the sums over all ranks, shape [length]."""
        self._sums = sums.clone()

    @torch.no_grad()
    def squares_by_group(self, flat: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """Return the squared norm of the optimizer's current gradients by group, shape [num_groups].

        ``flat`` contains all gradients in a few tensors, which takes less time without groups.
        """
        if self.num_groups == 1 and flat:
            return squares_of(flat).sum().reshape(1)
        groups = [group["params"] for group in self._optimizer.param_groups]
        if self.num_groups == 1:
            groups = [[parameter for group in groups for parameter in group]]
        squares = [
            squares_of(found).sum() if (found := [p.grad for p in group if p.grad is not None]) else None
            for group in groups
        ]
        zero = torch.zeros((), device=self._device)
        return torch.stack([zero if each is None else each for each in squares])

    def numbers(
        self,
        of_batch: torch.Tensor,
        total: torch.Tensor | None,
        num_samples: int,
        scale: float | torch.Tensor,
    ) -> Mapping[str, Number]:
        """Return the moments of the step, as numbers of its outcome; empty: it was not measured.

        Args:
            of_batch: Squared norm of the gradient of the step by group, shape [num_groups].
            total: Divisor of gradients whose loss is a sum and a count, per sample; None: losses are means.
            num_samples: Samples of the step.
            scale: Loss scale by which all gradients are multiplied.
        """
        divisor = 1.0 if total is None else total
        if self._is_discarded:
            return {}
        if self._sums is not None:
            of_parts, inverse_part = self._sums[:-1] / divisor, self._sums[-1] / num_samples
        elif self._first is not None:
            squares, weight = self._first
            of_parts, inverse_part = squares / weight**2, divisor / (weight * num_samples)
        else:
            return {}
        return {
            "noise_inverse_part": inverse_part,
            **{f"noise_of_batch_{n}": each / scale**2 for n, each in enumerate(of_batch)},
            **{f"noise_of_parts_{n}": each / scale**2 for n, each in enumerate(of_parts)},
        }


def squares_of(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the squared norms of tensors in at least 32 bits, shape [number of tensors]."""
    dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
    wide = [each.float() if each.dtype in {torch.float16, torch.bfloat16} else each for each in dense]
    reals = [torch.view_as_real(each) if each.is_complex() else each for each in wide]
    if (
        reals[0].device.type == "cpu"
    ):  # a dot product is faster, and more exact, than a norm (see strategies/base.py)
        flat = [each.reshape(-1) for each in reals]
        return torch.stack([each.dot(each).float() for each in flat])
    return torch.stack(torch._foreach_norm(reals)).square().float()  # noqa: SLF001
