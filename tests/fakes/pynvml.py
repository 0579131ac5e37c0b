"""A stand-in for NVIDIA's library, for machines without a GPU: it computes what a GPU would show.

One GPU whose load follows a schedule; its temperature follows its power, and above a limit its clock is held
down, as a real one's is. What it does not tell raises, as the real library does.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

UUID = "GPU-00112233-4455-6677-8899-aabbccddeeff"
NAME = "NVIDIA H100 80GB HBM3"

NVML_TEMPERATURE_GPU = 0
NVML_CLOCK_SM = 1
NVML_VOLATILE_ECC = 0
NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
nvmlClocksThrottleReasonSwPowerCap = 0x4  # noqa: N816
nvmlClocksThrottleReasonHwSlowdown = 0x8  # noqa: N816
nvmlClocksThrottleReasonSyncBoost = 0x10  # noqa: N816
nvmlClocksThrottleReasonSwThermalSlowdown = 0x20  # noqa: N816
nvmlClocksThrottleReasonHwThermalSlowdown = 0x40  # noqa: N816
nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80  # noqa: N816

IDLE_W, FULL_W, AMBIENT_C, C_PER_W, HOT_C = 70.0, 700.0, 30.0, 0.08, 83.0
TOTAL_BYTES = 80 * 2**30


class NVMLError(Exception):
    """What the library raises."""


class Gpu:
    """One GPU, in some state."""

    def __init__(self, load: float = 1.0, errors: tuple[int, int] = (0, 0), *, has_ecc: bool = True) -> None:
        self.load, self.errors, self.has_ecc = load, list(errors), has_ecc

    @property
    def power_w(self) -> float:
        return IDLE_W + self.load * (FULL_W - IDLE_W)

    @property
    def temperature_c(self) -> float:
        return AMBIENT_C + C_PER_W * self.power_w

    @property
    def is_hot(self) -> bool:
        return self.temperature_c >= HOT_C


GPUS = {UUID: Gpu(float(os.environ.get("FAKE_GPU_LOAD", "0.5")))}


def nvmlInit():  # noqa: N802
    if os.environ.get("FAKE_GPU_DRIVER") == "none":
        raise NVMLError("Driver Not Loaded")


def nvmlDeviceGetHandleByUUID(uuid):  # noqa: N802
    if uuid not in GPUS:
        raise NVMLError("Not Found")
    return GPUS[uuid]


def nvmlDeviceGetName(gpu):  # noqa: N802
    return NAME


def nvmlDeviceGetUtilizationRates(gpu):  # noqa: N802
    return SimpleNamespace(gpu=round(100 * gpu.load), memory=10)


def nvmlDeviceGetMemoryInfo(gpu):  # noqa: N802
    return SimpleNamespace(used=int(gpu.load * TOTAL_BYTES), total=TOTAL_BYTES)


def nvmlDeviceGetPowerUsage(gpu):  # noqa: N802
    return round(1000 * gpu.power_w)


def nvmlDeviceGetTemperature(gpu, sensor):  # noqa: N802
    return round(gpu.temperature_c)


def nvmlDeviceGetClockInfo(gpu, clock):  # noqa: N802
    return 1200 if gpu.is_hot else 1980


def nvmlDeviceGetCurrentClocksThrottleReasons(gpu):  # noqa: N802
    return nvmlClocksThrottleReasonSwThermalSlowdown if gpu.is_hot else 0


def nvmlDeviceGetTotalEccErrors(gpu, kind, counter):  # noqa: N802
    if not gpu.has_ecc:
        raise NVMLError("Not Supported")
    return gpu.errors[kind]
