"""Meaning of each signal.

    signal      to `horovod-train run`, or its batch scripts           to a rank
    SIGUSR1     request ranks to save and exit, wait without limit     save and exit, with all ranks
    SIGUSR2     as SIGUSR1                                             ignored
    SIGTERM     request it, kill the remaining ranks after the grace   save and exit, with all ranks
    SIGINT      as SIGTERM                                             exit at once with code 130
    SIGHUP      as SIGTERM                                             (default action)

Grid Engine sends SIGUSR2 to all processes of a job, and SIGKILL later.

After one of the last three, SIGTERM or SIGINT kills all ranks at once. A second SIGHUP has no effect, because
a closed terminal sends two.

The request to ranks is SIGUSR1: launchers forward or ignore it, whereas SIGTERM makes launchers kill their
ranks. Loader processes of a rank block SIGTERM and end with their rank. SIGINT and SIGHUP remain ignored if
they are ignored at the start, as set by `nohup` and by shells that start a program in the background.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Literal

DRAIN_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""To a launcher process: request ranks to save and exit, and wait without limit."""

TIMED_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""To a launcher process: request ranks to save and exit, and kill the remaining ranks after the grace."""

LAUNCH_SIGNALS = (*DRAIN_SIGNALS, *TIMED_STOP_SIGNALS)
"""Signals that end a run."""

KILLS_AT_ONCE = frozenset({signal.SIGTERM, signal.SIGINT})
"""To a launcher process after one of ``TIMED_STOP_SIGNALS``: kill all ranks at once."""

STAY_IGNORED = frozenset({signal.SIGINT, signal.SIGHUP})
"""Signals without a handler if they are ignored when the program starts."""

PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""To a rank: save and exit."""

SIGNAL_TO_RANKS = signal.SIGUSR1
"""The launcher's request to ranks."""

SENT_TO_END: Mapping[Literal["drain", "stop", "kill"], tuple[signal.Signals, ...]] = {
    "drain": (signal.SIGUSR2, signal.SIGCONT),  # SIGUSR1 is Slurm's warning of the time limit: it requeues
    "stop": (signal.SIGTERM, signal.SIGCONT),
    "kill": (signal.SIGTERM, signal.SIGTERM, signal.SIGCONT),
}
"""Signals that `horovod-train drain` and `cancel` send to the launcher process of a job, in order.

SIGCONT is required because a stopped process (Ctrl-Z) handles signals only after it continues.
"""


@contextmanager
def kept(numbers: Collection[int]) -> Iterator[None]:
    """Keep signals and their Python handlers from a library that initializes during the block.

    Its threads do not receive the signals, which would interrupt their system calls. Handlers that it
    installs are replaced: MPICH takes SIGUSR1 as the failure of a process, and then fails under Slurm.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        if current_thread() is main_thread():  # only it may set handlers
            for number in numbers:
                if (handler := signal.getsignal(number)) is not None:
                    signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def exit_code_of(number: int) -> int:
    """Return the exit code of a process that was ended by a signal, as shells define it."""
    return 128 + number
