"""Dashboard of hosts and GPUs: memory of ranks, and metrics of their GPUs."""

from __future__ import annotations

from horovod_train.monitor.grafana.panels import JOB_VARIABLES, Page, Panel, of_selected, panel

_RANK = "rank {{rank}}"


def _of_ranks(title: str, description: str, metric: str, unit: str = "short", more: str = "") -> Panel:
    return panel("graph", title, description, (of_selected(metric), f"{_RANK}{more}"), unit=unit)


_DEVICE, _GPU = "horovod_train_device_memory", "horovod_train_gpu_memory"
_RESIDENT = "horovod_train_resident_memory"
_PEAK = of_selected(f"{_RESIDENT}_peak_bytes")
MEMORY = (
    _of_ranks("Memory of a rank", "A line that climbs is a leak.", f"{_RESIDENT}_bytes", "bytes"),
    _of_ranks("The most it has had", "What a rank needs.", f"{_RESIDENT}_peak_bytes", "bytes"),
    panel(
        "graph",
        "Imbalance of memory",
        "What the rank with most has had, by what ranks have had on average: above 1.2, ranks that share a "
        "model have unequal parts.",
        (
            f"max by (training_job, run) ({_PEAK}) / avg by (training_job, run) ({_PEAK})",
            "{{training_job}}",
        ),
    ),
    panel(
        "graph",
        "Memory of ranks, by host",
        "Resident memory of all ranks of a host.",
        (f"sum by (host) ({of_selected(f'{_RESIDENT}_bytes')})", "{{host}}"),
        unit="bytes",
    ),
    panel(
        "graph",
        "Device memory of tensors",
        "Allocated, reserved by the framework, and peak allocated.",
        (of_selected(f"{_DEVICE}_allocated_bytes"), f"{_RANK} allocated"),
        (of_selected(f"{_DEVICE}_reserved_bytes"), f"{_RANK} reserved"),
        (of_selected(f"{_DEVICE}_peak_bytes"), f"{_RANK} peak"),
        unit="bytes",
        span=12,
    ),
    panel(
        "graph",
        "Memory of GPUs",
        "By all processes, and what the GPU has.",
        (of_selected(f"{_GPU}_used_bytes"), f"{_RANK} used"),
        (of_selected(f"{_GPU}_total_bytes"), f"{_RANK} total"),
        unit="bytes",
        span=12,
    ),
)

GPUS = (
    _of_ranks(
        "Utilization",
        "Part of the time in which a kernel ran.",
        "horovod_train_gpu_utilization_ratio",
        "percentunit",
    ),
    _of_ranks("Power", "Do all GPUs work alike?", "horovod_train_gpu_power_watts", "watt"),
    _of_ranks("Temperature", "Is a GPU too hot?", "horovod_train_gpu_temperature_celsius", "celsius"),
    _of_ranks(
        "Clock",
        "A GPU that is slower than the others makes a slow rank.",
        "horovod_train_gpu_clock_hertz",
        "hertz",
    ),
    _of_ranks(
        "Clock throttled", "1 if throttled, by reason.", "horovod_train_gpu_throttled", more=" {{reason}}"
    ),
    _of_ranks(
        "Memory errors",
        "Since the rank began. Uncorrected ones end jobs.",
        "horovod_train_gpu_ecc_errors_total",
        more=" {{kind}}",
    ),
)

PAGE = Page(
    "horovod-train-hosts",
    "horovod_train: Hosts and GPUs",
    "Memory of ranks, and what their GPUs do.",
    JOB_VARIABLES,
    (("Memory", MEMORY), ("GPUs", GPUS)),
)
