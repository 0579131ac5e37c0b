"""Objects of Kubernetes as plain data, and how they are read: what is not there is empty."""

from __future__ import annotations

from collections.abc import Mapping

Manifest = dict[str, object]
"""An object, as YAML and JSON have it."""


def field(document: object, *path: str) -> object:
    """Return what stands under a path of names; None: nothing does."""
    for name in path:
        if not isinstance(document, Mapping):
            return None
        document = document.get(name)
    return document


def section(document: object, *path: str) -> Mapping[str, object]:
    """Return a part with fields of its own.

    >>> section({"spec": {"runPolicy": {"suspend": True}}}, "spec", "runPolicy")
    {'suspend': True}
    """
    found = field(document, *path)
    return found if isinstance(found, Mapping) else {}


def sections(document: object, *path: str) -> list[Mapping[str, object]]:
    """Return the parts of a list."""
    found = field(document, *path)
    return [part for part in found if isinstance(part, Mapping)] if isinstance(found, list) else []


def text(document: object, *path: str, default: str = "") -> str:
    """Return a text, or what stands there as text."""
    found = field(document, *path)
    return default if found is None else str(found)


def texts(document: object, *path: str) -> list[str]:
    """Return the texts of a list."""
    found = field(document, *path)
    return [str(each) for each in found] if isinstance(found, list) else []


def number(document: object, *path: str, default: int) -> int:
    """Return a whole number; where something else stands, the default."""
    found = field(document, *path)
    return found if isinstance(found, int) else default
