"""Declaration of metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

RANK_LABELS = ("training_job", "run", "rank", "local_rank", "host")
"""Labels of a rank's series. The label ``job`` is not used, because Prometheus sets it to the scrape job."""

JOB_LABELS = ("training_job", "run")
"""Labels of the series of a job."""


@dataclass(frozen=True)
class Metric:
    """Metric.

    Attributes:
        name: Name in Prometheus, with the base unit.
        kind: A counter is incremented by the value, a gauge is set to it, and a histogram observes it. A
            clock is a gauge whose value is a function that is called on each scrape.
        help: Help text, one sentence.
        question: Question of a user that the metric answers.
        source: Class of the records from which it is computed.
        value: Returns the value from a record; with ``label``, a mapping from label value to value; None: no
            update.
        label: Additional label; None: only those of the rank.
        buckets_s: Upper bounds of a histogram, in seconds.
        from_zero: Whether a counter is exported as zero before the first record. False: it may be unknown.
        shown: Title on the job's dashboard and on the page, for numbers of a step that are equal on all
            ranks; empty: it has its own panel, or none.
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
        """Type in Prometheus."""
        return "gauge" if self.kind == "clock" else self.kind


@dataclass(frozen=True)
class StepNumber:
    """``Metric.value`` that returns a number of a step, by its name in ``StepRecord.numbers``."""

    name: str

    def __call__(self, step: Any) -> float | None:
        """Return the number of a step; None: it was not computed."""
        found: float | None = step.numbers.get(self.name)
        return found


def as_markdown(metrics: Iterable[Metric]) -> str:
    """Return a Markdown table of metrics for the documentation."""
    rows = ["| metric | type | meaning | answers |", "|---|---|---|---|"]
    for metric in metrics:
        by = f" by {metric.label}" if metric.label else ""
        rows.append(f"| `{metric.name}`{by} | {metric.prometheus_type} | {metric.help} | {metric.question} |")
    return "\n".join(rows)
