"""Objects of Kubernetes as plain data: how they are read (what is not there is empty), patched, written."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

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
    """Return a section with given fields.

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


def merge(target: object, patch: Mapping[str, object]) -> Manifest:
    """Return a document with a merge patch applied (RFC 7386): null removes, mappings merge."""
    merged: Manifest = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value) if isinstance(value, Mapping) else value
    return merged


class _PlainYaml(yaml.SafeDumper):
    """YAML for people: no aliases, and text of several lines unchanged."""

    def ignore_aliases(self, data: object) -> bool:
        """Write everything out."""
        return True


_PlainYaml.add_representer(
    str,
    lambda dumper, value: dumper.represent_scalar(
        "tag:yaml.org,2002:str", value, style="|" if "\n" in value else None
    ),
)


def as_yaml(manifests: list[Manifest]) -> str:
    """Return objects as one file."""
    return yaml.dump_all(manifests, Dumper=_PlainYaml, sort_keys=False, explicit_start=True)
