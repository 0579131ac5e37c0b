"""docs/frameworks.md: what the tests have seen each framework do, and with which version.

A test says with the fixture ``matrix`` which cell it fills; whether it passed decides what stands
there. ``pytest --matrix=docs/frameworks.md`` rewrites the page when it is not what was seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from horovod_train.config.support import SUPPORT

COLUMNS = {
    "torch": "PyTorch",
    "tensorflow": "TensorFlow",
    "keras on tensorflow": "Keras on TensorFlow",
    "keras on torch": "Keras on PyTorch",
    "keras on jax": "Keras on JAX",
    "jax": "JAX",
    "lightning": "Lightning",
    "transformers": "Transformers",
    "mxnet": "MXNet",
}
WEIGHTS = "weights of one process: {}"
ROWS = (
    WEIGHTS.format("SGD with momentum"),
    WEIGHTS.format("Adam, clipping"),
    WEIGHTS.format("accumulation, clipping"),
    WEIGHTS.format("warm-up, linear scaling, cosine decay"),
    WEIGHTS.format("bf16"),
    WEIGHTS.format("fp16, clipping"),
    "the same bits on all ranks",
    "exact evaluation",
    "an overflow on one rank: all skip the step",
    "not a number on one rank: all stop and name it",
    "killed and resumed: bit for bit as if undisturbed",
    "metrics of each rank",
    "gradient norm among them",
    "parts of a step that can be told apart",
    "in a script of your own, without a job",
)
HEAD = """# What each framework does

Written by `make test` from what its tests saw, on a CPU. "Weights of one process": ranks with a batch
each end within 1e-6 (32 bits) of an independent computation on the joint batch, on 2 or 3 ranks, over
MPI or Gloo; `make campaign` takes each framework through all four.
What cannot be had is refused before a job starts; the numbers lead to the reasons.

"""
Cell = tuple[str, str]


class Matrix:
    """Collects what tests say about cells."""

    def __init__(self) -> None:
        self._cells: dict[Cell, str] = {}
        self._failed: set[Cell] = set()

    def add(self, row: str, column: str, text: str, *, passed: bool) -> None:
        """Note what one test saw; a cell is as good as the worst of its tests."""
        if row not in ROWS or column not in COLUMNS:
            raise ValueError(f"the matrix has no cell {row!r} x {column!r}")
        self._cells[row, column] = text
        if not passed:
            self._failed.add((row, column))

    def page(self) -> str:
        """Return the page, as Markdown."""
        cells = {cell: "**fails**" if cell in self._failed else text for cell, text in self._cells.items()}
        return HEAD + _table(cells) + _refused_fields()


def _table(cells: Mapping[Cell, str]) -> str:
    notes: list[str] = []
    lines = [["", *COLUMNS.values()], ["---"] * (len(COLUMNS) + 1)]
    lines.append(["version", *(SUPPORT[column.partition(" ")[0]].tested for column in COLUMNS)])
    for row in ROWS:
        line = [row]
        for column in COLUMNS:
            text = cells.get((row, column), "not tested")
            if text.startswith("no: "):
                reason = text.removeprefix("no: ")
                if reason not in notes:
                    notes.append(reason)
                text = f"no ({notes.index(reason) + 1})"
            line.append(text)
        lines.append(line)
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return table + "\n" + "".join(f"{number}. {note}\n" for number, note in enumerate(notes, 1))


def _refused_fields() -> str:
    lines = ["\n## Fields that are refused\n\n| framework | field | why | instead |\n|---|---|---|---|\n"]
    lines += [
        f"| {name} | `{refused.field}` | {refused.reason} | {refused.instead} |\n"
        for name, support in SUPPORT.items()
        for refused in support.refused
    ]
    return "".join(lines)


def update(matrix: Matrix, path: Path) -> bool:
    """Write the page if it is not what was seen; return whether it was."""
    page = matrix.page()
    was_right = path.exists() and path.read_text() == page
    if not was_right:
        path.write_text(page)
    return was_right
