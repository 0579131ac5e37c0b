"""Reports of runs: contents, and output as HTML and Markdown.

    RunRecord, read_run            what a report uses of a run
    Text, Table, Chart, Section    parts of a report, independent of the output format
    report_of                      contents of a report, read from run folders
    as_html                        one HTML file
    as_markdown                    Markdown (GitHub's dialect)

The same files give the same contents. The HTML file contains its scripts, styles and data, and loads
nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Literal, TypeVar

import numpy as np

from horovod_train.config.problems import flat
from horovod_train.config.schema import Job
from horovod_train.errors import UserError, describe_ranks
from horovod_train.events.file import EVENTS_FILE, Record, Series, places_to_keep, series_of
from horovod_train.events.types import (
    PHASES,
    Attempt,
    CheckpointWritten,
    ComparedWithOneProcess,
    Event,
    Failure,
    HostsLost,
    Opened,
    Progress,
    Stalled,
    StateChanged,
)
from horovod_train.events.wire import as_text, duration, learning_rate, stalled_text
from horovod_train.launch.base import JobStatus
from horovod_train.monitor.history import MAX_READ_BYTES, History, parsed
from horovod_train.monitor.live import MIN_WINDOW_S, Window, joined, stragglers
from horovod_train.monitor.runs import Run, folders_of_runs, places_of
from horovod_train.system.files import open_regular

MAX_RUNS = 50

Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True)
class RunRecord:
    """Run of a report.

    Attributes:
        name: Job and run.
        history: Events, without limits of time.
        series: Values by step.
        losses: Time and loss of the reported steps, oldest first.
        checkpoints: Time and event of each written checkpoint, and of each that could not be written.
        attempts: Starts of the ranks, oldest first.
        package_version: Version of this package; empty: unknown.
        end_unix_s: Time of the last event; None: the run has no events.
        job: Fields of the job by dotted path; empty for scripts and own loops.
    """

    name: str
    status: JobStatus
    history: History
    series: Series
    losses: list[tuple[float, float | None]]
    checkpoints: list[tuple[float, CheckpointWritten]]
    attempts: list[Attempt]
    package_version: str
    end_unix_s: float | None
    job: dict[str, str]

    @property
    def num_ranks(self) -> int | None:
        """Number of ranks of the last start of training; None: unknown."""
        started = self.history.started
        return started.world_size if started else self.history.ranks.num_ranks or None

    @property
    def samples_per_s(self) -> float | None:
        """Median throughput of all ranks over the reported steps; None: unknown."""
        values = [value for _, value in self.series.get("samples_per_s", [])]
        return median(values) if values else None

    @property
    def samples_per_s_per_rank(self) -> float | None:
        """Median throughput per rank; None: unknown."""
        return self.samples_per_s / self.num_ranks if self.samples_per_s and self.num_ranks else None

    @property
    def rank_times(self) -> Window | None:
        """Sums of the rank times of all windows with the last number of ranks; None: none was reported."""
        windows = self.history.ranks.windows
        return joined(windows) if windows else None

    def seconds_to_loss(self, loss: float) -> float | None:
        """Return the time from the start to the first step with this loss or less; None: no such step."""
        begun = self.history.begun_unix_s
        reached = (time for time, value in self.losses if value is not None and value <= loss)
        first = next(reached, None)
        return None if first is None or begun is None else first - begun

    @property
    def changed_fields(self) -> dict[str, str]:
        """Fields of the job that differ from the defaults."""
        return {name: value for name, value in self.job.items() if _defaults().get(name) != value}


def records_of(names: Sequence[str]) -> list[RunRecord]:
    """Read the runs that arguments specify: folders of runs, of jobs or of several jobs, or job IDs.

    Raises:
        UserError: An argument specifies no run, or there are more than ``MAX_RUNS`` runs.
    """
    folders: list[Path] = []
    for name, place in zip(names, places_of(names), strict=True):
        found = sorted(set(folders_of_runs(place)))
        if not found:
            raise UserError(f"{name} contains no run", hint="name a run folder, such as runs/JOB/RUN")
        folders += [folder for folder in found if folder not in folders]
    if len(folders) > MAX_RUNS:
        raise UserError(
            f"{len(folders)} runs found; a report contains at most {MAX_RUNS}", hint="name single runs"
        )
    return [read_run(folder) for folder in folders]


def read_run(folder: Path) -> RunRecord:
    """Read a run from its folder."""
    run = Run(folder, with_ranks=False)
    history = History()
    records = list(parsed(_lines(folder)))
    for record in records:
        history.add(record)
    return RunRecord(
        name=run.key,
        status=run.status(),
        history=history,
        series=series_of(record.event for record in records),
        losses=[(time, event.loss) for time, event in _events_of(Progress, records)],
        checkpoints=_events_of(CheckpointWritten, records),
        attempts=[attempt for _, attempt in _events_of(Attempt, records)],
        package_version=next((event.package_version for _, event in _events_of(Opened, records[::-1])), ""),
        end_unix_s=records[-1].time_unix_s if records else None,
        job=_fields_of_job(folder),
    )


def _events_of(kind: type[Kind], records: Sequence[Record]) -> list[tuple[float, Kind]]:
    return [(each.time_unix_s, each.event) for each in records if isinstance(each.event, kind)]


def _lines(folder: Path) -> list[str]:
    """Return the lines of the events file; none if it cannot be read."""
    try:
        with open_regular(folder / EVENTS_FILE) as file:
            return file.read(MAX_READ_BYTES).decode("utf-8", errors="replace").split("\n")
    except OSError:
        return []


def _fields_of_job(folder: Path) -> dict[str, str]:
    """Return the fields of ``job.json`` as text; none if it cannot be read."""
    try:
        with open_regular(folder / "job.json") as file:
            return _as_text(json.loads(file.read(MAX_READ_BYTES)))
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


def _as_text(tree: dict[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in flat(tree)}


@cache
def _defaults() -> dict[str, str]:
    return _as_text(Job(name="job", task="task").model_dump(mode="json"))


MAX_POINTS = 1000
"""Maximum points of a curve; of longer series, every n-th value is drawn."""

MAX_RANKS = 64
"""Maximum rows of the table of ranks: of more ranks, those with the longest own time."""

UNKNOWN = "-"


@dataclass(frozen=True)
class Text:
    """Paragraph, or preformatted text such as a traceback."""

    text: str
    is_preformatted: bool = False


@dataclass(frozen=True)
class Table:
    """Table of text cells."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Curve:
    """Values of one series; None: not finite. ``spread``: standard deviation of each value."""

    name: str
    x: tuple[float | str, ...]
    y: tuple[float | None, ...]
    spread: tuple[float | None, ...] | None = None


