"""Load a job description from a file, the environment and ``--set``, and report all problems.

Only this module makes a job of what a user has written. ``job_file`` finds the job descriptions that ship
with this package by name.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import ValidationError

from horovod_train.config.arguments import with_argument_hint
from horovod_train.config.launch import launcher_sections
from horovod_train.config.problems import code_fields, explain, field_path, shorten
from horovod_train.config.rules import broken_rules, no_such_file
from horovod_train.config.schema import Job
from horovod_train.errors import ConfigError, Problem, UserError, did_you_mean
from horovod_train.registry import EXAMPLE_TASK, LAUNCHERS

ENV_PREFIX = "HOROVOD_TRAIN__"
MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_DEPTH = 32
MAX_VALUES = 100_000
# Fields whose keys are names of environment variables.
VARIABLES = ("env", "secrets")

# Errors of YAML, TOML and JSON readers. PyYAML does not wrap errors of its constructors, such as `!!int ""`.
UNREADABLE = (
    OSError,
    ValueError,
    yaml.YAMLError,
    RecursionError,
    MemoryError,
    OverflowError,
    LookupError,
    AttributeError,
    TypeError,
)

Tree = dict[str, object]


class _YamlLoader(yaml.SafeLoader):
    """Safe YAML loader that reads ``1e-3`` as a number and refuses duplicate keys."""


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)$"),
    list("-+.0123456789"),
)


def _mapping_without_doubles(loader: _YamlLoader, node: yaml.MappingNode) -> Tree:
    seen = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} must be a text", key_node.start_mark
            )
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} is given twice", key_node.start_mark
            )
        seen.add(key)
    return {str(key): value for key, value in loader.construct_mapping(node, deep=True).items()}


_YamlLoader.add_constructor("tag:yaml.org,2002:map", _mapping_without_doubles)


def load_job(
    path: Path,
    overrides: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
    settings: Mapping[str, object] = MappingProxyType({}),
    origin: str = "the command line",
) -> Job:
    """Load and check a job description.

    Args:
        path: A ``.yaml``, ``.yml``, ``.toml`` or ``.json`` file.
        overrides: Texts of the form ``train.epochs=3``; they override the file and the environment.
        environ: Contains variables such as ``HOROVOD_TRAIN__TRAIN__EPOCHS=3``; None: ``os.environ``.
        settings: Values by dotted path, such as command line options; they override ``overrides``.
        origin: Origin of ``settings``, for error messages.

    Raises:
        ConfigError: The job description is not valid. The error lists all problems.
    """
    return job_from(read_tree(path), path.parent, str(path), overrides, environ, settings, origin)


def job_from(
    tree: Tree,
    folder: Path,
    source: str,
    overrides: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
    settings: Mapping[str, object] = MappingProxyType({}),
    origin: str = "the command line",
) -> Job:
    """Return the job that a tree of plain values describes, which is modified in place.

    Relative paths in the tree refer to ``folder``. Error messages name ``source`` as the origin of the tree,
    and ``origin`` as that of ``settings``. The other arguments are those of ``load_job``.

    Raises:
        ConfigError: The job description is not valid. The error lists all problems.
    """
    problems: list[Problem] = []
    for variable, dotted, text in _assignments(
        overrides, os.environ if environ is None else environ, problems
    ):
        _assign_text(tree, dotted, text, variable, problems)
    for dotted, value in settings.items():
        _assign(tree, dotted, value, origin, problems)
    if _exceeds_limits(tree):
        raise ConfigError(source, [Problem("(the job)", "", "is nested too deeply, or has too many values")])
    if unusable := list(_unusable_texts(tree)):
        raise ConfigError(source, [*problems, *unusable])  # before file names are used
    _anchor_paths(tree, folder, problems)
    _anchor_data(tree.get("data"), folder)
    job = _validate(tree, problems)
    if problems or job is None:
        raise ConfigError(source, problems)
    return job


def changed(job: Job, settings: Mapping[str, object], source: str) -> Job:
    """Return a job with other values of some fields, by dotted path, checked as a whole.

    Raises:
        ConfigError: The changed job is not valid; the error names ``source`` and lists all problems.
    """
    tree = job.model_dump(mode="json")
    if "scaling" not in job.lr.model_fields_set:
        del tree["lr"]["scaling"]  # the rule of the optimizer, which may be changed
    return job_from(tree, Path(), source, environ={}, settings=settings)


def plain_values(given: Mapping[str, object]) -> Tree:
    """Return a copy with those types that JSON has: numbers and arrays of NumPy, and paths, are converted.

    Raises:
        ConfigError: The values are nested too deeply.
    """
    try:
        return {name: _plain(value) for name, value in given.items()}
    except RecursionError:
        raise ConfigError("the job", [Problem("(the job)", "", "is nested too deeply")]) from None


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Path):
        return str(value)
    if type(value).__module__ == "numpy" and (convert := getattr(value, "tolist", None)) is not None:
        return convert()
    return value


def read_tree(path: Path) -> Tree:
    """Read a file into plain dictionaries, lists and scalars.

    Raises:
        ConfigError: The file cannot be read, or its content does not have the format of its suffix.
    """
    readers: dict[str, Callable[[str], object]] = {
        ".yaml": _read_yaml,
        ".yml": _read_yaml,
        ".toml": tomllib.loads,
        ".json": partial(json.loads, object_pairs_hook=_json_without_doubles),
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise _unreadable(path, f"has an unknown ending {path.suffix!r}", f"use one of {', '.join(readers)}")
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise _unreadable(path, f"is larger than {MAX_FILE_BYTES} bytes: this is not a job description")
        tree = reader(path.read_text(encoding="utf-8"))
    except UNREADABLE as error:
        raise _unreadable(path, _why_unreadable(error, path)) from error
    if not isinstance(tree, dict):
        raise _unreadable(path, "must be a mapping of field names to values", "start with 'name: my-job'")
    if _exceeds_limits(tree):
        raise _unreadable(path, "is nested too deeply, or has too many values")
    return tree


def _json_without_doubles(pairs: list[tuple[str, object]]) -> Tree:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"the key {counts.most_common(1)[0][0]!r} is given twice")
    return tree


def _unreadable(path: Path, message: str, hint: str = "") -> ConfigError:
    return ConfigError(str(path), [Problem("(the file)", "", message, hint)])


def _why_unreadable(error: Exception, path: Path) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror}"
    if isinstance(error, UnicodeDecodeError):
        return "is not UTF-8 text"
    if isinstance(error, RecursionError | MemoryError | OverflowError):
        return "is nested too deeply"
    if isinstance(error, yaml.MarkedYAMLError):
        where = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        return f"is not valid YAML: {error.problem or error.context}{where}"
    return f"is not valid {path.suffix[1:].upper()}: {error}"


def _read_yaml(text: str) -> object:
    return yaml.load(text, _YamlLoader)  # noqa: S506  (derived from SafeLoader)


def _exceeds_limits(root: object) -> bool:
    """Return whether a value is nested too deeply, or too large when YAML aliases are expanded."""
    level = [root]
    for _ in range(MAX_DEPTH + 1):
        nested = {id(value): value for value in level if isinstance(value, dict | list)}
        if not nested:
            return _unfolded_size(root, {}) > MAX_VALUES
        level = [child for value in nested.values() for child in _children(value)]
    return True


def _unfolded_size(value: object, known: dict[int, int]) -> int:
    """Return the number of values, counting each alias as a copy; ``known`` caches results by ``id``."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) not in known:
        known[id(value)] = 1 + sum(_unfolded_size(child, known) for child in _children(value))
    return known[id(value)]


