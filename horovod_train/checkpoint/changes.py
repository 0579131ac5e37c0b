"""Changes of the job and the environment since a checkpoint was written: reported, but not an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import ValidationError

from horovod_train.config.schema import Job

# Fields of a job that do not determine results: names, and how ranks are launched and supervised. Another
# strategy trains the same weights.
NOT_COMPARED = {
    *("name", "run_dir", "run_dir_access"),
    *("strategy", "checkpoint", "metrics", "health", "launch"),
}
MAX_SHOWN_CHARS = 120


def document_changes(before: object, now: object, path: str = "") -> Iterator[str]:
    """Yield a line for each value that differs between two JSON documents.

    >>> list(document_changes({"lr": {"base": 1}, "seed": 0}, {"lr": {"base": 2}, "seed": 0}))
    ['lr.base: 1 -> 2']
    """
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            yield from document_changes(before.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif before != now:
        yield f"{path}: {_shown(before)} -> {_shown(now)}"


def job_changes(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return a line for each difference between two resolved jobs that affects results."""
    old = _migrated(before)
    names = [name for name in Job.model_fields if name not in NOT_COMPARED]
    return [line for name in names for line in document_changes(old.get(name), now.get(name), name)]


def _migrated(job: Mapping[str, object]) -> Mapping[str, object]:
    """Return a stored job with defaults for fields that were added later."""
    try:
        return Job.model_validate(dict(job)).model_dump(mode="json")
    except ValidationError:
        return job


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."
