"""Every error this package raises on purpose, with the exit code it ends the process with.

    HorovodTrainError                 1
    |-- UserError                     2   the user can fix it: a job file, a task, a flag
    |   |-- ConfigError                   every problem of a job description at once
    |   |-- DeviceMemoryError             a step needs more memory than there is
    |   `-- UnknownNameError              a name that is in no table
    |-- OperationalError              1   the machine, the network, another process
    |   |-- EngineError                   Horovod cannot be built, found or started
    |   |-- LaunchError                   ranks could not be started or did not end well
    |   |-- WorldError                    the ranks found are not the ranks asked for
    |   |-- CheckpointError               a checkpoint cannot be written, found or trusted
    |   |-- DesyncError                   ranks no longer hold the same state
    |   |-- NcclError                     GPUs cannot exchange data
    |   |-- GpuError                      a GPU, or its driver, has failed
    |   `-- PeerError                     another rank failed first: a consequence, never a cause
    |-- KernelError                   1   the task's code, seen on a GPU
    |-- NumericError                  3   the numbers went wrong: NaN, infinity
    `-- PreemptedError               75   preempted, and all is saved: start again to continue

An error says what was found, what is allowed and what to do: the first two in the message, the
third in ``hint``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

Result = TypeVar("Result")


class HorovodTrainError(Exception):
    """Base of all errors of this package.

    Args:
        message: What was found, and what was expected instead.
        hint: What to do about it, one sentence.
    """

    exit_code = 1
    cause = "other"
    """What kind of failure it is, one of a few words: a label of metrics."""
    lost_ranks: Sequence[int] = ()
    """Ranks that were killed, were frozen or missing from a collective; those that only noticed are not."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class UserError(HorovodTrainError):
    """Something the user wrote cannot work; exit code 2."""

    exit_code = 2
    cause = "configuration"


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a job description.

    Attributes:
        path: Dotted path of the field, such as ``train.epochs``.
        found: The value as written, already shortened for printing; empty when there is none.
        message: What is wrong and what is allowed.
        hint: What to do about it; may be empty.
    """

    path: str
    found: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        found = f" = {self.found}" if self.found else ""
        hint = f"\n      hint: {self.hint}" if self.hint else ""
        return f"  {self.path}{found}\n      {self.message}{hint}"


class ConfigError(UserError):
    """All the problems of one job description."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *map(str, problems)]))
        self.problems = tuple(problems)


class UnknownNameError(UserError):
    """A name that is in no table; names the nearest ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        super().__init__(
            f"unknown {kind} {name!r}; known: {', '.join(known)}", hint=did_you_mean(name, known)
        )


class DeviceMemoryError(UserError):
    """A step needs more memory than the GPU, or the process, has."""

    cause = "out_of_memory"


class OperationalError(HorovodTrainError):
    """The machine, the network or another process is at fault; exit code 1."""


class EngineError(OperationalError):
    """Horovod cannot be built, found or started."""

    cause = "engine"


class LaunchError(OperationalError):
    """The ranks could not be started, or ended without saying why."""


class LostError(LaunchError):
    """Hosts or ranks are gone, or never came, through no fault of the job: others may do.

    Args:
        message: What happened.
        hint: What to do about it.
        hosts: Hosts that cannot take part; empty: it is not known which.
    """

    cause = "lost"

    has_saved = False
    """Whether the ranks had written a checkpoint since they were started."""

    def __init__(self, message: str, *, hint: str = "", hosts: Sequence[str] = ()) -> None:
        super().__init__(message, hint=hint)
        self.hosts = tuple(hosts)


class WorldError(OperationalError):
    """The ranks found are not the ranks asked for."""

    cause = "world"


class CheckpointError(OperationalError):
    """A checkpoint cannot be written, found or trusted."""

    cause = "checkpoint"


class DesyncError(OperationalError):
    """Ranks no longer hold the same state."""

    cause = "replicas_differ"


class NcclError(OperationalError):
    """GPUs cannot exchange data: NCCL says so."""

    cause = "nccl"


class GpuError(OperationalError):
    """A GPU, its driver or a kernel on it has failed; the process cannot use it any more."""

    cause = "gpu"


class KernelError(HorovodTrainError):
    """The task has given a GPU what it cannot compute: the process cannot use the GPU any more."""

    cause = "task"


class PeerError(OperationalError):
    """Another rank failed first; this rank only notices it."""

    cause = "lost"


class NumericError(HorovodTrainError):
    """A loss or gradient is not a finite number; exit code 3."""

    exit_code = 3
    cause = "not_finite"


class PreemptedError(HorovodTrainError):
    """The ranks were preempted, saved and left; exit code 75 (EX_TEMPFAIL of sysexits.h)."""

    exit_code = 75
    stopped_by: int | None = None
    """The signal that the launcher received; None: a rank was preempted."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint naming the known name closest to ``name``, or an empty string.

    >>> did_you_mean("epcohs", ["epochs", "seed"])
    "did you mean 'epochs'?"
    """
    near = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else ""


def describe_ranks(ranks: Sequence[int]) -> str:
    """Name ranks for a message, runs shortened.

    >>> describe_ranks([0]), describe_ranks([1, 2, 3, 7])
    ('rank 0', 'ranks 1-3, 7')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"


@contextmanager
def translated(translate: Callable[[Exception], HorovodTrainError | None]) -> Iterator[None]:
    """Replace an exception of the block by one of ours.

    Args:
        translate: Returns our error for an exception that is not ours; None: the exception is not changed.
    """
    try:
        yield
    except HorovodTrainError:
        raise
    except Exception as error:
        ours = translate(error)
        if ours is None:
            raise
        raise ours from error


def result_of(call: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """Call code that may raise any exception, such as a user's; return its result, or the exception."""
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001
        return None, error