def _children(value: dict[str, object] | list[object]) -> list[object]:
    return list(value.values()) if isinstance(value, dict) else value


def _assignments(
    overrides: Iterable[str], environ: Mapping[str, str], problems: list[Problem]
) -> Iterable[tuple[str, str, str]]:
    """Yield (origin, dotted path, text), the environment first, so that ``--set`` overrides it."""
    for variable in sorted(environ):
        if variable.startswith(ENV_PREFIX):
            yield variable, _as_path(variable[len(ENV_PREFIX) :]), environ[variable]
    for override in overrides:
        dotted, equals, text = override.partition("=")
        parts = dotted.strip().split(".")
        if len(parts) > MAX_DEPTH:
            hint = "no field is nested this deeply"
            problems.append(Problem("--set", shorten(override), f"has more than {MAX_DEPTH} levels", hint))
            continue
        if not equals or not all(parts):
            hint = "write --set train.epochs=3"
            problems.append(Problem("--set", shorten(override), "is not of the form field=value", hint))
            continue
        yield "--set", dotted.strip(), text


def _as_path(name: str) -> str:
    """Return the dotted path for a variable without prefix, in lower case except for names of variables.

    >>> _as_path("TRAIN__EPOCHS"), _as_path("LAUNCH__ENV__OMP_PROC_BIND")
    ('train.epochs', 'launch.env.OMP_PROC_BIND')
    """
    parts = name.split("__")
    path = [part.lower() for part in parts]
    for at, part in enumerate(path):
        if part in VARIABLES and at + 1 < len(parts):
            return ".".join([*path[: at + 1], "__".join(parts[at + 1 :])])
    return ".".join(path)