@dataclass(frozen=True)
class Chart:
    """Curves in one coordinate system, or stacked bars. ``is_log``: the horizontal axis is logarithmic."""

    title: str
    x_title: str
    y_title: str
    curves: tuple[Curve, ...]
    kind: Literal["lines", "bars"] = "lines"
    is_log: bool = False


Block = Text | Table | Chart


@dataclass(frozen=True)
class Section:
    """Part of a report with a heading."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Report:
    """Report of one or several runs."""

    title: str
    sections: tuple[Section, ...]


def report_of(runs: Sequence[RunRecord], target_loss: float | None = None) -> Report:
    """Return the report of runs: a comparison if there are several, and a section for each.

    Args:
        runs: The runs, in the order of the report.
        target_loss: Report the time until the loss of a step was at most this value; None: do not.
    """
    sections = [Section(run.name, tuple(_blocks_of(run, target_loss))) for run in runs]
    if len(runs) == 1:
        return Report(f"Run {runs[0].name}", tuple(sections))
    comparison = Section("Comparison", tuple(_comparison(runs, target_loss)))
    return Report(f"Comparison of {len(runs)} runs", (comparison, *sections))


def _comparison(runs: Sequence[RunRecord], target_loss: float | None) -> Iterator[Block]:
    yield Table("Runs", *_run_table(runs, target_loss))
    yield Table(
        "Metrics",
        ("Run", "Metric", "Last", "Lowest", "Highest"),
        tuple((run.name, *row) for run in runs for row in _metric_rows(run)),
    )
    names = sorted({name for run in runs for name in run.series}, key=_order_of_metrics)
    for name in names:
        curves = [curve_of(run.name, run.series[name]) for run in runs if name in run.series]
        yield Chart(_title_of(name), "step", _title_of(name), tuple(curves))
    fields = sorted({field for run in runs for field in run.job})
    differing = [field for field in fields if len({run.job.get(field) for run in runs}) > 1]
    yield Table(
        "Differences of the jobs",
        ("Field", *(run.name for run in runs)),
        tuple((field, *(run.job.get(field, UNKNOWN) for run in runs)) for field in differing),
    )


def _run_table(
    runs: Sequence[RunRecord], target_loss: float | None
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return columns and rows of the comparison. Efficiency refers to the run with the fewest ranks."""
    known = [(run.num_ranks or 1, run.samples_per_s_per_rank) for run in runs if run.samples_per_s_per_rank]
    _, base = min(known, default=(1, math.nan))
    columns: dict[str, Callable[[RunRecord], str]] = {
        "Run": lambda run: run.name,
        "State": lambda run: run.status.state,
        "Ranks": lambda run: number(run.num_ranks),
        "Global batch": lambda run: number(_global_batch(run)),
        "Steps": lambda run: number(run.history.last.step if run.history.last else None),
        "Duration": _duration_of,
        "Samples/s (median)": lambda run: number(run.samples_per_s),
        "Efficiency": lambda run: (
            f"{100 * run.samples_per_s_per_rank / base:.0f} %" if run.samples_per_s_per_rank else UNKNOWN
        ),
    }
    if target_loss is not None:
        columns[f"Time to loss {target_loss:g}"] = lambda run: _seconds(run.seconds_to_loss(target_loss))
    return tuple(columns), tuple(tuple(cell(run) for cell in columns.values()) for run in runs)


