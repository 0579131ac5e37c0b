"""What trackers have stored, read back by the libraries of their formats."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

Stored = dict[str, list[tuple[int, float]]]


def read_json_lines(path: Path) -> Stored:
    """Return the values of a file by name, in its order."""
    found: Stored = {}
    for entry in map(json.loads, path.read_text().splitlines()):
        for name, value in entry.get("values", {}).items():
            found.setdefault(name, []).append((entry["step"], value))
    return found


def read_tensorboard(folder: Path) -> Stored:
    """Return the scalars of one run, as TensorBoard shows them."""
    # TensorBoard would import TensorFlow, which takes ten seconds.
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run,) = folder.iterdir()
    accumulator = EventAccumulator(str(run), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: [(each.step, each.value) for each in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
        if tag != "epochs"
    }
