"""What one rank alone achieves: the throughput of a finished run of the same job on one rank."""

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
"""So many runs are looked at, the newest ones: a folder may hold years of them."""

MIN_READINGS = 3
TAIL_BYTES = 256 * 1024

_SECTIONS = ("framework", "task", "task_args", "train", "data")
_LENGTH_ONLY = {"epochs", "max_steps", "seed"}


def baseline_samples_per_s(job: Job, run_dir: Path) -> float | None:
    """Return the samples a second of the newest finished run of the same job on one rank; None: none.

    The same are jobs with the same framework, task, training section (but for its length and seed) and data
    section, under whatever name.

    Args:
        job: The job.
        run_dir: Folder of the runs of all jobs.
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
            continue  # of another version, or being written
    return None


def newest_runs(run_dir: Path) -> list[Path]:
    """Return the folders of runs below a folder, the newest first."""
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
    """Return how a run ended, from the end of its events: reading all of them takes time from training."""
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
    """Return the throughput of a run, if it was one of one rank and has ended well."""
    summary = _summary(path)
    if summary is None or summary.world_size != 1:
        return None
    events = (record.event for record in read_events(path))
    readings = [
        event.samples_per_s
        for event in events
        if isinstance(event, Progress) and event.samples_per_s is not None
    ]
    # What lies between steps, evaluations above all, is in the summary, too.
    return median(readings) if len(readings) >= MIN_READINGS else summary.samples_per_s
