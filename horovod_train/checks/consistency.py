"""Comparison of environments and clocks between hosts, or between ranks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

CLOCK_HINT = "synchronize the clocks (chrony, systemd-timesyncd), or raise health.max_clock_offset_s"


@dataclass(frozen=True)
class Mismatch:
    """Difference between hosts or ranks.

    Attributes:
        lines: For each property that differs, its values and the hosts or ranks with each value.
        outliers: Hosts or ranks with another value than the most frequent one; for clocks, the one furthest
            from the median.
        is_known: Whether the outliers deviate from a majority; otherwise any side may be the wrong one.
    """

    lines: tuple[str, ...]
    outliers: tuple[str, ...]
    is_known: bool = True


def fingerprint_mismatch(
    fingerprints: Mapping[str, Mapping[str, str]], named: Callable[[Sequence[str]], str] = ", ".join
) -> Mismatch | None:
    """Return the differences between fingerprints of hosts or ranks, or None; ``named`` formats their names.

    >>> fingerprint_mismatch({"a": {"torch": "2"}, "b": {"torch": "3"}, "c": {"torch": "2"}})
    Mismatch(lines=('torch: 2 on a, c; 3 on b',), outliers=('b',), is_known=True)
    """
    lines: list[str] = []
    outliers: set[str] = set()
    is_known = True
    for what in dict.fromkeys(what for each in fingerprints.values() for what in each):
        holders: dict[str, list[str]] = {}
        for who, each in fingerprints.items():
            holders.setdefault(each.get(what, "missing"), []).append(who)
        if len(holders) == 1:
            continue
        usual = max(holders.values(), key=len)
        is_known = is_known and 2 * len(usual) > len(fingerprints)
        outliers.update(who for some in holders.values() if some is not usual for who in some)
        lines.append(f"{what}: " + "; ".join(f"{value} on {named(who)}" for value, who in holders.items()))
    return Mismatch(tuple(lines), tuple(sorted(outliers)), is_known) if lines else None


def clock_mismatch(
    times_s: Mapping[str, float],
    max_offset_s: float,
    apart_s: float = 0.0,
    named: Callable[[str], str] = str,
) -> Mismatch | None:
    """Return a mismatch if two clocks differ by more than the limit, or None.

    Args:
        times_s: Time of each clock at the same moment, by name of the host or rank, in seconds.
        max_offset_s: Maximum difference between two clocks, in seconds.
        apart_s: Maximum time between the moments at which the clocks were read, in seconds.
        named: Formats a name for a message.

    >>> clock_mismatch({"a": 10.0, "b": 3.0, "c": 10.5}, 5.0).lines
    ('the clock of c is 7.5 s ahead of that of b; 5 s are allowed',)
    """
    latest = max(times_s, key=lambda who: times_s[who])
    earliest = min(times_s, key=lambda who: times_s[who])
    offset_s = times_s[latest] - times_s[earliest]
    if offset_s <= max_offset_s + apart_s:
        return None
    usual_s = statistics.median(times_s.values())
    outliers = max((latest, earliest), key=lambda who: abs(times_s[who] - usual_s))
    line = (
        f"the clock of {named(latest)} is {offset_s:.1f} s ahead of that of {named(earliest)}; "
        f"{max_offset_s:g} s are allowed"
    )
    return Mismatch((line,), (outliers,), is_known=len(times_s) > 2)