def _blocks_of(run: RunRecord, target_loss: float | None) -> Iterator[Block]:
    yield Table("Run", ("", ""), tuple(_facts(run, target_loss)))
    for rank, failure in run.history.failures:
        if failure.is_cause:
            yield Text(f"Rank {rank} failed: {failure.message}\n{failure.traceback}".rstrip(), True)
    yield Table("Metrics", ("Metric", "Last", "Lowest", "Highest"), tuple(_metric_rows(run)))
    for name in sorted(run.series, key=_order_of_metrics):
        yield Chart(_title_of(name), "step", _title_of(name), (curve_of(name, run.series[name]),))
    yield from _rank_blocks(run)
    yield Table(
        "Events",
        ("Time (UTC)", "Event"),
        tuple((_utc(record.time_unix_s), _event_text(record)) for record in run.history.events),
    )
    yield Table(
        "Checkpoints",
        ("Time (UTC)", "Path", "Written in", "Error"),
        tuple(
            (_utc(time), event.path, f"{event.seconds:.3g} s", event.error) for time, event in run.checkpoints
        ),
    )
    yield Table(
        "Job: fields that differ from the defaults", ("Field", "Value"), tuple(run.changed_fields.items())
    )


def _facts(run: RunRecord, target_loss: float | None) -> Iterator[tuple[str, str]]:
    """Yield names and values of a run, without unknown values."""
    history, started, summary = run.history, run.history.started, run.history.summary
    versions = {"horovod_train": run.package_version, **(started.versions if started else {})}
    hosts = run.attempts[-1].hosts if run.attempts else ()
    facts = {
        "State": str(run.status),
        "Begun (UTC)": _utc(history.begun_unix_s) if history.begun_unix_s is not None else "",
        "Duration": _duration_of(run),
        "Ranks": number(run.num_ranks),
        "Hosts": ", ".join(hosts),
        "Device": started.device if started else "",
        "Precision": started.precision if started else "",
        "Parameters": number(started.num_parameters) if started else "",
        "Global batch": number(_global_batch(run)),
        "Steps": number(history.last.step) if history.last else "",
        "Epochs": f"{summary.epochs:g}" if summary else "",
        "Samples/s (median)": number(run.samples_per_s),
        "Learning rate": learning_rate(
            summary.lr_scaling, summary.base_lr, summary.reference_batch_size, summary.peak_lr
        )
        if summary
        else "",
        "Gradient of one process": _compared_text(history),
        "Starts of the ranks": number(len(run.attempts) or None),
        "Preemptions": number(history.num_preemptions or None),
        "Lost hosts": ", ".join(history.hosts_lost),
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    }
    if target_loss is not None:
        facts[f"Time to loss {target_loss:g}"] = _seconds(run.seconds_to_loss(target_loss))
    yield from ((name, value) for name, value in facts.items() if value not in ("", UNKNOWN))


