"""Peak dense FLOP/s of GPUs, from NVIDIA's data sheets."""

from __future__ import annotations

from typing import Literal

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