def _assign_text(tree: Tree, dotted: str, text: str, origin: str, problems: list[Problem]) -> None:
    """Parse a text as YAML, and set the value at a dotted path to the result."""
    try:
        value = _read_yaml(text)
    except UNREADABLE as error:
        reason = getattr(error, "problem", None) or error
        problems.append(Problem(dotted, shorten(text), f"{origin}: is not a YAML value: {reason}"))
        return
    if _exceeds_limits(value):
        problems.append(Problem(dotted, shorten(text), f"{origin}: is nested too deeply"))
        return
    _assign(tree, dotted, value, origin, problems)


def _assign(tree: Tree, dotted: str, value: object, origin: str, problems: list[Problem]) -> None:
    """Set the value at a dotted path."""
    *parents, last = dotted.split(".")
    node = tree
    for parent in parents:
        child = node.get(parent)
        if child is None:
            child = node[parent] = {}
        if parent == "strategy" and isinstance(child, str):
            child = node[parent] = {"name": child}
        if not isinstance(child, dict):
            problems.append(Problem(dotted, shorten(value), f"{origin}: {parent!r} is not a section"))
            return
        node = child
    node[last] = value


def _unusable_texts(value: object, path: str = "") -> Iterator[Problem]:
    """Yield a problem for each text that files, variables and arguments do not allow."""
    if isinstance(value, dict):
        for key, child in value.items():
            if fault := _fault_of(str(key)):
                yield Problem(path or "(the file)", ascii(shorten(key)), fault)
            yield from _unusable_texts(child, f"{path}.{ascii(key)[1:-1]}" if path else ascii(key)[1:-1])
    elif isinstance(value, list):
        for place, child in enumerate(value):
            yield from _unusable_texts(child, f"{path}.{place}")
    elif isinstance(value, str) and (fault := _fault_of(value)):
        yield Problem(path, ascii(shorten(value)), fault)


def _fault_of(text: str) -> str:
    """Return why a text cannot be used; empty: it can."""
    if "\0" in text:
        return "must not contain a NUL character"
    if any("\ud800" <= character <= "\udfff" for character in text):
        return "must be valid Unicode, without lone surrogates"
    return ""


def _anchor_paths(tree: Tree, folder: Path, problems: list[Problem]) -> None:
    """Make paths of files with code absolute, because ranks may start in another folder.

    A relative path must exist. An absolute path may exist only in an image.
    """
    for path, section, field, location in code_fields(tree):
        file, colon, attribute = location.rpartition(":")
        if not colon or not file.endswith(".py"):
            continue
        try:
            place = Path(file).expanduser()
            is_missing = not place.is_absolute() and not (folder / place).is_file()
        except (OSError, RuntimeError):  # a name that is too long, or `~nobody`: see the rules
            continue
        if is_missing:
            problems.append(no_such_file(path, location, str(folder / place)))
        # Symbolic links are not resolved: the target folders of a mounted ConfigMap differ between hosts.
        section[field] = f"{os.path.abspath(folder / place)}:{attribute}"  # type: ignore[index]  # noqa: PTH100


