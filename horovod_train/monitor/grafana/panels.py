"""Dashboards and panels as dataclasses, and their conversion to JSON with Grafana's SDK."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
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
