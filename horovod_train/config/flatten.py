"""Job descriptions as flat tables of dotted paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def flat(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str | float | bool]]:
    """Yield the values of nested mappings by dotted path; null, and values of other types, as text."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str | bool | int | float) else str(value)
