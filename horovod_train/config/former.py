"""Names of fields in previous versions, which are still read."""

from __future__ import annotations

from collections.abc import Callable, Mapping

RENAMED: Mapping[str, Mapping[str, str]] = {
    "lr": {"warmup_epochs": "warmup"},
    "train": {"compile_backend": "compile"},
    "train.batch_warmup": {"epochs": "length"},
    "evaluation": {"every_epochs": "every"},
}
"""Present names by former names, by section."""
CONVERTED: Mapping[tuple[str, str], Callable[[object], object]] = {
    ("train", "compile_backend"): lambda backend: None if backend is None else {"backend": backend},
}
"""Conversions of values whose form has changed."""
DECAY_ARGS: Mapping[str, tuple[str, object]] = {
    "milestones": ("milestones", []),
    "milestones_epochs": ("milestones", []),
    "gamma": ("gamma", 0.1),
    "points": ("points", []),
    "power": ("power", 1.0),
    "end_factor": ("end_factor", 0.0),
    "first_cycle": ("first_cycle", None),
    "restart_epochs": ("first_cycle", None),
    "restart_factor": ("restart_factor", 1.0),
    "cooldown_fraction": ("cooldown_fraction", 0.2),
    "cooldown_shape": ("cooldown_shape", "sqrt"),
    "rise_fraction": ("rise_fraction", 0.3),
    "start_factor": ("start_factor", 0.04),
    "plateau": ("", None),
}
"""Former fields of ``lr``: their names in ``lr.decay_args`` now, and their defaults, which are left out.

``lr.plateau`` was a section: its fields are arguments now.
"""
CHECKPOINTS = {"every_epochs": "epoch", "every_steps": "step"}
"""Former intervals of checkpoints, which are elements of ``checkpoint.every`` now, and their units."""


def with_present_names(section: str, values: object) -> object:
    """Return the values of a section with present names of fields.

    Raises:
        ValueError: The section has a field under both names.

    >>> with_present_names("lr", {"warmup_epochs": 5})
    {'warmup': 5}
    """
    if not isinstance(values, dict):
        return values
    found = dict(values)
    for old, new in RENAMED.get(section, {}).items():
        if old in found:
            value = found.pop(old)
            if new in found:
                raise ValueError(f"{old} is {new} now, and both are there: leave {old} out")
            found[new] = CONVERTED.get((section, old), _same)(value)
    if section == "lr":
        found = _with_decay_args(found)
    if section == "checkpoint" and (old_names := CHECKPOINTS.keys() & found.keys()):
        if "every" in found:
            raise ValueError(f"{min(old_names)} is every now, and both are there: leave {min(old_names)} out")
        epochs, steps = found.pop("every_epochs", 1), found.pop("every_steps", None)
        found["every"] = [*_interval(epochs, "epoch"), *_interval(steps, "step")]
    return found


def _with_decay_args(values: dict[str, object]) -> dict[str, object]:
    """Return the values of ``lr`` with arguments of the schedule in ``decay_args``."""
    former = [name for name in values if name in DECAY_ARGS]
    if not former or not isinstance(values.get("decay_args", {}), dict):
        return values
    args: dict[str, object] = dict(values.get("decay_args", {}))  # type: ignore[call-overload]
    for old in former:
        value, (new, default) = values[old], DECAY_ARGS[old]
        moved = {new: value} if new else value
        if value == default or not isinstance(moved, dict):
            continue
        if both := args.keys() & moved.keys():
            raise ValueError(f"{old} is decay_args.{min(both)} now, and both are there: leave {old} out")
        args.update(moved)
    return {**{name: value for name, value in values.items() if name not in DECAY_ARGS}, "decay_args": args}


def present_path(dotted: str) -> str:
    """Return the present path of a former argument of a schedule.

    >>> present_path("lr.end_factor"), present_path("lr.plateau.patience"), present_path("lr.plateau")
    ('lr.decay_args.end_factor', 'lr.decay_args.patience', 'lr.decay_args')
    """
    section, _, field = dotted.partition(".")
    old, _, rest = field.partition(".")
    if section != "lr" or old not in DECAY_ARGS:
        return dotted
    return ".".join(part for part in ("lr", "decay_args", DECAY_ARGS[old][0], rest) if part)


def set_field(values: dict[str, object], section: str, field: str, value: object) -> None:
    """Set a field of a section by its present or former name; it replaces the value under both names.

    >>> values = {"every": ["1 epoch", "9 steps"]}
    >>> set_field(values, "checkpoint", "every_steps", 5)
    >>> values
    {'every': ['1 epoch', '5 steps']}
    """
    names = RENAMED.get(section, {})
    if field in names:
        values.pop(field, None)
        values[names[field]] = CONVERTED.get((section, field), _same)(value)
        return
    if section == "checkpoint" and field in CHECKPOINTS and "every" in values:
        present = values["every"]
        listed = present if isinstance(present, list) else [] if present is None else [present]
        unit = CHECKPOINTS[field]
        kept = [each for each in listed if unit not in (each if isinstance(each, str) else f"{each} epoch")]
        values["every"] = [*kept, *_interval(value, unit)]
        return
    formers = [old for old, new in names.items() if new == field]
    for old in CHECKPOINTS if (section, field) == ("checkpoint", "every") else formers:
        values.pop(old, None)
    values[field] = value


def _interval(value: object, unit: str) -> list[object]:
    return [] if value is None else [value if unit == "epoch" else f"{value} {unit}s"]


def _same(value: object) -> object:
    return value
