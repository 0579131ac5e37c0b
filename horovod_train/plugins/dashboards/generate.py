"""Generate Grafana's dashboards and Prometheus's rules in ``shipped``.

Usage: ``python -m horovod_train.plugins.dashboards.generate``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as models
from grafana_foundation_sdk.models import dashboard as dashboard_models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models import prometheus as prometheus_models

from horovod_train.events.types import PHASES
from horovod_train.plugins.dashboards.rules import as_yaml, document
from horovod_train.telemetry.catalog import SHOWN_NUMBERS

DATASOURCE = dashboard_models.DataSourceRef(type_val="prometheus", uid="${datasource}")
HEIGHT = 8
AnyPanel = timeseries.Panel | heatmap.Panel | bargauge.Panel | stat.Panel | table.Panel
SELECTED = 'training_job=~"$job", run=~"$run"'
"""Label matchers of the jobs and runs that are selected in a dashboard."""


@dataclass(frozen=True)
class Query:
    """PromQL query of a panel, and the legend of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """Panel of a dashboard.

    Attributes:
        kind: Visualization.
        title: Title, a few words.
        description: Question that the panel answers, and how to read it.
        queries: Queries whose series are displayed.
        unit: Grafana's name of the unit.
        span: Width; the width of a dashboard is 24.
    """

    kind: Literal["graph", "heat map", "bars", "number", "table"]
    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    span: int = 12


def panel(
    kind: Literal["graph", "heat map", "bars", "number", "table"],
    title: str,
    description: str,
    *queries: tuple[str, str],
    unit: str = "short",
    span: int = 8,
) -> Panel:
    """Return a panel. Each query is a PromQL expression and the legend of its series."""
    return Panel(kind, title, description, tuple(Query(*each) for each in queries), unit, span)


def of_selected(metric: str, matchers: str = "") -> str:
    """Return the query of a metric for the selected jobs and runs."""
    return f"{metric}{{{', '.join(filter(None, (SELECTED, matchers)))}}}"


def same_on_all(metric: str, by: str = "training_job, run") -> str:
    """Return the query of a value that is equal on all ranks of a job, or that only one rank exports."""
    return f"max by ({by}) ({of_selected(metric)})"


@dataclass(frozen=True)
class Variable:
    """Template variable of a dashboard: its name in queries, its label, and the query of its values."""

    name: str
    label: str
    query: str


@dataclass(frozen=True)
class Page:
    """Dashboard. ``uid`` is used in URLs and as file name; each row has a heading and panels."""

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]

    @property
    def panels(self) -> list[Panel]:
        """Panels of all rows."""
        return [panel for _, panels in self.rows for panel in panels]


JOB_VARIABLES = (
    Variable("job", "Job", "label_values(horovod_train_steps_total, training_job)"),
    Variable("run", "Run", 'label_values(horovod_train_steps_total{training_job=~"$job"}, run)'),
)

ANNOTATIONS = (
    ("started again", f"changes(horovod_train_job_restarts_total{{{SELECTED}}}[1m]) > 0", "blue"),
    ("preempted", f"changes(horovod_train_job_preemptions_total{{{SELECTED}}}[1m]) > 0", "orange"),
    (
        "checkpoint",
        f"changes(horovod_train_checkpoint_write_seconds_count{{{SELECTED}}}[1m]) > 0",
        "green",
    ),
    ("step not used", f"increase(horovod_train_non_finite_steps_total{{{SELECTED}}}[1m]) > 0", "red"),
)
"""Events marked on the time axis: name, query, color."""


