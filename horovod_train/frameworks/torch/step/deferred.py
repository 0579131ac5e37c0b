"""Deferred results: the result of a step on a device is read later, so that the host does not block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from horovod_train.collectives.base import Communicator
from horovod_train.collectives.log import DeviceWork
from horovod_train.frameworks.base import StepClock, StepOutcome
from horovod_train.frameworks.torch.step.device_clock import DeviceClock

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
