"""Sections, tables and charts of a report, independent of the output format."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import numpy as np

from horovod_train.errors import describe_ranks
from horovod_train.events.file import Record
from horovod_train.events.text import as_text, duration, learning_rate, stalled_text
from horovod_train.events.thinning import places_to_keep
from horovod_train.events.types import (
    PHASES,
    Attempt,
    CheckpointWritten,
    ComparedWithOneProcess,
    Failure,
    HostsLost,
    Opened,
    Stalled,
    StateChanged,
)
from horovod_train.monitor.history import History
from horovod_train.monitor.rank_series import Window
from horovod_train.monitor.stragglers import MIN_WINDOW_S, stragglers
from horovod_train.report.record import RunRecord

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