def _anchor_data(data: object, folder: Path) -> None:
    """Make relative paths of files with samples absolute."""
    if not isinstance(data, dict):
        return
    mixture = data.get("mixture")
    for section in (data, data.get("eval"), *(mixture if isinstance(mixture, list) else ())):
        if not isinstance(section, dict):
            continue
        for field in ("files", "exclude"):
            value = section.get(field)
            if isinstance(value, str):
                section[field] = _anchored(value, folder)
            elif isinstance(value, list):
                section[field] = [_anchored(each, folder) for each in value]


def _anchored(path: Any, folder: Path) -> Any:
    is_path = isinstance(path, str) and path and "://" not in path and not path.startswith(("/", "~", "$"))
    return os.path.abspath(folder / path) if is_path else path  # noqa: PTH100  (it may have a pattern)


def _validate(tree: Tree, problems: list[Problem]) -> Job | None:
    """Add all problems of a tree to ``problems``; return the job, or None if no job can be created.

    Rules between fields require a complete job. Therefore, invalid fields are replaced by their defaults, so
    that the rules can be checked as well and all problems are reported together.
    """
    job: Job | None
    try:
        job = Job.model_validate(tree)
    except ValidationError as error:
        problems.extend(map(with_argument_hint, explain(error, Job)))
        job = _without_bad_fields(tree, error)
    if job is not None:
        wrong = [problem.path for problem in problems]
        problems.extend(found for found in broken_rules(job) if _concerns_valid_fields(found, wrong))
    return job


def _concerns_valid_fields(found: Problem, wrong_paths: Iterable[str]) -> bool:
    """Return whether a problem concerns valid fields only, and not defaults in place of invalid fields."""
    return not any(
        found.path.startswith(path) or re.search(rf"(?<![\w.]){re.escape(path)}(?!\w)", found.message)
        for path in wrong_paths
    )


def _without_bad_fields(tree: Tree, error: ValidationError) -> Job | None:
    pruned = deepcopy(tree)
    for details in error.errors(include_url=False):
        location = field_path(details["loc"])
        _drop(pruned, location[:-1] if details["type"] == "missing" else location)
    stand_ins = {"name": "unnamed", "task": EXAMPLE_TASK}
    try:
        return Job.model_validate({**stand_ins, **pruned})
    except ValidationError:
        return None


def _drop(tree: Tree, location: tuple[str | int, ...]) -> None:
    """Remove the entry at a location; for an entry of a list, remove the list."""
    node: object = tree
    for depth, part in enumerate(location):
        if not isinstance(node, dict) or part not in node:
            return
        if depth == len(location) - 1 or not isinstance(node[part], dict):
            del node[part]
            return
        node = node[part]


def dump_job(job: Job) -> str:
    """Return the resolved job as JSON, which ranks load.

    It has no sections of launchers of other packages that the job does not set: where the ranks run, these
    packages may be missing.
    """
    unset = {
        section
        for section, launcher, _ in launcher_sections()
        if launcher not in LAUNCHERS.builtin and section not in job.launch.model_fields_set
    }
    return job.model_dump_json(indent=2, exclude={"launch": unset}) + "\n"


TASKS_FOLDER = Path(__file__).parent.parent / "tasks"


def job_file(name: str) -> Path:
    """Return the file of a job, given its path or the name of a shipped task.

    Raises:
        UserError: Neither exists, or the path is that of a script.
    """
    refuse_script(name)
    path = Path(name)
    shipped = {file.stem: file for file in sorted(TASKS_FOLDER.glob("*.yaml"))}
    if path.is_file():
        return path
    if name in shipped:
        return shipped[name]
    near = [*shipped, *(file.name for file in Path().glob("*.yaml"))]
    raise UserError(
        f"no job {name!r}: neither a file nor a shipped task ({', '.join(shipped)})",
        hint=did_you_mean(name, near),
    )


def refuse_script(name: str) -> None:
    """Raise ``UserError`` if a job is named by the path of a Python script."""
    if name.endswith(".py"):
        raise UserError(f"{name} is a script, not a job", hint=f"run it with --script {name} -- ARGS")
