"""What each signal means: the one table.

    signal         to `horovod-train run`, or its scripts              to a rank
    SIGUSR1        ask ranks to save and leave, wait for them         save and leave, with all ranks
    SIGUSR2        the same                                           (Python's default)
    SIGTERM        ask, and kill what is left after the grace         save and leave, with all ranks
    SIGINT         the same                                           end at once, exit code 130
    SIGHUP         the same                                           (Python's default)
    the second of the last three: kill at once (SIGHUP does not count: a closed terminal sends two)

A launch asks its ranks with SIGUSR1: launchers pass it on, or leave it alone, where SIGTERM makes them
kill. Loader processes of a rank block SIGTERM and end with their rank.

SIGINT and SIGHUP that are ignored when a program starts stay ignored: `nohup`, and shells that start a
program in the background, set them so.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Literal

PATIENT_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""To a launch: ask the ranks, and wait as long as it takes."""

HURRIED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""To a launch: ask the ranks, and kill when the grace is over."""

LAUNCH_SIGNALS = (*PATIENT_SIGNALS, *HURRIED_SIGNALS)
"""All that end a launch."""

KILLS_AT_ONCE = frozenset({signal.SIGTERM, signal.SIGINT})
"""Sent to a launch that already has a time limit."""

STAY_IGNORED = frozenset({signal.SIGINT, signal.SIGHUP})
"""Have no handler installed where they are ignored."""

PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""To a rank: save and leave."""

SIGNAL_TO_RANKS = signal.SIGUSR1
"""What a launch sends to its ranks."""

SENT_TO_END: Mapping[Literal["drain", "stop", "kill"], tuple[signal.Signals, ...]] = {
    "drain": (signal.SIGUSR1, signal.SIGCONT),
    "stop": (signal.SIGTERM, signal.SIGCONT),
    "kill": (signal.SIGTERM, signal.SIGTERM, signal.SIGCONT),
}
"""What `horovod-train drain` and `cancel` send to the process that carries out a job, in order.

One that is stopped (Ctrl-Z) acts on a signal when it is continued.
"""


def exit_code_of(number: int) -> int:
    """Return the exit code of a process that a signal has ended, as a shell has it."""
    return 128 + number
