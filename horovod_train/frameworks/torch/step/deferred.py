"""What a step on a device turned out to be, read later: the host does not wait for the device in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from horovod_train.collectives.base import Communicator
from horovod_train.collectives.log import DeviceWork
from horovod_train.frameworks.base import StepClock, StepOutcome
from horovod_train.frameworks.torch.step.device_clock import DeviceClock

LAG_STEPS = 2
"""Results are read this many steps later, so that the device always has enqueued work.

The number is fixed, and not "when it is there": ranks act on what they read (they end training, and ask each
other whose loss it was), and have to do so after the same step.
"""

Number = torch.Tensor | float | None


def lag_steps_of(device: torch.device) -> int:
    """Return the number of steps by which results are read later: 0 on a CPU."""
    return LAG_STEPS if device.type == "cuda" else 0


class Sent:
    """Numbers on their way from a device to the host.

    Args:
        vector: Shape [n].
    """

    def __init__(self, vector: torch.Tensor) -> None:
        # Into pinned memory, which PyTorch keeps until the asynchronous copy has finished.
        self._arriving = vector.detach().to("cpu", non_blocking=True, copy=True)
        self._event: torch.cuda.Event | None = None
        if vector.is_cuda:
            # Who waits leaves the processor to others.
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def is_ready(self) -> bool:
        """Return whether they have come."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[float]:
        """Return them; waits until they are there."""
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
    """The numbers of a step, those on the device in one vector.

    Attributes:
        names: Of the numbers in the vector, in their order.
        vector: Shape [len(names)], wide enough for all of them.
        known: The others.
    """

    names: Sequence[str]
    vector: torch.Tensor
    known: Mapping[str, float | None]

    def with_known(self, numbers: Mapping[str, float | None]) -> Packed:
        """Return these numbers, and more that the host knows."""
        return Packed(self.names, self.vector, {**self.known, **numbers})


def pack(numbers: Mapping[str, Number]) -> Packed:
    """Put together what is on the device; tensors have shape []."""
    on_device = {name: value for name, value in numbers.items() if isinstance(value, torch.Tensor)}
    known = {name: value for name, value in numbers.items() if not isinstance(value, torch.Tensor)}
    wide = torch.float64 if any(v.dtype == torch.float64 for v in on_device.values()) else torch.float32
    vector = torch.stack([value.detach().reshape(()).to(wide) for value in on_device.values()])
    return Packed(list(on_device), vector, known)


class DeferredOutcome:
    """Outcome of a step that the device has not finished; its properties wait for the device.

    Args:
        packed: Fields of ``StepOutcome`` and further numbers, by name.
        clock: Time of each phase.
        world: The ranks; they learn that this one waits for its device.
    """

    def __init__(self, packed: Packed, clock: DeviceClock, world: Communicator) -> None:
        self._names, self._known = packed.names, packed.known
        self._sent = Sent(packed.vector)
        self._clock = clock
        self._world = world
        self._found: StepOutcome | None = None

    def outcome(self) -> StepOutcome:
        """Return what the step turned out to be; waits for the device when it has not come there yet."""
        if self._found is None:
            numbers = self._world.wait_in(DeviceWork(self._clock.phase), self._sent.read)
            found = {**self._known, **dict(zip(self._names, numbers, strict=True))}
            self._clock.read()
            self._found = outcome_from(found, self._clock)
        return self._found

    def is_ready(self) -> bool:
        """Return whether that is known by now."""
        return self._found is not None or self._sent.is_ready()

    @property
    def loss(self) -> float:
        """Mean loss over the samples of the step, over all ranks; waits for the device, as all below do."""
        return self.outcome().loss

    @property
    def local_loss(self) -> float:
        """This rank's part of that mean."""
        return self.outcome().local_loss

    @property
    def grad_norm(self) -> float | None:
        """Norm of the gradient before clipping; None: it was not taken."""
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
        """Where the time went."""
        return self.outcome().clock


Outcome = StepOutcome | DeferredOutcome
"""What a step turned out to be, known now or later."""


def outcome_of(
    numbers: Mapping[str, Number] | Packed,
    of_host: Mapping[str, float | None],
    clock: StepClock,
    ranks: Communicator,
) -> Outcome:
    """Return a step's outcome, or a future of it.

    Args:
        numbers: Fields of ``StepOutcome`` and further numbers of the step.
        of_host: Further numbers that the host knows.
        clock: Time of each phase; if it is one of a device, the numbers are not read now.
        ranks: The ranks; they learn that this one waits for its device.
    """
    if isinstance(clock, DeviceClock):
        packed = numbers if isinstance(numbers, Packed) else pack(numbers)
        return DeferredOutcome(packed.with_known(of_host), clock, ranks)
    assert not isinstance(numbers, Packed)
    known = {name: None if value is None else float(value) for name, value in numbers.items()}
    return outcome_from({**known, **of_host}, clock)
