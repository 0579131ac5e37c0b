"""docs/frameworks.md: what the tests have seen each framework do, and with which version.

A test says with the fixture ``matrix`` which cell it fills; whether it passed decides what stands
there. ``pytest --matrix=docs/frameworks.md`` rewrites the page when it is not what was seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from horovod_train.config.strategies import STRATEGY_SUPPORT
from horovod_train.config.support import SUPPORT, Refused
from horovod_train.frameworks.refused_callbacks import REFUSED

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
STRATEGIES = (
    "allreduce",
    "adasum",
    "local_sgd",
    "zero",
    "ddp",
    "fsdp",
    "tensor_parallel",
    "pipeline",
    "mesh",
    "deepspeed",
    "parameter_server",
)
FEATURES = (
    "as an independent computation: 64 bits",
    "as an independent computation: 32 bits",
    "as an independent computation: bf16",
    "with accumulation and clipping",
    "evaluated exactly",
    "a step that is not finite is left out on all ranks",
    "from weights of a file",
    "goes on under another strategy, or from one",
)
HEAD = """# What each framework does

Written by `make test` from what its tests saw, on a CPU. "Weights of one process": ranks with a batch
each end within 1e-6 (32 bits) of an independent computation on the joint batch, on 2 or 3 ranks, over
MPI or Gloo; `make campaign` takes each framework through all four.
What cannot be had is refused before a job starts; the numbers lead to the reasons.

"""
STRATEGIES_HEAD = """
## Strategies

They are PyTorch's; other frameworks sum gradients in each step. Seen on two ranks over MPI, on a CPU: weights
are those of one process with the joint batch, or of the algorithm written down once more (`adasum`,
`local_sgd`, `parameter_server`), to 1e-12 in 64 bits, 2e-6 in 32 and 2e-3 in bf16, with the short last step
of an epoch. `make campaign` tries them on four ranks and over Gloo, kills and resumes them, and changes
strategy and number of ranks on the way. `data_parallel` needs two GPUs, and was not tried.

"""
CALLBACKS_HEAD = """
## Callbacks

A task's `callbacks()` are called by Keras, Lightning and Transformers. Each checkpoint has their state, and a
job that resumes loads it: `state_dict()` and `on_save_checkpoint()` of Lightning's callbacks and modules, and
the attributes that training has changed of the others (numbers, text, arrays, and containers of them).
Attributes of other types, and methods of a module that a job does not call, such as `configure_optimizers()`,
are named when the job starts. A callback that sets the learning rate ends the job. These are refused:

"""
Cell = tuple[str, str]


class Matrix:
    """Collects what tests say about cells."""

    def __init__(self) -> None:
        self._cells: dict[Cell, str] = {}
        self._failed: set[Cell] = set()

    def add(self, row: str, column: str, text: str, *, passed: bool) -> None:
        """Note what one test saw; a cell is as good as the worst of its tests."""
        is_known = (row in ROWS and column in COLUMNS) or (row in FEATURES and column in STRATEGIES)
        if not is_known:
            raise ValueError(f"the matrix has no cell {row!r} x {column!r}")
        self._cells[row, column] = text
        if not passed:
            self._failed.add((row, column))

    def page(self) -> str:
        """Return the page, as Markdown."""
        cells = {cell: "**fails**" if cell in self._failed else text for cell, text in self._cells.items()}
        versions = ["version", *(SUPPORT[column.partition(" ")[0]].tested for column in COLUMNS)]
        names = {name: f"`{name}`" for name in STRATEGIES}
        of_frameworks, of_strategies = refused_fields()
        return (
            HEAD
            + _table(cells, ROWS, COLUMNS, [versions])
            + of_frameworks
            + refused_callbacks()
            + STRATEGIES_HEAD
            + _table(cells, FEATURES, names)
            + of_strategies
        )


def _table(
    cells: Mapping[Cell, str],
    rows: Sequence[str],
    columns: Mapping[str, str],
    first: Sequence[list[str]] = (),
) -> str:
    notes: list[str] = []
    lines = [["", *columns.values()], ["---"] * (len(columns) + 1), *first]
    for row in rows:
        line = [row]
        for column in columns:
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


def refused_fields() -> tuple[str, str]:
    """Return the parts of the page that need no tests: fields that frameworks and that strategies refuse."""
    return (
        _refused_fields("framework", {name: support.refused for name, support in SUPPORT.items()}),
        _refused_fields("strategy", {name: support.refused for name, support in STRATEGY_SUPPORT.items()}),
    )


def refused_callbacks() -> str:
    """Return the part of the page on callbacks."""
    lines = [CALLBACKS_HEAD, "| framework | callback | why | instead |\n|---|---|---|---|\n"]
    lines += [
        f"| {framework} | `{name}` | {refused.reason} | {refused.instead} |\n"
        for framework, of_framework in REFUSED.items()
        for name, refused in of_framework.items()
    ]
    return "".join(lines)


def _refused_fields(what: str, of_each: Mapping[str, Sequence[Refused]]) -> str:
    head = f"## Fields that a {what} refuses"
    lines = [f"\n{head}\n\n| {what} | field | why | instead |\n|---|---|---|---|\n"]
    lines += [
        f"| {name} | `{refused.field}` | {refused.reason} | {refused.instead} |\n"
        for name, refused_fields in of_each.items()
        for refused in refused_fields
    ]
    return "".join(lines)


def update(matrix: Matrix, path: Path) -> bool:
    """Write the page if it is not what was seen; return whether it was."""
    page = matrix.page()
    was_right = path.exists() and path.read_text() == page
    if not was_right:
        path.write_text(page)
    return was_right
