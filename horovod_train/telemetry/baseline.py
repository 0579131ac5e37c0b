"""Baseline of the scaling efficiency: the throughput of a finished run of the same job on one rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median

from horovod_train.config.schema import Job
from horovod_train.events.file import EVENTS_FILE, as_record, read_events
from horovod_train.events.types import Progress, Summary

MAX_RUNS = 100
"""Only this many runs are read, the newest ones, because a folder may contain runs of several years."""

MIN_READINGS = 3
TAIL_BYTES = 256 * 1024

_SECTIONS = ("framework", "task", "task_args", "train", "data")
_LENGTH_ONLY = {"epochs", "max_steps", "max_samples", "stop_at_step", "seed"}


def baseline_samples_per_s(job: Job, run_dir: Path) -> float | None:
    """Return the samples per second of the newest finished run of the same job on one rank; None: no run.

    Two jobs are the same if framework, task, task arguments, data section, and training section without
    length and seed are equal. Their names may differ. ``run_dir`` contains the runs of all jobs.
    """
    wanted = _what_takes_time(job.model_dump(mode="json"))
    for log_dir in newest_runs(run_dir):
        try:
            document = json.loads((log_dir / "job.json").read_bytes())
            if _what_takes_time(document) == wanted:
                found = _samples_per_s(log_dir / EVENTS_FILE)
                if found is not None:
                    return found
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # from another version, or incomplete
    return None


def newest_runs(run_dir: Path) -> list[Path]:
    """Return at most ``MAX_RUNS`` run folders in ``run_dir``, newest first."""
    found = []
    for path in run_dir.glob(f"*/*/{EVENTS_FILE}"):
        try:
            found.append((path.stat().st_mtime, path.parent))
        except OSError:
            continue
    return [folder for _, folder in sorted(found, reverse=True)[:MAX_RUNS]]


def _what_takes_time(document: Mapping[str, object]) -> dict[str, object]:
    chosen = {name: document[name] for name in _SECTIONS}
    train = chosen["train"]
    if isinstance(train, Mapping):
        chosen["train"] = {name: value for name, value in train.items() if name not in _LENGTH_ONLY}
    return chosen


def _summary(path: Path) -> Summary | None:
    """Return the summary of a run, read from the end of the file so that training is not slowed down."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    for line in reversed(lines):
        if f'"{Summary.kind}"' in line:
            with suppress(ValueError, KeyError, TypeError):
                event = as_record(line).event
                if isinstance(event, Summary):
                    return event
    return None


def _samples_per_s(path: Path) -> float | None:
    """Return the throughput of a run; None: it is not complete, or had several ranks."""
    summary = _summary(path)
    if summary is None or summary.world_size != 1:
        return None
    events = (record.event for record in read_events(path))
    readings = [
        event.samples_per_s
        for event in events
        if isinstance(event, Progress) and event.samples_per_s is not None
    ]
    # The summary also includes the time between steps, mainly of evaluations.
    return median(readings) if len(readings) >= MIN_READINGS else summary.samples_per_s