def _compared_text(history: History) -> str:
    """Return the result of the last comparison of the gradient with that of one process."""
    last = history.compared
    if last is None:
        return ""
    if last.text:
        return f"step {last.step}: {last.text}"
    count = history.counts[ComparedWithOneProcess.kind]
    return f"equal, compared {count} times, last after step {last.step}"


def _metric_rows(run: RunRecord) -> Iterator[tuple[str, str, str, str]]:
    """Yield last, lowest and highest value of the loss and of each metric, with their steps."""
    for name in sorted(run.series, key=_order_of_metrics):
        if not (name == "loss" or name.startswith("eval/")):
            continue
        finite = [(value, step) for step, value in run.series[name] if math.isfinite(value)]
        _, last = run.series[name][-1]
        lowest, highest = min(finite, default=None), max(finite, key=lambda each: each[0], default=None)
        yield name, number(last), _at_step(lowest), _at_step(highest)


def _at_step(found: tuple[float, int] | None) -> str:
    return UNKNOWN if found is None else f"{number(found[0])} (step {found[1]})"


def _rank_blocks(run: RunRecord) -> Iterator[Block]:
    window = run.rank_times
    if window is None:
        return
    own = window.per_step(window.own_s)
    ranks = list(range(window.table.shape[1]))
    if len(ranks) > MAX_RANKS:
        slowness = np.nan_to_num(own, nan=-1.0)
        ranks = sorted(sorted(ranks, key=lambda rank: -slowness[rank])[:MAX_RANKS])
        yield Text(f"Ranks: the {MAX_RANKS} ranks of {window.table.shape[1]} with the longest own time.")
    phases = [phase for phase in PHASES if np.isfinite(window[phase]).any()]
    yield Table("Ranks", *_rank_table(run, window, ranks, phases))
    if window.seconds >= MIN_WINDOW_S and (slow := stragglers(window)):
        slow_ranks = describe_ranks([each.rank for each in slow])
        yield Text(f"Own time more than 20 % above the median of all ranks: {slow_ranks}.")
    bars = [
        Curve(phase, tuple(map(str, ranks)), _finite(1000 * window.per_step(window[phase])[ranks]))
        for phase in phases
    ]
    yield Chart("Phases of a step by rank", "rank", "ms per step", tuple(bars), "bars")


