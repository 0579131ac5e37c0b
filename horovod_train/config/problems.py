"""Readable problems of job descriptions, and what they need of a job.

    explain, field_path   conversion of pydantic's errors into problems with hints
    code_fields           fields of a job that name code of the user, as ``file.py:name`` or ``module:name``
    flat                  job descriptions as flat tables of dotted paths

There is one problem for each field that a validation error names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from horovod_train.errors import Problem, did_you_mean

MAX_SHOWN_CHARS = 60
UNKNOWN_FIELD = "is not a known field"

# Messages by pydantic's error type; {} fields are filled from the error's context.
SENTENCES = {
    "missing": "is required",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be a text",
    "list_type": "must be a list",
    "dict_type": "must be a mapping of names to values",
    "model_type": "must be a section: a mapping of field names to values",
    "model_attributes_type": "must be a section: a mapping of field names to values",
    "literal_error": "must be one of {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must not be empty",
    "too_short": "must have at least {min_length}",
    "string_too_long": "must have at most {max_length} characters",
    "value_error": "{error}",
}

# Descriptions of the patterns of fields, by the last part of the path that is listed here.
PATTERN_HINTS = {
    "name": "letters, digits, '.', '_' and '-', at most 63, as in 'resnet-50'",
    "task": "a shipped task such as 'digits', or 'package.module:Class', or 'path/file.py:Class'",
    "hosts": "host:slots, as in 'node01:4'",
    "network_interface": "the name of an interface, as in 'eth0'",
    "env": "letters, digits and '_', not starting with a digit",
    "secrets": "env:NAME, file:/path, or on Kubernetes kubernetes:secret/key",
    "namespace": "lower-case letters, digits and '-', at most 63",
    "queue": "lower-case letters, digits and '-', at most 63",
    "image": "as in 'registry.example/train:1.0'",
    "csi_attributes": "text without line breaks",
    "mount_path": "an absolute path without spaces and ':'",
    **dict.fromkeys(
        ("claim", "csi_driver", "priority_class", "image_pull_secrets", "gang_queue"),
        "lower-case letters, digits, '-' and '.', as in 'training-data'",
    ),
    **dict.fromkeys(
        ("cpus_per_rank", "memory_per_rank", "shm_size"), "an amount as in '500m', '2' or '64Gi'"
    ),
    **dict.fromkeys(
        ("labels", "annotations", "node_selector", "tolerations", "topology_spread"),
        "keys as in 'team' or 'example.com/team'; values of letters, digits, '.', '_' and '-', at most 63",
    ),
    **dict.fromkeys(
        ("gpu_resource", "extra_resources"), "what a device plug-in calls it, as in 'nvidia.com/gpu'"
    ),
}


# Hints for values from other programs, by (last part of the path, found value).
_HINTS = {
    ("compile", "True"): "write {} to compile with what is set by default",
    ("matmul_precision", "tf32"): "high is TF32",
    **{
        (field, name): f"write {ours}"
        for field in ("precision", "wire_dtype")
        for name, ours in {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}.items()
    },
}


def shorten(value: object) -> str:
    """Return a value as JSON, truncated to ``MAX_SHOWN_CHARS``.

    >>> shorten([1, 2])
    '[1, 2]'
    """
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


def explain(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Return one problem for each field that a validation error names."""
    problems: dict[str, Problem] = {}
    for details in _with_choices_as_one(error.errors(include_url=False)):
        problem = _explain_one(details, model)
        problems.setdefault(problem.path, problem)
    return list(problems.values())


def _with_choices_as_one(errors: Iterable[ErrorDetails]) -> Iterator[ErrorDetails]:
    """Merge the two errors that pydantic reports for a union of bool and Literal."""
    for details in errors:
        place, last = details["loc"][:-1], str(details["loc"][-1:] and details["loc"][-1])
        if last == "bool" and details["type"].startswith("bool"):
            continue  # the error of the Literal follows
        if last.startswith("literal["):
            words = f"true, false or {details.get('ctx', {}).get('expected')}"
            yield {**details, "loc": place, "ctx": {"expected": words}}
        else:
            yield details


def field_path(location: Sequence[str | int]) -> tuple[str | int, ...]:
    """Remove the parts that pydantic adds to a location for unions and constrained keys."""
    return tuple(
        part
        for part in location
        if isinstance(part, int) or not (part.startswith(("constrained-", "function-", "[")))
    )


def _explain_one(details: ErrorDetails, model: type[BaseModel]) -> Problem:
    location = field_path(details["loc"])
    path = ".".join(map(str, location)) or "(the whole file)"
    kind = details["type"]
    found = "" if kind == "missing" else shorten(details.get("input"))
    if kind == "extra_forbidden":
        key, known = str(location[-1]), _fields_at(model, location[:-1])
        hint = did_you_mean(key, known) or f"known here: {', '.join(sorted(known))}"
        return Problem(path, found, UNKNOWN_FIELD, hint)
    if kind == "string_pattern_mismatch":
        names = [part for part in location if isinstance(part, str) and part in PATTERN_HINTS]
        allowed = PATTERN_HINTS[names[-1]] if names else details["ctx"]["pattern"]
        return Problem(path, found, "is not allowed here", f"allowed: {allowed}")
    sentence = SENTENCES.get(kind, details["msg"])
    message = sentence.format(**_plain_text(details.get("ctx", {})))
    hint = "write it without quotes" if _is_quoted_number(kind, details.get("input")) else ""
    hint = hint or _HINTS.get((str(location[-1]) if location else "", str(details.get("input"))), "")
    return Problem(path, found, message, hint)


def _plain_text(context: Mapping[str, object]) -> dict[str, object]:
    return {key: f"{value:g}" if isinstance(value, float) else value for key, value in context.items()}


def _is_quoted_number(kind: str, value: object) -> bool:
    if kind not in {"int_type", "float_type", "bool_type"} or not isinstance(value, str):
        return False
    try:
        float(value)
    except ValueError:
        return value.lower() in {"true", "false"}
    return True


def _fields_at(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """Return the names of the fields of the section at a location."""
    for part in location:
        field = model.model_fields.get(str(part))
        if field is None:
            return []
        candidates = [field.annotation, *get_args(field.annotation)]
        sections = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not sections:
            return []
        model = sections[0]
    return list(model.model_fields)


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
    "data.source",
    "data.decode",
    "data.keep",
    "data.collate",
    "data.sampling.*",
    *(f"data.{files}.{field}" for files in ("eval", "mixture.*") for field in ("source", "decode", "keep")),
)
"""Paths of these fields; ``*`` is each name of a mapping, or each place of a list."""

Container = MutableMapping[str, object] | MutableSequence[object]


def code_fields(tree: MutableMapping[str, object]) -> Iterator[tuple[str, Container, str | int, str]]:
    """Yield path, container, key and text of each of these fields that is a text, in a tree of plain values.

    >>> [path for path, *_ in code_fields({"task": "a.py:A", "metrics": {"trackers": [{"name": "csv"}]}})]
    ['task', 'metrics.trackers.0.name']
    """
    for path in PATHS:
        yield from _values_at(tree, path.split("."), ())


def _values_at(
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
            yield from _values_at(value, rest, place)
        elif isinstance(value, str):
            yield ".".join(map(str, place)), node, key, value  # type: ignore[misc]


def flat(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str | float | bool]]:
    """Yield the values of nested mappings by dotted path; null, and values of other types, as text."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str | bool | int | float) else str(value)
