"""Dashboard of ranks: own time and phases of each rank, waiting between ranks, and network."""

from __future__ import annotations

from horovod_train.events.types import PHASES
from horovod_train.monitor.grafana.panels import JOB_VARIABLES, Page, of_selected, panel, same_on_all

_RANK = "rank {{rank}}"
_RANK_AND_HOST = "rank {{rank}} on {{host}}"

WHO = (
    panel(
        "heat map",
        "Own time of a step, by rank",
        "Steps take equally long on all ranks, since ranks wait for each other; own time leaves the waiting "
        "out. A dark row is a slow rank, a dark column a slow moment of all.",
        (of_selected("horovod_train:own_seconds:per_step"), "{{training_job}} {{run}} {{rank}}"),
        unit="s",
        span=24,
    ),
    panel(
        "bars",
        "Slowest ranks",
        "Own time in units of the median; the alert fires above 1.2.",
        (f"topk(10, {of_selected('horovod_train:own_seconds:ratio_to_median')})", _RANK_AND_HOST),
        span=12,
    ),
    panel(
        "bars",
        "Whom the others wait for",
        "How many ranks stand idle because of this one, on average.",
        (f"topk(10, {of_selected('horovod_train:waited_for:idle_ranks')})", _RANK_AND_HOST),
        span=12,
    ),
)

IN_WHAT = tuple(
    panel(
        "graph",
        f"{phase}, by rank",
        f"Time of the phase {phase} for each step. What a framework does not tell apart is in compute.",
        (of_selected("horovod_train:phase_seconds:per_step", f'phase="{phase}"'), _RANK),
        unit="s",
    )
    for phase in PHASES
)

FOR_WHOM = (
    panel(
        "graph",
        "Waiting for slower ranks",
        "Part of the time in which a rank waits for ranks that come later.",
        (of_selected("horovod_train:waiting:ratio"), _RANK),
        unit="percentunit",
    ),
    panel(
        "graph",
        "Waited for by others",
        "How many ranks stand idle because of this one.",
        (of_selected("horovod_train:waited_for:idle_ranks"), _RANK),
    ),
    panel(
        "graph",
        "The exchange itself",
        "Part of the time that even the rank that comes last waits: the network.",
        (same_on_all("horovod_train:communication:ratio"), "{{training_job}} {{run}}"),
        unit="percentunit",
    ),
)

NETWORK = (
    panel(
        "graph",
        "Bus bandwidth of all-reduce",
        "How fast ranks exchange data, from when all are ready: what the network or the memory gives. "
        "Not on GPUs.",
        (of_selected("horovod_train:allreduce_bus:bytes_per_second"), _RANK),
        unit="Bps",
        span=12,
    ),
    panel(
        "graph",
        "Time in all-reduce",
        "Part of the time in which data is exchanged, hidden behind computation or not. Not on GPUs.",
        (f"rate({of_selected('horovod_train_exchange_seconds_total')}[2m])", _RANK),
        unit="percentunit",
        span=12,
    ),
    panel(
        "graph",
        "Time in all-reduce on GPUs",
        "From when a rank's own data is ready, waiting for others included; less its allreduce_wait, it was "
        "hidden behind computation.",
        (f"rate({of_selected('horovod_train_gpu_exchange_seconds_total')}[2m])", _RANK),
        unit="percentunit",
        span=12,
    ),
    panel(
        "graph",
        "Bytes a second on GPUs",
        "What all-reduces have summed in a second of training; links may be faster.",
        (f"rate({of_selected('horovod_train_gpu_exchanged_bytes_total')}[2m])", _RANK),
        unit="Bps",
        span=12,
    ),
)

_STEP = of_selected("horovod_train_step_seconds_bucket")
WHAT = (
    panel(
        "graph",
        "Samples a second, by rank",
        "Equal on all ranks, unless batch sizes differ.",
        (of_selected("horovod_train:samples:rate"), _RANK),
    ),
    panel(
        "graph",
        "Part of the loss, by rank",
        "Does one rank read other data than the rest?",
        (of_selected("horovod_train_local_loss"), _RANK),
    ),
    panel(
        "graph",
        "Time of a step, by rank",
        "95th percentile.",
        (f"histogram_quantile(0.95, rate({_STEP}[2m]))", _RANK),
        unit="s",
    ),
)

PAGE = Page(
    "horovod-train-ranks",
    "horovod_train: Ranks",
    "Which rank is slow, in which phase, since when, and who waits for whom.",
    JOB_VARIABLES,
    (
        ("Who is slow?", WHO),
        ("In which phase?", IN_WHAT),
        ("Who waits, and for whom?", FOR_WHOM),
        ("How fast is the exchange?", NETWORK),
        ("What does each do?", WHAT),
    ),
)
