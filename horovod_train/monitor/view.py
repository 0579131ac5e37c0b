"""Data of the web page as JSON, computed from runs."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from time import time

import numpy as np

from horovod_train.config.support import TrackerSupport, tracker_support
from horovod_train.errors import result_of
from horovod_train.events.types import PHASES
from horovod_train.events.wire import parse_line
from horovod_train.launch.base import JobStatus
from horovod_train.monitor.board import DisplayedRun, Readings
from horovod_train.monitor.history import History, as_json
from horovod_train.monitor.live import finite
from horovod_train.monitor.rank_series import RankSeries, Window, joined
from horovod_train.monitor.stragglers import MIN_WINDOW_S, stragglers
from horovod_train.registry import TRACKERS
from horovod_train.system.files import open_regular
from horovod_train.telemetry.catalog import SHOWN_NUMBERS

log = logging.getLogger(__name__)

MAX_CELLS = 60_000
"""Maximum cells of the heatmap: for a thousand ranks, sixty windows."""

ABSENT_AFTER_S = 20.0
"""Ranks missing from a collective for this time are reported. Evaluation on one rank may take as long."""

LOG_TAIL_BYTES = 128 * 1024
MAX_EVENTS_SHOWN = 200
MAX_JOB_BYTES = 4 * 2**20
MAX_TRACKERS = 20

Json = dict[str, object]


def job_row(run: DisplayedRun) -> Json:
    """Return a run as a row of the list of jobs."""
    row, error = result_of(lambda: _job_row(run, run.status(), run.history()))
    if row is not None:
        return row
    # An unreadable run must not hide the other runs.
    log.error("%s cannot be shown", run.key, exc_info=error)
    summary = {"state": "unknown", "message": f"the run cannot be displayed: {type(error).__name__}: {error}"}
    nothing = dict.fromkeys(("begun_unix_s", "step", "num_steps"))
    return {"key": run.key, "job": run.job, "run": run.run_id, **summary, **nothing}


def _job_row(run: DisplayedRun, status: JobStatus, history: History) -> Json:
    last = history.last
    return {
        "key": run.key,
        "job": run.job,
        "run": run.run_id,
        "state": status.state,
        "message": status.message,
        "begun_unix_s": history.begun_unix_s,
        "step": last.step if last else None,
        "num_steps": history.num_steps or None,
    }


def run_document(run: DisplayedRun, readings: Readings) -> Json:
    """Return all data that the page shows for a run, with the last scraped metrics of its ranks."""
    status, history = run.status(), run.history()
    started, last = history.started, history.last
    return {
        **_job_row(run, status, history),
        **_curves(history, status),
        "exit_code": status.exit_code,
        "now_unix_s": time(),
        "folder": str(run.log_dir) if run.log_dir else None,
        "trackers": trackers_of(run.log_dir) if run.log_dir else [],
        "checkpoint_path": history.checkpoint_path or None,
        "world_size_wanted": history.world_size_wanted,
        "world_size_present": started.world_size if started else history.ranks.num_ranks or None,
        "global_batch_size": started.global_batch_size if started else None,
        "precision": started.precision if started else None,
        "device": started.device if started else None,
        "num_parameters": started.num_parameters if started else None,
        "num_attempts": history.num_attempts,
        "num_preemptions": history.num_preemptions,
        "loss": finite_or_none(last.loss) if last else None,
        "loss_is_finite": last is None or last.loss is None or math.isfinite(last.loss),
        "loss_is_local": history.loss_is_local,
        "lr": finite_or_none(last.lr) if last else None,
        "samples_per_s": finite_or_none(last.samples_per_s) if last else None,
        "epochs_begun": last.epochs_begun if last else None,
        "metrics": {name: finite_or_none(value) for name, value in history.metrics.items()},
        "checkpoint_unix_s": history.checkpoint_unix_s,
        "heat": _heat(history.ranks),
        "ranks": _rank_table(history, readings, status),
        "findings": _findings(history.ranks),
        "last_step_unix_s": last.time_unix_s if last else None,
        "stays_away": _absent_ranks(readings),
        "checkpoint_error": history.checkpoint_error,
        "min_window_s": MIN_WINDOW_S,
        "events": [as_json(record) for record in list(history.events)[-MAX_EVENTS_SHOWN:]],
    }


def curves_document(run: DisplayedRun) -> Json:
    """Return the curves of a run, for comparison with another run."""
    history, status = run.history(), run.status()
    return {**_job_row(run, status, history), **_curves(history, status)}


def _curves(history: History, status: JobStatus) -> Json:
    return {
        "points": _points(history),
        "evaluations": _evaluations(history),
        "num_epochs": history.num_epochs or None,
        "has_ended": status.has_ended,
    }


def trackers_of(log_dir: Path) -> list[Json]:
    """Return name and place of each tracker of a run, from its ``job.json``, which is not trusted."""
    try:
        with open_regular(log_dir / "job.json") as file:
            document = json.loads(file.read(MAX_JOB_BYTES))
        sections = document["metrics"]["trackers"]
        found = [(str(each["name"]), dict(each.get("args") or {})) for each in sections[:MAX_TRACKERS]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return [{"name": name, "place": _place(name, log_dir.parent, args)} for name, args in found]


def _place(name: str, folder: Path, args: Json) -> str:
    # The file is not trusted: nothing that it names is imported, but for rows of the registry.
    support = tracker_support(name) if name in TRACKERS.rows else TrackerSupport()
    return support.place(folder, args)


def finite_or_none(value: float | None) -> float | None:
    """Return a number; None if it is unknown, NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None


