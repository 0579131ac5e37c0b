"""Evidence that a policy on some number of ranks is worse than the base of a study.

Each row has the same seeds as the base, so that differences are paired. Two things may be wrong with a row:

    the mean    of the differences is above 0 (one-sided t-test), or
    one seed    is outside of what the seeds of the base let expect (prediction interval), as if training
                has diverged. It raises the variance of its own row, and so hides from a test of the mean.

Both are tested for the metric and for the loss. With ``m`` rows there are ``4 m`` tests, each at the level
``LEVEL / 4 m`` (Bonferroni): a study without a difference reports one with a probability of at most
``LEVEL``. Few seeds say little about a variance: it is taken to be the median of the rows; for the mean, that
of the row if it is larger; for one seed, without that of its row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance

LEVEL = 0.05
RESOLUTION = 1e-3
"""Smallest standard deviation, relative to the value of the base: evaluations have few samples, too."""
MEDIAN_EFFICIENCY = 2 / math.pi
"""Fraction of the samples whose mean is as exact as the median of all of them."""

Values = Mapping[int, float]
"""Value of a measure by seed; larger is worse."""


@dataclass(frozen=True)
class Evidence:
    """Why a row is worse.

    Attributes:
        seed: Seed that is far worse than those of the base; None: the mean is worse.
        value: Value of that seed, or mean of the row.
        is_loss: Whether the loss is worse, and not the metric.
    """

    seed: int | None
    value: float
    is_loss: bool


def evidence(
    base: Values, rows: Sequence[Values], num_measures: int, *, is_loss: bool
) -> list[Evidence | None]:
    """Return for each row the evidence that it is worse than the base; None: there is none.

    Args:
        base: The base; at least two seeds.
        rows: Rows with at least two seeds of the base.
        num_measures: Number of measures of the study.
        is_loss: Whether the measure is the loss.
    """
    level = LEVEL / (2 * num_measures * max(1, len(rows)))
    return [_of_row(base, rows, number, level, is_loss=is_loss) for number in range(len(rows))]


def _of_row(
    base: Values, rows: Sequence[Values], number: int, level: float, *, is_loss: bool
) -> Evidence | None:
    row, center = rows[number], fmean(base.values())
    floor = (RESOLUTION * abs(center)) ** 2
    seed, worst = max(row.items(), key=lambda each: each[1])
    if not math.isfinite(worst):
        return Evidence(seed, worst, is_loss)
    differences = [[each[seed] - base[seed] for seed in each.keys() & base.keys()] for each in rows]
    own, typical = differences[number], _typical(differences)
    deviation = math.sqrt(max(variance(own), typical.variance, floor) / len(own))
    if upper_tail(_ratio(fmean(own), deviation), typical.dof) < level:
        return Evidence(None, fmean(row.values()), is_loss)
    others = _typical([list(each.values()) for each in (base, *rows[:number], *rows[number + 1 :])])
    deviation = math.sqrt(max(others.variance, floor) * (1 + 1 / len(base)))
    if len(row) * upper_tail(_ratio(worst - center, deviation), others.dof) < level:
        return Evidence(seed, worst, is_loss)
    return None


def _ratio(difference: float, deviation: float) -> float:
    """Return Student's t; without any deviation, each difference is certain."""
    return difference / deviation if deviation else math.inf * difference if difference else 0.0


@dataclass(frozen=True)
class _Variance:
    variance: float
    dof: int


def _typical(samples: Sequence[Sequence[float]]) -> _Variance:
    """Return the typical variance of samples with at least two finite values each.

    The median of a chi-squared variable with ``v`` degrees of freedom is about ``v (1 - 2 / 9v)^3`` (Wilson
    and Hilferty, 1931).
    """
    finite = [each for each in samples if all(map(math.isfinite, each))]
    if not finite:
        return _Variance(0.0, 1)
    dof = min(map(len, finite)) - 1
    typical = median(map(variance, finite)) / (1 - 2 / (9 * dof)) ** 3
    return _Variance(typical, max(dof, round(MEDIAN_EFFICIENCY * dof * len(finite))))


def upper_tail(t: float, dof: int) -> float:
    """Return the probability that Student's t is larger (Abramowitz and Stegun, 26.7.3 and 26.7.4).

    >>> round(upper_tail(6.314, 1), 3), round(upper_tail(2.132, 4), 3), round(upper_tail(-1.812, 10), 3)
    (0.05, 0.05, 0.95)
    """
    if t < 0:
        return 1 - upper_tail(-t, dof)
    angle = math.atan(t / math.sqrt(dof))
    parity = dof % 2
    term = math.cos(angle) if parity else 1.0
    total = term if dof > 1 else 0.0
    for number in range(3 if parity else 2, dof - 1, 2):
        term *= (number - 1) / number * math.cos(angle) ** 2
        total += term
    total *= math.sin(angle)
    inside = 2 / math.pi * (angle + total) if parity else total
    return max(0.0, 1 - inside) / 2
