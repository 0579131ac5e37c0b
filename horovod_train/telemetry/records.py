"""What feeds metrics: training and samplers make these, the catalog says what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)  # frozen, it would take four times as long to make, in each step
class StepRecord:
    """One optimizer step of this rank.

    Attributes:
        seconds: Its wall time.
        phase_seconds: Where that went, as far as it can be seen.
        num_samples: Samples that this rank read.
        epochs: Epochs passed, with the fraction of the current one.
        loss: Mean loss over the samples of the step, over all ranks.
        local_loss: This rank's part of it.
        lr: Learning rate. Of a script each of these four may be unknown: None.
        is_finite: Loss and gradient were finite, or the step was not used; None: not checked.
        own_seconds: Its time without waiting for the all-reduce; None: not measured separately.
        step: Which step of the training it was, resumed steps included; None: that is not known.
        numbers: Further numbers of the step by name, as ``StepOutcome`` has them; None: not computed.
    """

    seconds: float
    phase_seconds: Mapping[str, float]
    num_samples: int | None
    epochs: float | None
    loss: float | None
    local_loss: float | None
    lr: float | None
    is_finite: bool | None
    own_seconds: float | None = None
    step: int | None = None
    numbers: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class WaitRecord:
    """What the waiting of some steps turned out to be, once all ranks have told each other.

    Attributes:
        waiting_s: Time this rank waited for other ranks.
        communication_s: Time that even the rank that came last waited: the exchange itself.
        waited_for_s: Time that other ranks waited for this one, added up over them.
    """

    waiting_s: float
    communication_s: float
    waited_for_s: float


@dataclass(frozen=True)
class CurrentWaitRecord:
    """For how long this rank has been in the collective that it waits in now; 0: it waits in none."""

    seconds: float


@dataclass(frozen=True)
class ExchangeRecord:
    """What all-reduces have moved since the last reading, as the engine counts it.

    Attributes:
        size_bytes: Bytes of this rank.
        seconds: How long they took, from when all ranks were ready.
    """

    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class GpuExchangeRecord(ExchangeRecord):
    """The same of all-reduces on a GPU, which begin when this rank's data is ready."""


@dataclass(frozen=True)
class EvaluationRecord:
    """The metrics of one evaluation, over all samples of all ranks."""

    metrics: Mapping[str, float]


@dataclass(frozen=True)
class EvaluatingRecord:
    """An evaluation begins, or has ended."""

    is_under_way: bool


@dataclass(frozen=True)
class WorldRecord:
    """How many ranks the job asked for, and how many take part."""

    num_wanted: int
    num_present: int


@dataclass(frozen=True)
class EndRecord:
    """When this rank has ended, in seconds since 1970; 0: it has not."""

    unix_s: float


@dataclass(frozen=True)
class GraceRecord:
    """How long leaving would take, and how long it may."""

    needed_s: float
    granted_s: float


@dataclass(frozen=True)
class ReferenceRecord:
    """What throughput is compared with; None: it is not known.

    Attributes:
        samples_per_s: Of a finished run of the same job on one rank.
        peak_flops: Floating-point operations a second that this rank's device can do at most.
    """

    samples_per_s: float | None = None
    peak_flops: float | None = None


@dataclass(frozen=True)
class MemoryRecord:
    """Memory of this process on its host.

    Attributes:
        resident_bytes: What is in memory.
        peak_bytes: The most that was.
    """

    resident_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class DeviceMemoryRecord:
    """Memory that this rank's framework has on its device.

    Attributes:
        allocated_bytes: What tensors take.
        reserved_bytes: What the framework keeps for them; None: it does not say.
        peak_bytes: The most that tensors took.
    """

    allocated_bytes: int
    reserved_bytes: int | None
    peak_bytes: int


@dataclass(frozen=True)
class GpuRecord:
    """What NVML says of this rank's GPU; None: that this GPU, or its driver, does not tell.

    Attributes:
        utilization: Part of the time in which a kernel ran, 0 to 1.
        memory_used_bytes: By all processes.
        memory_total_bytes: What it has.
        power_w: What it draws.
        temperature_c: Of the chip.
        clock_hz: Of its multiprocessors.
        throttled: By reason, 1 where its clock is held down for it.
        ecc_errors: New uncorrected and corrected errors since the last reading, by kind.
    """

    utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    clock_hz: float | None = None
    throttled: Mapping[str, int] | None = None
    ecc_errors: Mapping[str, int] | None = None
