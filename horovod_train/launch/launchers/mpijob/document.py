"""Kubernetes objects as plain data: access to fields (a missing field is empty), merge patches, and YAML."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

Manifest = dict[str, object]
"""A Kubernetes object, as parsed from YAML or JSON."""


def field(document: object, *path: str) -> object:
    """Return the value at a path of keys; None: it does not exist."""
    for name in path:
        if not isinstance(document, Mapping):
            return None
        document = document.get(name)
    return document


def section(document: object, *path: str) -> Mapping[str, object]:
    """Return the mapping at a path of keys; empty: there is none.

    >>> section({"spec": {"runPolicy": {"suspend": True}}}, "spec", "runPolicy")
    {'suspend': True}
    """
    found = field(document, *path)
    return found if isinstance(found, Mapping) else {}


def sections(document: object, *path: str) -> list[Mapping[str, object]]:
    """Return the mappings in the list at a path of keys; empty: there is no list."""
    found = field(document, *path)
    return [part for part in found if isinstance(part, Mapping)] if isinstance(found, list) else []


def text(document: object, *path: str, default: str = "") -> str:
    """Return the value at a path of keys as a string; the default, if it does not exist."""
    found = field(document, *path)
    return default if found is None else str(found)


def texts(document: object, *path: str) -> list[str]:
    """Return the values in the list at a path of keys as strings; empty: there is no list."""
    found = field(document, *path)
    return [str(each) for each in found] if isinstance(found, list) else []


def number(document: object, *path: str, default: int) -> int:
    """Return the integer at a path of keys; the default, if there is none."""
    found = field(document, *path)
    return found if isinstance(found, int) else default


def merge(target: object, patch: Mapping[str, object]) -> Manifest:
    """Return a document with a merge patch applied (RFC 7386): null removes a key, mappings merge."""
    merged: Manifest = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value) if isinstance(value, Mapping) else value
    return merged


class _PlainYaml(yaml.SafeDumper):
    """YAML dumper that writes no aliases, and strings of several lines as blocks."""

    def ignore_aliases(self, data: object) -> bool:
        """Return True, so that repeated objects are written in full."""
        return True


_PlainYaml.add_representer(
    str,
    lambda dumper, value: dumper.represent_scalar(
        "tag:yaml.org,2002:str", value, style="|" if "\n" in value else None
    ),
)


def as_yaml(manifests: list[Manifest]) -> str:
    """Return objects as the documents of one YAML file."""
    return yaml.dump_all(manifests, Dumper=_PlainYaml, sort_keys=False, explicit_start=True)
