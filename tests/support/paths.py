"""The files that something goes through, seen in a real run: see ``tests/ranks/test_paths.py``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

TRACING = Path(__file__).parent.parent / "tracing"


def traced(folder: Path, stations: Sequence[str]) -> dict[str, str]:
    """Return variables with which every Python that is started notes who calls these functions.

    Args:
        folder: Is made, and gets the notes.
        stations: Functions as ``file.py:Class.function``; the file's path may begin anywhere.
    """
    folder.mkdir()
    (folder / "stations.json").write_text(json.dumps(list(stations)))
    return {"TRACED_INTO": str(folder), "PYTHONPATH": str(TRACING)}


def stacks(folder: Path) -> list[tuple[str, list[str]]]:
    """Return each station that was called, with the functions of the package on the stack."""
    lines = [line for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]
    return [(station, functions) for station, *functions in map(json.loads, lines)]


def way(found: Sequence[tuple[str, list[str]]], stations: Mapping[str, str]) -> list[str]:
    """Return the functions that a path goes through, in its order.

    Args:
        found: What ``stacks`` returned.
        stations: The stations of the path, each with the function that gets the news.

    Raises:
        AssertionError: A station was not called behind that function.
    """
    passed: dict[str, None] = {}
    for station, first in stations.items():
        ways = [
            functions[place:]
            for name, functions in found
            if name == station
            for place in [next((n for n, each in enumerate(functions) if each.endswith(first)), None)]
            if place is not None
        ]
        assert ways, f"{station} was not called behind {first}"
        passed |= dict.fromkeys(min(ways, key=len))
    return list(passed)
