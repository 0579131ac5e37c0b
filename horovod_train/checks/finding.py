"""A finding: one line of a report, with what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of a report.

    Attributes:
        host: The host; empty: all of them, or this one if it is the only one.
        what: The subject of the check.
        found: The result.
        level: ok, warn, or fail: a job will not run.
        fix: What to do, unless it is ok.
    """

    host: str
    what: str
    found: str
    level: Level = "ok"
    fix: str = ""

    def __str__(self) -> str:
        return self.line()

    def line(self, *, with_host: bool = True) -> str:
        """Return the finding as text, and its fix in a second line."""
        fix = f"\n       fix: {self.fix}" if self.fix and self.level != "ok" else ""
        host = f"{self.host or 'all':<16} " if with_host else ""
        return f"{self.level:<4} {host}{self.what:<14} {self.found}{fix}"

    def as_json(self) -> dict[str, str]:
        """Return the finding as plain JSON."""
        return asdict(self)


def prevents_jobs(findings: Sequence[Finding]) -> bool:
    """Return whether any finding prevents jobs from running."""
    return any(finding.level == "fail" for finding in findings)


def report(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the lines of a report, and a summary."""
    yield from map(str, findings)
    failed = sum(finding.level == "fail" for finding in findings)
    num_warnings = sum(finding.level == "warn" for finding in findings)
    yield f"{len(findings)} findings: {failed} prevent jobs from running, {num_warnings} are warnings"
