"""Runs the campaign, or a slice of it, and records what has passed: `make campaign`, `make slice`.

    python -m tests.campaign [--all | --passed | PATH ...]

A slice is an eighth of the campaign: what has not passed for the longest time. tests/campaign.json says when
that was. It is committed after each run, and so the next commit has another slice. --passed, in CI, leaves
out tests that have never passed: they are first run by hand, within twelve runs. PATHs run tests of files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.budget import END

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "campaign.json"
NUM_SLICES = 8
MAX_AGE = 12
"""A test that has passed in none of so many runs is red."""
MAX_COMMITS = 120
"""A record whose last run is further back is kept by nobody, and red."""
GUESS_S = 10.0
"""What a test takes that has never passed."""
LIMIT_S = 25 * 60
"""No test of a slice begins later: on a slow machine, the rest is left to the next slice."""


@dataclass
class Record:
    """What the file says.

    Attributes:
        runs: Commit and day of each, the first one first; their numbers begin at 1.
        tests: Of each test ``passed``, the number of the last run in which it did, and ``seconds``; or
            ``seen``, the number of the run before it was there.
    """

    runs: list[dict[str, str]] = field(default_factory=list)
    tests: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Record:
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def write(self, path: Path) -> None:
        """Write a line for each run and each test: git merges lines."""
        runs = ",\n".join(json.dumps(run) for run in self.runs)
        tests = ",\n".join(
            f"{json.dumps(test)}: {json.dumps(self.tests[test])}" for test in sorted(self.tests)
        )
        path.write_text(f'{{"runs": [\n{runs}\n],\n"tests": {{\n{tests}\n}}}}\n')

    def update(self, there: list[str]) -> None:
        """Note tests that are new, and forget those that are no more."""
        self.tests = {test: self.tests.get(test, {"seen": len(self.runs)}) for test in there}

    def slice(self, *, only_passed: bool = False) -> list[str]:
        """Return what has not passed for the longest time, up to an eighth of the time of all tests."""
        seconds = {test: entry.get("seconds", GUESS_S) for test, entry in self.tests.items()}
        left_s = sum(seconds.values()) / NUM_SLICES
        chosen = []
        for test in sorted(self.tests, key=lambda test: self.tests[test].get("passed", 0)):
            if left_s > 0 and not (only_passed and "passed" not in self.tests[test]):
                chosen.append(test)
                left_s -= seconds[test]
        return chosen

    def is_kept(self) -> bool:
        """Say whether the last run was not long ago."""
        return (
            not self.runs
            or int(git("rev-list", "--count", f"{self.runs[-1]['commit']}..HEAD")) <= MAX_COMMITS
        )

    def too_old(self) -> list[str]:
        oldest = len(self.runs) - MAX_AGE
        return [
            test for test, entry in self.tests.items() if entry.get("passed", entry.get("seen", 0)) < oldest
        ]

    def add(self, commit: str, passed: dict[str, float]) -> None:
        """Note a run: the tests that passed, with their seconds."""
        self.runs.append({"commit": commit, "day": f"{datetime.now(UTC):%Y-%m-%d}"})
        for test, seconds in passed.items():
            self.tests[test] = {"passed": len(self.runs), "seconds": round(seconds, 1)}


class Collected:
    """Hears which tests the campaign has."""

    def __init__(self) -> None:
        self.tests: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.tests = [item.nodeid for item in session.items]


class Passed:
    """Hears which tests pass, and how long each took."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.not_passed: set[str] = set()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.not_passed.add(report.nodeid)
        if report.failed:  # at once: a campaign takes long, and may be interrupted
            print(f"\nFAILED {report.nodeid}\n{report.longreprtext}", flush=True)

    def tests(self) -> dict[str, float]:
        return {test: seconds for test, seconds in self.seconds.items() if test not in self.not_passed}


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def main(arguments: list[str]) -> int:
    if changed := git("status", "--porcelain", "--", ".", f":!tests/{RECORD.name}"):
        print(f"error: the record names a commit, and these files are not committed:\n{changed}")
        return 2
    commit = git("rev-parse", "--short=10", "HEAD")
    collected, passed = Collected(), Passed()
    if code := pytest.main(["-m", "campaign", "--collect-only", "-qqq", "--no-summary"], [collected]):
        return int(code)
    record = Record.read(RECORD)
    is_kept = record.is_kept()
    record.update(collected.tests)
    chosen = collected.tests
    if paths := tuple(each for each in arguments if not each.startswith("--")):
        chosen = [test for test in collected.tests if test.startswith(paths)]
    elif "--all" not in arguments:
        chosen = record.slice(only_passed="--passed" in arguments)
        os.environ[END] = str(time.time() + LIMIT_S)
    print(f"{len(chosen)} of {len(collected.tests)} tests of the campaign", flush=True)
    if not chosen:
        return int(not is_kept)
    code = pytest.main(
        ["-n", "2", "-m", "campaign", *(chosen if chosen != collected.tests else [])], [passed]
    )
    record.add(commit, passed.tests())
    record.write(RECORD)
    print(f"tests/{RECORD.name} has this run: commit it")
    if old := record.too_old():
        print(f"error: {len(old)} tests have passed in none of the last {MAX_AGE} runs:", *old, sep="\n  ")
    if not is_kept:
        print(f"error: the last recorded run was more than {MAX_COMMITS} commits ago: commit it each time")
    return int(code) or bool(old) or not is_kept


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
