"""What a metric is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

RANK_LABELS = ("training_job", "run", "rank", "local_rank", "host")
"""Labels of what a rank serves. Not ``job``: that is Prometheus' own word for what it scrapes together."""

JOB_LABELS = ("training_job", "run")
"""Labels of what is known of a whole job."""


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: Name with its base unit, as Prometheus shows it.
        kind: A counter is increased by the value, a gauge set to it, a histogram given it; a clock is a
            gauge whose value is a function, asked at each scrape.
        help: What it means, one sentence.
        question: What a person asks whom it answers.
        source: The class that feeds it.
        value: What it takes of that; where it has a label, a mapping from the label to it; None: nothing.
        label: A label besides those of the rank; None: there is none.
        buckets_s: Upper bounds of a histogram, in seconds.
        from_zero: A counter is shown as zero before the first event. Not one that may stay unknown.
        shown: Title under which the job's dashboard and the page show it; empty: they show it by a panel of
            their own, or not. For numbers of a step that are equal on all ranks.
    """

    name: str
    kind: Literal["counter", "gauge", "clock", "histogram"]
    help: str
    question: str
    source: type
    value: Callable[..., Any]
    label: str | None = None
    buckets_s: tuple[float, ...] = ()
    from_zero: bool = True
    shown: str = ""

    @property
    def prometheus_type(self) -> str:
        """Its type as Prometheus knows it."""
        return "gauge" if self.kind == "clock" else self.kind


@dataclass(frozen=True)
class StepNumber:
    """Value of a metric that exports a number of a step.

    Attributes:
        name: Name of the number in ``StepRecord.numbers``.
    """

    name: str

    def __call__(self, step: Any) -> float | None:
        """Return the number; None: it was not computed in this step."""
        found: float | None = step.numbers.get(self.name)
        return found


def as_markdown(metrics: Iterable[Metric]) -> str:
    """Return a table of metrics for the documentation."""
    rows = ["| metric | type | meaning | answers |", "|---|---|---|---|"]
    for metric in metrics:
        by = f" by {metric.label}" if metric.label else ""
        rows.append(f"| `{metric.name}`{by} | {metric.prometheus_type} | {metric.help} | {metric.question} |")
    return "\n".join(rows)
