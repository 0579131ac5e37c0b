"""Fields of a job that name code of the user, as ``file.py:name`` or ``module:name``."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, MutableSequence

PATHS = (
    "task",
    "optimizer.name",
    "optimizer.schedules.*",
    "lr.scaling",
    "lr.decay",
    "strategy",
    "strategy.name",
    "allreduce.codec.name",
    "metrics.trackers.*.name",
)
"""Paths of these fields; ``*`` is each name of a mapping, or each place of a list."""

Container = MutableMapping[str, object] | MutableSequence[object]


def code_fields(tree: MutableMapping[str, object]) -> Iterator[tuple[str, Container, str | int, str]]:
    """Yield path, container, key and text of each of these fields that is a text, in a tree of plain values.

    >>> [path for path, *_ in code_fields({"task": "a.py:A", "metrics": {"trackers": [{"name": "csv"}]}})]
    ['task', 'metrics.trackers.0.name']
    """
    for path in PATHS:
        yield from _fields_at(tree, path.split("."), ())


def _fields_at(
    node: object, parts: list[str], passed: tuple[str | int, ...]
) -> Iterator[tuple[str, Container, str | int, str]]:
    part, *rest = parts
    keys: list[str | int] = []
    if isinstance(node, MutableMapping):
        keys = list(node) if part == "*" else [part]
    elif isinstance(node, MutableSequence) and part == "*":
        keys = list(range(len(node)))
    for key in keys:
        value = node.get(key) if isinstance(node, MutableMapping) else node[key]  # type: ignore[index]
        place = (*passed, key)
        if rest:
            yield from _fields_at(value, rest, place)
        elif isinstance(value, str):
            yield ".".join(map(str, place)), node, key, value  # type: ignore[misc]
