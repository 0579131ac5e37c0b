"""Tracker that appends a JSON object per line for each logged step and evaluation."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from horovod_train.config.fields import Section
from horovod_train.config.support import TrackerSupport
from horovod_train.system.files import write_atomic
from horovod_train.telemetry.tracking import SummaryValues, TrackedRun, kind_of

JsonLine = dict[str, Any]


class Arguments(Section):
    """Arguments of the file with a JSON object for each step of all runs of a job."""

    path: str | None = None
    """File, relative to the folder of the job's runs; null: ``metrics.jsonl``."""


SUPPORT = TrackerSupport(f"{__name__}:JsonLines", Arguments, default_place="metrics.jsonl")


class JsonLines:
    """Tracker that writes a file with one line per start, logged step and evaluation.

    Steps are unique: a resume, and a return to a checkpoint, remove the lines of later steps. A line of a
    start has ``run``, ``from_step``, ``world_size``, ``versions`` and ``job``, that of an end ``run`` and
    ``summary``; other lines have ``run``, ``step``, ``epochs`` and ``values``. Values that are not finite
    are null.

    Args:
        path: File, relative to the folder of the job's runs; None: ``metrics.jsonl``.
    """

    def __init__(self, path: str | None = None) -> None:
        self._name = Path(path or "metrics.jsonl")

    def start(self, run: TrackedRun) -> None:
        """Remove the lines of later steps of the run that is resumed, and append a line for this start.

        Raises:
            OSError: The file cannot be read or written.
        """
        self._run_id, self._job = run.run_id, run.job["name"]
        self._path = run.folder / self._name.expanduser()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._last = {"step": run.step, "evaluation": run.step}
        self._retain(lambda entry: run.step == 0 or entry["step"] <= run.step)
        self._append(
            {
                "run": run.run_id,
                "from_step": run.step,
                "world_size": run.world_size,
                "versions": dict(run.versions),
                "job": dict(run.job),
            }
        )

    def log(self, step: int, epochs: float, values: Mapping[str, float]) -> None:
        """Append a line; remove lines of the same kind of this and later steps first."""
        kind = kind_of(values)
        if step <= self._last[kind]:
            self._retain(lambda entry: entry["step"] < step or kind_of(entry["values"]) != kind)
        self._last[kind] = step
        finite = {name: _finite(value) for name, value in values.items()}
        self._append({"run": self._run_id, "step": step, "epochs": _finite(epochs), "values": finite})

    def summarize(self, values: SummaryValues) -> None:
        """Append a line with the summary."""
        self._append({"run": self._run_id, "summary": values})

    def end(self) -> None:
        """Do nothing: each line was written and closed."""

    def _append(self, entry: JsonLine) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def _retain(self, is_retained: Callable[[JsonLine], bool]) -> None:
        """Rewrite the file: all lines before the last start from step 0, and the retained ones after it."""
        if not self._path.exists():
            return
        text = self._path.read_text(encoding="utf-8", errors="replace")
        lines = text.splitlines()
        entries = [entry_of(line) for line in lines]
        # Several jobs may share the file.
        ours = [at for at, entry in enumerate(entries) if entry is not None and self._is_start(entry)]
        first = max((at for at in ours if (entries[at] or {})["from_step"] == 0), default=0)
        runs = {self._run_id, *((entries[at] or {})["run"] for at in ours if at >= first)}
        kept = [
            line
            for at, (line, entry) in enumerate(zip(lines, entries, strict=True))
            if entry is not None
            and (at < first or "step" not in entry or entry["run"] not in runs or is_retained(entry))
        ]
        wanted = "".join(f"{line}\n" for line in kept)
        if wanted != text:
            write_atomic(self._path, wanted, stat.S_IMODE(self._path.stat().st_mode))

    def _is_start(self, entry: JsonLine) -> bool:
        job = entry.get("job")
        return "from_step" in entry and isinstance(job, dict) and job.get("name") == self._job


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def entry_of(line: str) -> JsonLine | None:
    """Parse a line; None: it was not written completely."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    known = ({"from_step"}, {"step", "values"}, {"summary"})
    fits = isinstance(entry, dict) and "run" in entry and any(keys <= entry.keys() for keys in known)
    return entry if fits else None
