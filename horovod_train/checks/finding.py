"""Findings of checks, and their report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        host: The checked host; empty: all hosts, or this machine.
        what: Subject of the check.
        found: Result of the check.
        level: ok, warn, or fail. With fail, jobs cannot run.
        fix: Recommended action; printed unless the level is ok.
    """

    host: str
    what: str
    found: str
    level: Level = "ok"
    fix: str = ""

    def __str__(self) -> str:
        return self.line()

    def line(self, *, with_host: bool = True) -> str:
        """Return the finding as text, with its fix on a second line."""
        fix = f"\n       fix: {self.fix}" if self.fix and self.level != "ok" else ""
        host = f"{self.host or 'all':<16} " if with_host else ""
        return f"{self.level:<4} {host}{self.what:<14} {self.found}{fix}"

    def as_json(self) -> dict[str, str]:
        """Return the finding as a JSON object."""
        return asdict(self)


def prevents_jobs(findings: Sequence[Finding]) -> bool:
    """Return whether any finding prevents jobs from running."""
    return any(finding.level == "fail" for finding in findings)


def report(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield the findings as text, then a summary."""
    yield from map(str, findings)
    failed = sum(finding.level == "fail" for finding in findings)
    num_warnings = sum(finding.level == "warn" for finding in findings)
    yield f"{len(findings)} findings: {failed} prevent jobs from running, {num_warnings} are warnings"
