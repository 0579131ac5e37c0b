"""Records of training and samplers, from which the metrics of the catalog are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)  # a frozen one takes four times as long to create, in each step
class StepRecord:
    """One optimizer step of this rank. In scripts, values that may be None may be unknown.

    Attributes:
        seconds: Wall time of the step; on a GPU, device time.
        phase_seconds: Time by phase, as far as phases are measured separately.
        num_samples: Samples that this rank read.
        epochs: Epochs passed, with the fraction of the current one.
        loss: Mean loss over the samples of all ranks.
        local_loss: Contribution of this rank to the loss.
        lr: Learning rate.
        is_finite: Whether loss and gradient were finite. If not, the step was skipped. None: not checked.
        own_seconds: Step time minus all-reduce wait; None: not measured separately.
        step: Number of the step, counted over all restarts.
        numbers: Further numbers of the step by name, as in ``StepOutcome``; None: not computed.
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
class GroupNoiseRecord:
    """Gradient noise scale of each parameter group in samples, by number of the group."""

    noise_scales: Mapping[str, float]


@dataclass(frozen=True)
class WaitRecord:
    """Waits of this rank in some steps, computed after all ranks have exchanged their wait times.

    Attributes:
        waiting_s: Time that this rank waited for other ranks.
        communication_s: Wait of the rank that arrived last, which is the time of the communication.
        waited_for_s: Time that other ranks waited for this rank, summed over them.
    """

    waiting_s: float
    communication_s: float
    waited_for_s: float


@dataclass(frozen=True)
class CurrentWaitRecord:
    """Time for which this rank has been waiting in its current collective; 0: it does not wait."""

    seconds: float


@dataclass(frozen=True)
class ExchangeRecord:
    """Bytes and duration of all-reduces since the last reading, from the time when all ranks are ready."""

    size_bytes: int
    seconds: float


@dataclass(frozen=True)
class GpuExchangeRecord(ExchangeRecord):
    """The same for all-reduces on a GPU. The duration begins when the data of this rank is ready."""


@dataclass(frozen=True)
class EvaluationRecord:
    """Metrics of one evaluation, over all samples of all ranks."""

    metrics: Mapping[str, float]


@dataclass(frozen=True)
class EvaluatingRecord:
    """Start or end of an evaluation."""

    is_under_way: bool


@dataclass(frozen=True)
class WorldRecord:
    """Number of ranks that the job requested, and number of running ranks."""

    num_wanted: int
    num_present: int


@dataclass(frozen=True)
class EndRecord:
    """End time of this rank, in Unix seconds; 0: the rank is running."""

    unix_s: float


@dataclass(frozen=True)
class GraceRecord:
    """Estimated time of a preemption, and its grace period ``launch.grace_s``."""

    needed_s: float
    granted_s: float


@dataclass(frozen=True)
class TrackerRecord:
    """Calls of trackers that were dropped or failed."""

    num_lost: int


@dataclass(frozen=True)
class ReferenceRecord:
    """Throughput of a run of the same job on one rank, and peak FLOP/s of the device; None: unknown."""

    samples_per_s: float | None = None
    peak_flops: float | None = None


@dataclass(frozen=True)
class MemoryRecord:
    """Resident memory of this process on its host: current and peak."""

    resident_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class DeviceMemoryRecord:
    """Device memory of the framework: allocated by tensors, reserved (None: unknown), peak of allocated."""

    allocated_bytes: int
    reserved_bytes: int | None
    peak_bytes: int


@dataclass(frozen=True)
class GpuRecord:
    """State of this rank's GPU from NVML; None: not supported by the GPU or its driver.

    Attributes:
        utilization: Fraction of time in which a kernel ran, 0 to 1.
        memory_used_bytes: Memory used by all processes.
        memory_total_bytes: Memory of the GPU.
        power_w: Power draw.
        temperature_c: Temperature of the chip.
        clock_hz: Clock of the multiprocessors.
        throttled: 1 for each reason for which the clock is throttled, else 0.
        ecc_errors: New memory errors since the last reading, by kind: corrected, uncorrected.
    """

    utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    clock_hz: float | None = None
    throttled: Mapping[str, int] | None = None
    ecc_errors: Mapping[str, int] | None = None