def _points(history: History) -> Json:
    points = history.points
    return {
        "time_unix_s": [point.time_unix_s for point in points],
        "step": [point.step for point in points],
        "loss": [finite_or_none(point.loss) for point in points],
        "lr": [finite_or_none(point.lr) for point in points],
        "samples_per_s": [finite_or_none(point.samples_per_s) for point in points],
        "numbers": {
            SHOWN_NUMBERS[name].shown: [finite_or_none(point.numbers.get(name)) for point in points]
            for name in SHOWN_NUMBERS
            if any(name in point.numbers for point in points)
        },
    }


def _evaluations(history: History) -> Json:
    """Return the metrics of each evaluation by time and step, as one list per metric."""
    names = sorted({name for *_, metrics in history.evaluations for name in metrics})
    return {
        "time_unix_s": [time_unix_s for time_unix_s, *_ in history.evaluations],
        "step": [step for _, step, _ in history.evaluations],
        "metrics": {
            name: [finite_or_none(metrics.get(name)) for *_, metrics in history.evaluations] for name in names
        },
    }


def _heat(series: RankSeries) -> Json:
    """Return own time per step in seconds (or step time if it is unknown), by rank and window."""
    windows = series.windows
    num_ranks = max((window.table.shape[1] for window in windows), default=0)
    columns = max(1, MAX_CELLS // max(1, num_ranks))
    per_column = math.ceil(len(windows) / columns) if windows else 1
    windows = [joined(windows[at : at + per_column]) for at in range(0, len(windows), per_column)]
    is_own = any(np.isfinite(window.own_s).any() for window in windows)
    matrix = np.full((num_ranks, len(windows)), np.nan, np.float32)
    for place, window in enumerate(windows):
        time_s = window.own_s if is_own else window["step_s"]
        matrix[: len(time_s), place] = window.per_step(time_s)
    return {
        "begun_unix_s": round(windows[0].end_unix_s - windows[0].seconds, 1) if windows else None,
        "time_unix_s": [round(window.end_unix_s, 1) for window in windows],
        "is_own": is_own,
        "rows": [finite(row) for row in matrix],
    }


def _rank_table(history: History, readings: Readings, status: JobStatus) -> Json:
    """Return the table of ranks, as one list per column."""
    window = history.ranks.recent(MIN_WINDOW_S)
    known = [*readings.scraped, *history.targets, *range(history.ranks.num_ranks)]
    num_ranks = max(known, default=-1) + 1
    columns: Json = {
        "rank": list(range(num_ranks)),
        "host": [_host(history, readings, rank) for rank in range(num_ranks)],
        "state": [_state(history, readings, rank, status) for rank in range(num_ranks)],
    }
    if window is not None:
        columns |= _times(window, num_ranks)
    names = sorted({name for reading in readings.last.values() for name in reading.values})
    for name in names:
        if name not in PHASES:
            columns[f"now_{name}"] = [
                finite_or_none(readings.last[rank].values.get(name, math.nan))
                if rank in readings.last
                else None
                for rank in range(num_ranks)
            ]
    return columns


def _times(window: Window, num_ranks: int) -> Json:
    """Return own, step and phase times per step in seconds, and waits as fractions of time, by rank."""

    def padded(numbers: np.ndarray) -> list[float | None]:
        return [*finite(numbers), *([None] * (num_ranks - len(numbers)))][:num_ranks]

    waiting, waited_for = window.wait_times
    phases = {phase: window.per_step(window[phase]) for phase in PHASES}
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "window_s": round(window.seconds, 1),
            "own_s": padded(window.per_step(window.own_s)),
            "step_s": padded(window.per_step(window["step_s"])),
            "waiting": padded(waiting / window.seconds),
            "waited_for": padded(waited_for / window.seconds),
            "samples_per_s": padded(window["samples"] / window.seconds),
            "phases_s": {phase: padded(each) for phase, each in phases.items() if np.isfinite(each).any()},
        }


