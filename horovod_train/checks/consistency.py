"""Whether hosts, or ranks, are alike: their environments and their clocks. Compared here and nowhere else."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

CLOCK_HINT = "synchronize the clocks (chrony, systemd-timesyncd), or raise health.max_clock_offset_s"


@dataclass(frozen=True)
class Mismatch:
    """Not all have the same.

    Attributes:
        lines: What differs, and who has which value.
        outliers: Holders of a value that differs from most; of clocks, the one furthest off.
        is_known: Whether most have the same, and so who is to change is known.
    """

    lines: tuple[str, ...]
    outliers: tuple[str, ...]
    is_known: bool = True


def fingerprint_mismatch(
    fingerprints: Mapping[str, Mapping[str, str]], named: Callable[[Sequence[str]], str] = ", ".join
) -> Mismatch | None:
    """Return in what environments differ; None: in nothing.

    Args:
        fingerprints: Of each host or rank, by its name.
        named: How some of them are called in a sentence.

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
    """Return the hosts whose clocks differ by more than the limit; None: no such hosts.

    Args:
        times_s: What clocks say at the same moment, by whose they are, in seconds.
        max_offset_s: The largest difference allowed between two of them.
        apart_s: The moments may be so far apart, in seconds.
        named: How the owner of a clock is called in a sentence.

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
