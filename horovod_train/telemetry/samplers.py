"""Samplers of the memory of this process and of a rank's GPU.

    read_memory                memory of this process
    gpu_sampler, GpuSampler    a rank's GPU, through NVML
    peak_flops                 peak dense FLOP/s of GPUs

Peak FLOP/s are from NVIDIA's data sheets.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from types import ModuleType
from typing import Literal, TypeVar
from uuid import UUID

import psutil

from horovod_train.errors import UserError
from horovod_train.system.machine import import_optional
from horovod_train.telemetry.catalog import GpuRecord, MemoryRecord


def read_memory() -> MemoryRecord:
    """Return the current and peak resident memory of this process."""
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return MemoryRecord(psutil.Process().memory_info().rss, peak_kib * 1024)


log = logging.getLogger(__name__)
Value = TypeVar("Value")

MIN_INTERVAL_S = 1.0
"""Minimum time between two readings, because some drivers need milliseconds for a reading."""

THROTTLE_REASONS = {
    "power_cap": "nvmlClocksThrottleReasonSwPowerCap",
    "hardware_slowdown": "nvmlClocksThrottleReasonHwSlowdown",
    "power_brake": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
    "thermal_hardware": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "thermal_software": "nvmlClocksThrottleReasonSwThermalSlowdown",
    "sync_boost": "nvmlClocksThrottleReasonSyncBoost",
}
"""Label -> name of NVML's bit. Low clocks of idle GPUs and clocks set by a user are not throttling."""


class GpuSampler:
    """Sampler of one GPU.

    GPUs are identified by UUID, because CUDA and NVML number them differently. Values that a GPU or its
    driver does not support are omitted: for example, consumer GPUs have no ECC, and virtual GPUs report no
    power.

    Args:
        library: The module ``pynvml``, from nvidia-ml-py.
        uuid: UUID of the GPU, 32 hexadecimal digits.

    Raises:
        NVMLError: No driver, or no GPU with this UUID.
    """

    def __init__(self, library: ModuleType, uuid: str) -> None:
        self._nvml = library
        library.nvmlInit()
        self._handle = library.nvmlDeviceGetHandleByUUID(f"GPU-{UUID(uuid)}")
        self.name = _text(library.nvmlDeviceGetName(self._handle))
        self._ecc_before = self._ecc_counters()
        self._read_s = float("-inf")

    def __call__(self) -> GpuRecord | None:
        """Return a reading; None: the last one is younger than ``MIN_INTERVAL_S``."""
        now_s = monotonic()
        if now_s - self._read_s < MIN_INTERVAL_S:
            return None
        self._read_s = now_s
        nvml, gpu = self._nvml, self._handle
        memory = self._read_or_none(lambda: nvml.nvmlDeviceGetMemoryInfo(gpu))
        return GpuRecord(
            utilization=self._read_or_none(lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100),
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            power_w=self._read_or_none(lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
            temperature_c=self._read_or_none(
                lambda: float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU))
            ),
            clock_hz=self._read_or_none(lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM) * 1e6),
            throttled=self._read_or_none(self._throttled),
            ecc_errors=self._new_ecc_errors(),
        )

    def _read_or_none(self, read: Callable[[], Value]) -> Value | None:
        """Return a value; None: the GPU does not support it."""
        with suppress(self._nvml.NVMLError):
            return read()
        return None

    def _throttled(self) -> dict[str, int]:
        reasons = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        return {
            label: int(bool(reasons & getattr(self._nvml, bit))) for label, bit in THROTTLE_REASONS.items()
        }

    def _ecc_counters(self) -> dict[str, int]:
        nvml = self._nvml
        kinds = {
            "corrected": nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
            "uncorrected": nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        }
        found = {
            kind: self._read_or_none(
                lambda number=number: int(  # type: ignore[misc]
                    nvml.nvmlDeviceGetTotalEccErrors(self._handle, number, nvml.NVML_VOLATILE_ECC)
                )
            )
            for kind, number in kinds.items()
        }
        return {kind: count for kind, count in found.items() if count is not None}

    def _new_ecc_errors(self) -> dict[str, int]:
        counters = self._ecc_counters()
        before, self._ecc_before = self._ecc_before, counters
        return {kind: max(0, count - before.get(kind, count)) for kind, count in counters.items()}


def gpu_sampler(uuid: str) -> GpuSampler | None:
    """Return a sampler of a GPU; None: the UUID is empty, or no library, no driver, or no such GPU."""
    if not uuid:
        return None
    try:
        pynvml = import_optional("pynvml", needed_by="metrics of the GPU", hint="pip install nvidia-ml-py")
    except UserError as error:
        log.warning("%s (%s)", error, error.hint)
        return None
    try:
        return GpuSampler(pynvml, uuid)
    except pynvml.NVMLError as error:
        log.warning("no metrics of the GPU: %s", error)
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


_TERA = 1e12

# Words of the NVML name -> TFLOP/s in 16 bits on tensor cores, and in fp32 without tensor cores.
_PEAKS = {
    "B200": (2250, 75),
    "GH200": (989, 67),
    "H200": (989, 67),
    "H100 PCIe": (756, 51),
    "H100 NVL": (835, 60),
    "H100": (989, 67),
    "A100": (312, 19.5),
    "A40": (150, 37.4),
    "A30": (165, 10.3),
    "A10": (125, 31.2),
    "L40S": (362, 91.6),
    "L40": (181, 90.5),
    "L4": (121, 30.3),
    "V100": (125, 15.7),
    "T4": (65, 8.1),
}


def peak_flops(gpu: str, precision: Literal["fp32", "bf16", "fp16"]) -> float | None:
    """Return the peak FLOP/s of a GPU for a precision of the forward pass; None: its NVML name is unknown.

    >>> peak_flops("NVIDIA H100 80GB HBM3", "bf16")
    989000000000000.0
    >>> peak_flops("NVIDIA A100-SXM4-40GB", "fp32"), peak_flops("NVIDIA RTX A4000", "bf16")
    (19500000000000.0, None)
    """
    words = gpu.replace("-", " ").split()
    for part, (half, single) in _PEAKS.items():
        if set(part.split()) <= set(words):  # whole words: an RTX A4000 is not an A40
            return _TERA * (single if precision == "fp32" else half)
    return None