def _rank_table(
    run: RunRecord, window: Window, ranks: Sequence[int], phases: Sequence[str]
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return columns and rows of the table of ranks, with means over the last number of ranks."""
    waiting, waited_for = window.wait_times
    columns: dict[str, Callable[[int], str]] = {
        "Rank": str,
        "Host": lambda rank: (
            run.history.targets[rank].labels.get("host", "") if rank in run.history.targets else ""
        ),
        "Steps": lambda rank: number(float(window["steps"][rank])),
        "Own time": _milliseconds(window.per_step(window.own_s)),
        "Step time": _milliseconds(window.per_step(window["step_s"])),
        "Waiting": lambda rank: _percent(waiting[rank] / window.seconds),
        "Others wait for it": lambda rank: _percent(waited_for[rank] / window.seconds),
        **{phase: _milliseconds(window.per_step(window[phase])) for phase in phases},
    }
    return tuple(columns), tuple(tuple(cell(rank) for cell in columns.values()) for rank in ranks)


def _milliseconds(seconds: np.ndarray) -> Callable[[int], str]:
    def cell(rank: int) -> str:
        value = float(seconds[rank])
        return f"{1000 * value:.3g} ms" if math.isfinite(value) else UNKNOWN

    return cell


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.3g} %" if math.isfinite(fraction) else UNKNOWN


def _event_text(record: Record) -> str:
    """Return an event as one line."""
    event, rank = record.event, record.rank or 0
    match event:
        case Opened():
            text = f"run of {event.job} started"
        case StateChanged():
            text = f"state: {event.state}{', ' if event.message else ''}{event.message}"
        case Attempt():
            where = f" on {', '.join(event.hosts)}" if event.hosts else ""
            text = f"start {event.number + 1} of the ranks: {event.num_ranks} ranks{where}"
        case HostsLost():
            text = f"lost hosts: {', '.join(event.hosts)} ({event.why})"
        case CheckpointWritten():
            text = f"checkpoint {event.path}{': ' if event.error else ''}{event.error}"
        case Stalled():
            text = f"rank {rank}: {stalled_text(event)}"
        case Failure():
            consequence = "" if event.is_cause else ", as a consequence of another failure"
            text = f"rank {rank} on {event.host} failed{consequence}: {event.message}"
        case _:
            text = as_text(event, rank) or event.kind
    return text.partition("\n")[0]


def curve_of(name: str, points: Sequence[tuple[int, float]]) -> Curve:
    """Return a curve of at most ``MAX_POINTS`` points, given as (step, value)."""
    steps, values = zip(*points, strict=True)
    places = places_to_keep(steps, [{name: value} for value in values], MAX_POINTS)
    steps, values = zip(*(points[place] for place in places), strict=True)
    return Curve(name, tuple(steps), _finite(np.asarray(values, np.float64)))


def _finite(values: np.ndarray) -> tuple[float | None, ...]:
    return tuple(float(value) if math.isfinite(value) else None for value in values)


def _order_of_metrics(name: str) -> tuple[int, str]:
    """Return the sort key of a metric: the loss, evaluations, learning rate and throughput, other numbers."""
    first = {"loss": 0, "lr": 2, "samples_per_s": 3}
    return first.get(name, 1 if name.startswith("eval/") else 4), name


def _title_of(name: str) -> str:
    titles = {"loss": "Loss", "lr": "Learning rate", "samples_per_s": "Samples/s of all ranks"}
    return titles.get(name, f"Evaluation: {name.removeprefix('eval/')}" if name.startswith("eval/") else name)


def number(value: float | None) -> str:
    """Return a number with at most 6 significant digits; whole numbers completely.

    >>> number(85066), number(0.0641234567), number(None)
    ('85,066', '0.0641235', '-')
    """
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.6g}"


def _global_batch(run: RunRecord) -> int | None:
    started = run.history.started
    return (started.global_batch_size or None) if started else None


def _duration_of(run: RunRecord) -> str:
    """Return the time between the first and the last event."""
    begun, end = run.history.begun_unix_s, run.end_unix_s
    return UNKNOWN if begun is None or end is None else duration(max(0.0, end - begun))


def _seconds(seconds: float | None) -> str:
    return "not reached" if seconds is None else f"{seconds:.1f} s"


def _utc(time_unix_s: float) -> str:
    return datetime.fromtimestamp(time_unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


# A report contains text of tasks: it is escaped, and the policy forbids all requests.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


def as_html(report: Report) -> str:
    """Return a report as HTML. Charts are drawn by the scripts of the web page."""
    charts = [block for section in report.sections for block in section.blocks if _has_curves(block)]
    places = iter(range(len(charts)))
    body = "\n".join(
        f"<section>\n<h2>{escape(section.title)}</h2>\n"
        + "\n".join(text for block in section.blocks for text in _block(block, places))
        + "\n</section>"
        for section in report.sections
    )
    own, page = files("horovod_train.plugins.report"), files("horovod_train.plugins.serve") / "page_files"
    style = (page / "page.css").read_text() + (own / "report.css").read_text()
    plotly = (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    script = (page / "charts.js").read_text() + (own / "report.js").read_text()
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(report.title)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<main>
<h1>{escape(report.title)}</h1>
{body}
</main>
<script type="application/json" id="charts">{_as_json([asdict(chart) for chart in charts])}</script>
<script>{plotly}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def _as_json(value: object) -> str:
    """Return JSON that cannot end the element that contains it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _has_curves(block: Block) -> bool:
    return isinstance(block, Chart) and bool(block.curves)


def _block(block: Block, places: Iterator[int]) -> Iterator[str]:
    match block:
        case Text(text, is_preformatted):
            tag = "pre" if is_preformatted else "p"
            yield f"<{tag}>{escape(text)}</{tag}>"
        case Table(title, columns, rows) if rows:
            head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
            yield f'<h3>{escape(title)}</h3>\n<div class="scroll" tabindex="0"><table>'
            yield f"<thead><tr>{head}</tr></thead><tbody>" if any(columns) else "<tbody>"
            for row in rows:
                yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            yield "</tbody></table></div>"
        case Chart() if block.curves:
            chart = f'<div id="chart-{next(places)}" class="chart" role="img"></div>'
            yield f"<figure><figcaption>{escape(block.title)}</figcaption>{chart}</figure>"


MAX_VALUES = 10
"""Maximum values of a curve, which Markdown cannot draw."""


def as_markdown(report: Report) -> str:
    """Return a report as Markdown. Curves are tables of at most ``MAX_VALUES`` values."""
    lines = [f"# {_text(report.title)}"]
    for section in report.sections:
        lines += ["", f"## {_text(section.title)}"]
        for block in section.blocks:
            lines += ["", *_markdown_block(block)] if not _is_empty(block) else []
    return "\n".join(lines) + "\n"


def _is_empty(block: Block) -> bool:
    match block:
        case Table():
            return not block.rows
        case Chart():
            return block.kind == "bars" or not block.curves  # the values of bars are in the table of ranks
        case Text():
            return not block.text


def _markdown_block(block: Block) -> Iterator[str]:
    match block:
        case Text(text, True):
            yield from (f"    {line}" for line in text.splitlines())
        case Text(text):
            yield _text(text)
        case Table(title, columns, rows):
            yield from _table(title, columns, rows)
        case Chart():
            values = [(curve.name, _values_of(curve)) for curve in block.curves]
            yield from _table(block.title, ("", f"{block.x_title}: value"), values)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"### {_text(title)}"
    yield ""
    yield _row(columns)
    yield "|" + "---|" * len(columns)
    yield from map(_row, rows)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_text(cell).replace("|", "\\|") for cell in cells) + " |"


def _values_of(curve: Curve) -> str:
    every = max(1, -(-(len(curve.x) - 1) // (MAX_VALUES - 1)))
    places = sorted({*range(0, len(curve.x), every), len(curve.x) - 1})
    return ", ".join(
        f"{curve.x[place]}: {UNKNOWN if (value := curve.y[place]) is None else number(value)}"
        for place in places
    )


def _text(text: str) -> str:
    """Return text without HTML elements and line breaks."""
    return escape(" ".join(text.split("\n")), quote=False)