def _host(history: History, readings: Readings, rank: int) -> str:
    target, reading = history.targets.get(rank), readings.last.get(rank)
    labels = reading.labels if reading is not None and reading.labels else target.labels if target else {}
    return labels.get("host", "")


def _state(history: History, readings: Readings, rank: int, status: JobStatus) -> str:
    """Return the state of a rank: trains, dead, failed, ended; empty: unknown."""
    if any(rank == each and failure.is_cause for each, failure in history.failures):
        return "failed"
    if rank in history.ended:
        return "ended"
    if status.has_ended:
        return "dead" if rank in status.lost_ranks else "ended"
    if history.has_terminal_event:
        return "ended"
    if rank in readings.silent:
        return "dead"
    return "trains" if rank in readings.of_ranks else ""


def _absent_ranks(readings: Readings) -> Json | None:
    """Return the ranks missing from a collective for at least ``ABSENT_AFTER_S``; None: none is missing."""
    waiting = {rank: reading.values.get("waiting_now_seconds") for rank, reading in readings.of_ranks.items()}
    known = {rank: seconds for rank, seconds in waiting.items() if seconds is not None}
    longest_s = max(known.values(), default=0.0)
    if longest_s < ABSENT_AFTER_S:
        return None
    # A rank that cannot be scraped is assumed to be missing from the collective.
    absent = {rank for rank, seconds in known.items() if not seconds} | readings.silent
    return {"ranks": sorted(absent), "seconds": longest_s}


def _findings(series: RankSeries) -> list[Json]:
    """Return the slow ranks of the last window; none if it is shorter than ``MIN_WINDOW_S``."""
    window = series.recent(MIN_WINDOW_S)
    if window is None or window.seconds < MIN_WINDOW_S:
        return []
    return [
        {
            "rank": each.rank,
            "own_s": each.own_s,
            "others_s": each.others_s,
            "phase": each.phase,
            "excess_s": each.excess_s,
            "waited_for": finite_or_none(float(window.wait_times[1][each.rank]) / window.seconds),
        }
        for each in stragglers(window)
    ]


def log_tail(run: DisplayedRun) -> str:
    """Return the end of a run's log, with events as readable text; empty if no log is on this host."""
    if run.log_dir is None:
        return ""
    try:
        with open_regular(run.log_dir / "run.log") as file:
            size_bytes = file.seek(0, 2)
            file.seek(max(0, size_bytes - LOG_TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    whole = text if size_bytes <= LOG_TAIL_BYTES else text.partition("\n")[2]
    readable = (parse_line(line).readable() for line in whole.splitlines())
    return "\n".join(line for line in readable if line is not None)
