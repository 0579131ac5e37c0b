"""Reports as Markdown (GitHub's dialect)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from horovod_train.report.document import UNKNOWN, Block, Chart, Curve, Report, Table, Text, number

MAX_VALUES = 10
"""Maximum values of a curve, which Markdown cannot draw."""


def as_markdown(report: Report) -> str:
    """Return a report as Markdown. Curves are tables of at most ``MAX_VALUES`` values."""
    lines = [f"# {_text(report.title)}"]
    for section in report.sections:
        lines += ["", f"## {_text(section.title)}"]
        for block in section.blocks:
            lines += ["", *_block(block)] if not _is_empty(block) else []
    return "\n".join(lines) + "\n"


def _is_empty(block: Block) -> bool:
    match block:
        case Table():
            return not block.rows
        case Chart():
            return block.kind == "bars" or not block.curves  # the values of bars are in the table of ranks
        case Text():
            return not block.text


def _block(block: Block) -> Iterator[str]:
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