def rendered(page: Page) -> str:
    """Return a dashboard as JSON in Grafana's import format."""
    built = (
        dashboard.Dashboard(page.title)
        .uid(page.uid)
        .description(page.description)
        .tags(["horovod_train"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(dashboard_models.DashboardCursorSync.CROSSHAIR)
        .readonly()
        .link(
            dashboard.DashboardLink("horovod_train")
            .type(dashboard_models.DashboardLinkType.DASHBOARDS)
            .tags(["horovod_train"])
            .as_dropdown(True)
            .keep_time(True)
            .include_vars(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    )
    for variable in page.variables:
        built.with_variable(_variable(variable))
    if page.variables:
        for name, expr, colour in ANNOTATIONS:
            built.annotation(
                dashboard.AnnotationQuery()
                .name(name)
                .datasource(DATASOURCE)
                .expr(expr)
                .icon_color(colour)
                .enable(True)
            )
    number = count(1)
    for heading, panels in page.rows:
        built.with_row(dashboard.Row(heading).id(next(number)))
        for panel in panels:
            made = _panel(panel)
            made.id(next(number))
            built.with_panel(made)
    return JSONEncoder(sort_keys=True, indent=2).encode(built.build()) + "\n"


def _variable(variable: Variable) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(variable.name)
        .label(variable.label)
        .query(variable.query)
        .datasource(DATASOURCE)
        .refresh(dashboard_models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard_models.VariableSort.NATURAL_ASC)
        .multi(True)
        .include_all(True)
        .current(dashboard_models.VariableOption(text="All", value="$__all", selected=True))
    )


def _panel(panel: Panel) -> AnyPanel:
    """Return the SDK's builder of a panel."""
    made: AnyPanel
    is_now = panel.kind in ("bars", "number", "table")
    format_ = {"table": "table", "heat map": "time_series"}.get(panel.kind)
    match panel.kind:
        case "graph":
            made = _graph()
        case "heat map":
            made = (
                heatmap.Panel()
                .calculate(False)
                .cell_gap(0)
                .color(
                    heatmap.HeatmapColorOptions()
                    .mode(heatmap_models.HeatmapColorMode.SCHEME)
                    .scheme("Oranges")
                )
                .y_axis(heatmap.YAxisConfig().unit("string"))
            )
        case "bars":
            made = bargauge.Panel().orientation(models.VizOrientation.HORIZONTAL).reduce_options(_last())
        case "number":
            made = stat.Panel().reduce_options(_last())
        case "table":
            made = table.Panel()
    made.title(panel.title).description(panel.description).datasource(DATASOURCE)
    made.unit(panel.unit).span(panel.span).height(HEIGHT)
    for number, query in enumerate(panel.queries):
        made.with_target(_target(query, chr(ord("A") + number), is_now=is_now, format_=format_))
    return made


def _graph() -> timeseries.Panel:
    return (
        timeseries.Panel()
        .line_width(1)
        .fill_opacity(0)
        .show_points(models.VisibilityMode.NEVER)
        .tooltip(
            common.VizTooltipOptions().mode(models.TooltipDisplayMode.MULTI).sort(models.SortOrder.DESCENDING)
        )
    )


def _last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"])


def _target(query: Query, ref_id: str, *, is_now: bool, format_: str | None) -> prometheus.Dataquery:
    made = prometheus.Dataquery().expr(query.expr).ref_id(ref_id).legend_format(query.legend or "__auto")
    if is_now:
        made.instant()
    else:
        made.range()
    if format_ is not None:
        made.format(prometheus_models.PromQueryFormat(format_))
    return made


_JOB_OF_FLEET = "{{training_job}}"
_MISSING = "(horovod_train_job_desired_ranks - horovod_train_job_present_ranks)"
_RUNNING = 'horovod_train_job_state{state=~"starting|running"}'

JOBS = (
    panel(
        "number",
        "Jobs by state",
        "The newest run of each job.",
        ("count by (state) (horovod_train_job_state)", "{{state}}"),
        span=24,
    ),
    panel(
        "table",
        "States",
        "The newest run of each job.",
        ("max by (training_job, run, state) (horovod_train_job_state)", ""),
        span=8,
    ),
    panel(
        "bars",
        "Running for",
        "How long jobs that go on have been running.",
        (
            f"(time() - horovod_train_job_start_time_seconds) and on (training_job, run) {_RUNNING}",
            _JOB_OF_FLEET,
        ),
        unit="s",
        span=8,
    ),
    panel(
        "table",
        "Failures",
        "Why jobs have failed, in the last week.",
        ("max by (training_job, run, cause) (horovod_train_job_failed)", ""),
        span=8,
    ),
)

RANKS = (
    panel("graph", "Ranks that train", "Of all jobs.", ("horovod_train_job_present_ranks", _JOB_OF_FLEET)),
    panel(
        "graph",
        "Ranks that are missing",
        "Requested by the job but missing, while it runs.",
        (
            f"{_MISSING} and on (training_job, run) {_RUNNING}",
            _JOB_OF_FLEET,
        ),
    ),
    panel(
        "graph",
        "Idle ranks",
        "Time lost to slower ranks and to the network, of all jobs.",
        (
            "sum by (training_job) (horovod_train:waiting:ratio + horovod_train:communication:ratio)",
            _JOB_OF_FLEET,
        ),
    ),
)

TROUBLE = (
    panel(
        "graph",
        "Started again",
        "Restarts of ranks of a run.",
        ("horovod_train_job_restarts_total", _JOB_OF_FLEET),
        span=6,
    ),
    panel(
        "graph",
        "Preemptions",
        "Ranks that were preempted, and saved.",
        ("horovod_train_job_preemptions_total", _JOB_OF_FLEET),
        span=6,
    ),
    panel(
        "graph",
        "Hosts lost",
        "Counted each time.",
        ("horovod_train_job_lost_hosts_total", _JOB_OF_FLEET),
        span=6,
    ),
    panel(
        "graph",
        "Events a minute",
        "By kind, of all jobs.",
        ("sum by (kind) (rate(horovod_train_job_events_total[5m])) * 60", "{{kind}}"),
        span=6,
    ),
)

FLEET_PAGE = Page(
    "horovod-train-fleet",
    "horovod_train: Fleet",
    "All jobs: how they stand, ranks desired and present, failures. It needs `horovod-train targets serve`.",
    (),
    (("Jobs", JOBS), ("Ranks", RANKS), ("Trouble", TROUBLE)),
)


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

HOSTS_PAGE = Page(
    "horovod-train-hosts",
    "horovod_train: Hosts and GPUs",
    "Memory of ranks, and what their GPUs do.",
    JOB_VARIABLES,
    (("Memory", MEMORY), ("GPUs", GPUS)),
)


_JOB = "{{training_job}} {{run}}"
_BY = "by (training_job, run)"

STANDS = (
    panel("number", "Epoch", "How far is training?", (same_on_all("horovod_train_epoch"), _JOB), span=4),
    panel("number", "Loss", "Mean over all ranks.", (same_on_all("horovod_train_loss"), _JOB), span=4),
    panel(
        "number",
        "Samples a second",
        "Of all ranks together.",
        (of_selected("horovod_train:samples:job_rate"), _JOB),
        span=4,
    ),
    panel(
        "number",
        "Ranks",
        "Ranks that take part, and ranks that the job asked for.",
        (same_on_all("horovod_train_world_size_present"), "present"),
        (same_on_all("horovod_train_world_size_desired"), "desired"),
        span=4,
    ),
    panel(
        "number",
        "Scaling efficiency",
        "Samples a second in units of as many ranks that each do what one alone has done. Empty while "
        "run_dir has no finished run of the same job on one rank.",
        (of_selected("horovod_train:scaling_efficiency:ratio"), _JOB),
        unit="percentunit",
        span=4,
    ),
    panel(
        "number",
        "Last checkpoint",
        "So much work would be lost if a host failed now.",
        (same_on_all("horovod_train_checkpoint_age_seconds"), _JOB),
        unit="s",
        span=4,
    ),
)

LEARNING = (
    panel(
        "graph",
        "Loss over time",
        "Does it learn? Mean over all ranks.",
        (same_on_all("horovod_train_loss"), _JOB),
        span=12,
    ),
    panel(
        "graph",
        "Evaluation",
        "How good is the model? Over all samples of all ranks.",
        (same_on_all("horovod_train_evaluation", "training_job, run, metric"), "{{metric}}"),
        span=12,
    ),
    panel(
        "graph",
        "Learning rate",
        "Is it what the schedule and the global batch say?",
        (same_on_all("horovod_train_learning_rate"), _JOB),
    ),
    panel(
        "graph",
        "Gradient norm",
        "Do gradients explode or vanish? Before clipping.",
        (same_on_all("horovod_train_gradient_norm"), _JOB),
    ),
    panel(
        "graph",
        "Steps not used",
        "Steps lost to NaN and infinity.",
        (same_on_all("horovod_train_non_finite_steps_total"), _JOB),
    ),
)

SPEED = (
    panel(
        "graph",
        "Samples a second over time",
        "Of all ranks together.",
        (of_selected("horovod_train:samples:job_rate"), _JOB),
        span=12,
    ),
    panel(
        "graph",
        "Where the time of a step goes",
        "Mean over ranks. In allreduce_wait ranks wait for each other and for the network; the panel below "
        "tells these apart.",
        (
            f"avg by (training_job, run, phase) ({of_selected('horovod_train:phase_seconds:per_step')})",
            "{{phase}}",
        ),
        unit="s",
        span=12,
    ),
    panel(
        "graph",
        "Idle ranks",
        "Number of ranks whose time is lost to slower ranks, and to communication.",
        (f"sum {_BY} ({of_selected('horovod_train:waiting:ratio')})", "slower ranks"),
        (f"sum {_BY} ({of_selected('horovod_train:communication:ratio')})", "network"),
    ),
    panel(
        "graph",
        "Gradient bytes a second",
        "What a rank gives to all-reduce.",
        (f"avg {_BY} (rate({of_selected('horovod_train_allreduce_bytes_total')}[2m]))", _JOB),
        unit="Bps",
    ),
    panel(
        "graph",
        "Model FLOP utilization",
        "Part of the devices' peak that forward and backward use. Empty where the peak is not known.",
        (f"avg {_BY} ({of_selected('horovod_train:model_flops:utilization_ratio')})", _JOB),
        unit="percentunit",
    ),
    *(
        panel("graph", metric.shown, metric.question, (same_on_all(metric.name), _JOB))
        for metric in SHOWN_NUMBERS.values()
    ),
    panel(
        "graph",
        "Gradient noise scale by parameter group",
        "Critical batch size of each parameter group, in samples. Empty unless the job measures it.",
        (
            same_on_all("horovod_train_group_noise_scale_samples", "training_job, run, group"),
            f"{_JOB} group {{{{group}}}}",
        ),
    ),
)

_WRITE = "horovod_train_checkpoint_write_seconds"
SAFETY = (
    panel(
        "graph",
        "Age of the last checkpoint",
        "So much work would be lost if a host failed then.",
        (same_on_all("horovod_train_checkpoint_age_seconds"), _JOB),
        unit="s",
        span=6,
    ),
    panel(
        "graph",
        "Time to write a checkpoint",
        "Is the file system fast enough?",
        (f"max {_BY} ({of_selected(f'{_WRITE}_sum')} / {of_selected(f'{_WRITE}_count')})", "mean"),
        unit="s",
        span=6,
    ),
    panel(
        "graph",
        "Size of a checkpoint",
        "How much room do checkpoints take?",
        (same_on_all("horovod_train_checkpoint_size_bytes"), _JOB),
        unit="bytes",
        span=6,
    ),
    panel(
        "graph",
        "Grace",
        "Time that ranks need to save and leave, and time that they get (launch.grace_s).",
        (same_on_all("horovod_train_grace_needed_seconds"), "needed"),
        (same_on_all("horovod_train_grace_granted_seconds"), "granted"),
        unit="s",
        span=6,
    ),
    panel(
        "graph",
        "Lost calls of trackers",
        "Calls of experiment trackers that were dropped or failed, since the ranks started.",
        (same_on_all("horovod_train_tracker_lost_calls_total"), _JOB),
        span=6,
    ),
)

JOB_PAGE = Page(
    "horovod-train-job",
    "horovod_train: Job",
    "Whether a job learns, how fast, and whether its work is safe.",
    JOB_VARIABLES,
    (("How it stands", STANDS), ("Learning", LEARNING), ("Speed", SPEED), ("Is the work safe?", SAFETY)),
)


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

RANKS_PAGE = Page(
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


PAGES = (JOB_PAGE, RANKS_PAGE, HOSTS_PAGE, FLEET_PAGE)
FOLDER = Path(__file__).parent / "shipped"


def generated() -> dict[str, str]:
    """Return the contents of the files by name."""
    dashboards = {f"{page.uid}.json": rendered(page) for page in PAGES}
    return {**dashboards, "horovod-train-rules.yaml": as_yaml(document())}


if __name__ == "__main__":
    for name, text in generated().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
