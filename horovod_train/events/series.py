"""Values of steps and evaluations as series over steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from horovod_train.events.types import Evaluation, Event, Progress

Series = dict[str, list[tuple[int, float]]]
"""Values of each metric as (completed steps, value), in ascending order of steps."""


def series_of(events: Iterable[Event]) -> Series:
    """Return ``loss``, ``lr``, ``samples_per_s`` and further numbers of steps, and ``eval/<metric>``.

    After a return to a checkpoint, values of steps that were repeated are the new ones.
    """
    series: Series = {}
    step = 0
    for event in events:
        if isinstance(event, Progress):
            step = event.step
            known = {"loss": event.loss, "lr": event.lr, "samples_per_s": event.samples_per_s}
            _add(series, step, {**known, **event.numbers})
        elif isinstance(event, Evaluation):
            values = {f"eval/{name}": value for name, value in event.metrics.items()}
            _add(series, step if event.step is None else event.step, values)
    return series


def _add(series: Series, step: int, values: Mapping[str, float | None]) -> None:
    """Add values of a step; earlier values of the same or of later steps are replaced."""
    for name, value in values.items():
        if value is None:
            continue
        points = series.setdefault(name, [])
        while points and points[-1][0] >= step:
            points.pop()
        points.append((step, value))
