"""Errors that this package raises, with their exit codes.

    HorovodTrainError        1
    |-- UserError            2   ConfigError, DeviceMemoryError, KeyUsedError, UnknownNameError
    |-- OperationalError     1   EngineError, LaunchError (LostError, LauncherTimeoutError), WorldError,
    |                            CheckpointError, DesyncError, NcclError, GpuError, PeerError, ServerError
    |-- JobFailedError      that of the job
    |-- KernelError          1
    |-- NumericError         3
    `-- PreemptedError      75

The message of an error states the problem and the allowed values; ``hint`` states the action for the user.
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
        message: The problem, and the allowed values.
        hint: Action for the user, one sentence.
    """

    exit_code = 1
    cause = "other"
    """Kind of the failure, a label value of metrics."""
    lost_ranks: Sequence[int] = ()
    """Ranks that were killed, frozen or missing from a collective; not ranks that failed as a consequence."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class UserError(HorovodTrainError):
    """An error in the user's input, such as a job file, a task or a flag; exit code 2."""

    exit_code = 2
    cause = "configuration"


@dataclass(frozen=True)
class Problem:
    """One problem of a job description.

    Attributes:
        path: Dotted path of the field, such as ``train.epochs``.
        found: The value as written, already shortened for printing; empty: the field is not set.
        message: The problem, and the allowed values.
        hint: Action for the user; may be empty.
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
    """All problems of one job description."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *map(str, problems)]))
        self.problems = tuple(problems)


class UnknownNameError(UserError):
    """A name that is in no table; the hint suggests the closest known name."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        super().__init__(
            f"unknown {kind} {name!r}; known: {', '.join(known)}", hint=did_you_mean(name, known)
        )


class KeyUsedError(UserError):
    """An idempotency key that was used for another job."""


class DeviceMemoryError(UserError):
    """A step needs more memory than is available on the GPU, or to the process."""

    cause = "out_of_memory"


class OperationalError(HorovodTrainError):
    """A failure of the machine, the network or another process; exit code 1."""


class EngineError(OperationalError):
    """Horovod cannot be built, found or started."""

    cause = "engine"


class LaunchError(OperationalError):
    """The ranks could not be started, or failed.

    Attributes:
        hosts: The failed hosts; empty: unknown, or none.
        step: Number of steps that were done; None: unknown.
        has_saved: Whether the ranks wrote a checkpoint after they were started.
        was_stopped: A signal to the launcher has ended the job.
        was_before_start: No rank was started: hosts, or their environments, cannot be used.
        failure: Message of the rank that has failed, without rank and host; empty: there is none.
    """

    hosts: Sequence[str] = ()
    step: int | None = None
    has_saved = False
    was_stopped = False
    was_before_start = False
    failure = ""


class ServerError(OperationalError):
    """A server of ``horovod-train serve`` does not respond, or has failed."""


class LauncherTimeoutError(LaunchError):
    """The system of a launcher did not answer in time: the request may have been carried out."""


class JobFailedError(OperationalError):
    """A job that was waited for did not succeed.

    Attributes:
        status: Final status of the job (``launch/base.py:JobStatus``).
    """

    def __init__(self, message: str, status: object, exit_code: int) -> None:
        super().__init__(message)
        self.status = status
        self.exit_code = exit_code


class LostError(LaunchError):
    """Hosts or ranks were lost, or did not join. The job is not the cause, and may run on other hosts.

    Args:
        message: The problem.
        hint: Action for the user.
        hosts: The failed hosts; empty: unknown.
    """

    cause = "lost"

    def __init__(self, message: str, *, hint: str = "", hosts: Sequence[str] = ()) -> None:
        super().__init__(message, hint=hint)
        self.hosts = tuple(hosts)


class WorldError(OperationalError):
    """The ranks differ from the requested ranks, or from each other."""

    cause = "world"


class CheckpointError(OperationalError):
    """A checkpoint cannot be written, found or verified."""

    cause = "checkpoint"


class DesyncError(OperationalError):
    """Ranks no longer have the same state."""

    cause = "replicas_differ"


class NcclError(OperationalError):
    """NCCL reports that GPUs cannot exchange data."""

    cause = "nccl"


class GpuError(OperationalError):
    """A GPU, its driver or a kernel has failed; the process can no longer use the GPU."""

    cause = "gpu"


class KernelError(HorovodTrainError):
    """The task passed invalid input to a GPU kernel; the process can no longer use the GPU."""

    cause = "task"


class PeerError(OperationalError):
    """Another rank failed first; the error of this rank is a consequence."""

    cause = "lost"


class NumericError(HorovodTrainError):
    """A loss or gradient is not a finite number; exit code 3."""

    exit_code = 3
    cause = "not_finite"


class PreemptedError(HorovodTrainError):
    """The ranks were preempted and exited after saving; exit code 75 (EX_TEMPFAIL of sysexits.h)."""

    exit_code = 75
    stopped_by: int | None = None
    """Signal that the launcher received; None: a rank was preempted."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint with the known name closest to ``name``, or an empty string.

    >>> did_you_mean("epcohs", ["epochs", "seed"])
    "did you mean 'epochs'?"
    """
    near = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else ""


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks as text for a message, with consecutive ranks as ranges.

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
    """Replace an exception of the block by an error of this package.

    Args:
        translate: Function that returns the error for an exception; None: the exception is not replaced.
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
    """Call a function that may raise any exception, such as a user's; return its result, or the exception."""
    try:
        return call(), None
    except Exception as error:  # noqa: BLE001
        return None, error
