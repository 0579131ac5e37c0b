"""How often a test session starts ranks. That is what takes its time, and so there is a budget for it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

# What `make test` starts, and a few more: who needs more of them should first look for a cheaper way
# (CONTRIBUTING.md, "Tests"). `make campaign` and `make image` have no budget.
MAX_LAUNCHES = 232
END = "END_OF_SLICE"
"""Environment variable with the time, in seconds since 1970, after which no test of a slice begins."""
# Options with which the programs only say something.
NO_RANKS = {"--dry-run", "--help", "--version", "--check-build"}


class Launches:
    """Counts launches, by the program that starts the ranks.

    Attributes:
        counts: Those that reports of tests have told of.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._heard: Counter[str] = Counter()
        sys.addaudithook(self._hear)

    def heard(self) -> dict[str, int]:
        """Return what this process has launched since it was last asked."""
        heard, self._heard = self._heard, Counter()
        return dict(heard)

    def _hear(self, event: str, arguments: tuple) -> None:
        if event == "subprocess.Popen" and (program := launcher_in(arguments[1])):
            self._heard[program] += 1

    def __str__(self) -> str:
        each = ", ".join(f"{count} by {program}" for program, count in self.counts.most_common())
        return f"{self.counts.total()} launches ({each or 'none'}), at most {MAX_LAUNCHES} are allowed"


def launcher_in(command: str | Sequence[object]) -> str | None:
    """Return the program of a command that starts ranks; None: it starts none.

    >>> launcher_in(["nice", "/venv/bin/horovod-train", "run", "job.yaml"])
    'horovod-train'
    >>> launcher_in(["horovod-train", "run", "job.yaml", "--dry-run"])
    >>> launcher_in(["mpirun", "--version"])
    """
    words = [Path(str(word)).name for word in ([command] if isinstance(command, str | Path) else command)]
    if NO_RANKS.intersection(words):
        return None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word in ("horovodrun", "mpirun", "srun") or (word == "horovod-train" and following == "run"):
            return word
    return None
