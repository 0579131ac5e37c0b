"""Runs the trials of a study, one after another, and resumes where a study was interrupted.

A trial is submitted with an idempotency key. If the study is killed, the job of its current trial continues,
and the next start of the study finds it by the key. A trial whose ranks were killed resumes from its
checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count
from statistics import fmean
from time import monotonic

from horovod_train.client.handle import JobHandle
from horovod_train.client.local import LocalJob, start
from horovod_train.events.file import Record
from horovod_train.events.text import duration
from horovod_train.events.types import Failure
from horovod_train.study.results import Result, Study, result_of
from horovod_train.study.table import ranks_text
from horovod_train.study.trials import Trial

MAX_ATTEMPTS = 3
"""Starts of a trial in one call, if its launcher or ranks fail without an error of the job."""
OWN_ERRORS = {2, 3}
"""Exit codes of failures that would occur again: configuration, and values that are not finite."""


def run_trials(study: Study, trials: Iterable[Trial], report: Callable[[str], None]) -> None:
    """Run the trials that have no result, and save the study after each.

    Args:
        study: The study; results are added.
        trials: All trials of the study.
        report: Prints a line.
    """
    wanted = list(trials)
    left = [trial for trial in wanted if study.result_of(trial) is None]
    if len(left) < len(wanted):
        report(f"{len(wanted) - len(left)} of {len(wanted)} trials have results already")
    if left:
        report(f"{counted(len(left))} to train: {numbers_text(left)}")
    times_s: list[tuple[Trial, float]] = []
    for number, trial in enumerate(left, len(wanted) - len(left) + 1):
        begun_s = monotonic()
        result = run_trial(study, trial, report)
        study.results[trial.name] = result
        study.save()
        # A trial that an earlier call has trained, or begun, takes less time than another one.
        times_s.append((trial, max(monotonic() - begun_s, result.seconds or 0.0)))
        rest_s = time_left_s(times_s, left[len(times_s) :])
        found = "  ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
        report(
            f"[{number}/{len(wanted)}] {trial.policy}, {ranks_text(trial.num_ranks)}, seed {trial.seed}: "
            f"{result.problem or found}" + (f"; about {duration(rest_s)} left" if rest_s else "")
        )


def counted(num_trials: int) -> str:
    """Return a number of trials as text."""
    return "1 trial" if num_trials == 1 else f"{num_trials} trials"


def numbers_text(trials: list[Trial]) -> str:
    """Return how many trials have each number of ranks: ``3 on 1 rank, 6 on 8 ranks``."""
    counts = Counter(trial.num_ranks for trial in trials)
    return ", ".join(f"{counts[ranks]} on {ranks_text(ranks)}" for ranks in sorted(counts))


def time_left_s(times_s: list[tuple[Trial, float]], left: list[Trial]) -> float:
    """Return an estimate of the remaining time: the mean of trials on as many ranks, or of all trials."""
    total = 0.0
    for trial in left:
        alike = [seconds for other, seconds in times_s if other.num_ranks == trial.num_ranks]
        total += fmean(alike or [seconds for _, seconds in times_s])
    return total


def run_trial(study: Study, trial: Trial, report: Callable[[str], None]) -> Result:
    """Run a trial to its end, and return its result.

    Attempts of former calls are found by their keys, and are not started again.

    Raises:
        LaunchError: The launcher cannot start the job.
    """
    records: list[Record] = []
    num_started = 0
    for attempt in count(1):
        submitted, is_new = start(trial.job, f"study {study.id} {trial.name} {attempt} {trial.digest}")
        num_started += is_new
        handle = JobHandle(LocalJob(submitted))
        try:
            status = handle.wait()
        except KeyboardInterrupt:
            report(f"{handle.id} keeps running; start the study again to wait for it, or cancel it")
            raise
        own = handle.events()
        records += own
        if status.state == "succeeded":
            return result_of(trial, records)
        is_own = status.exit_code in OWN_ERRORS or is_of_task(own)
        problem = problem_of(str(status), own)
        if is_new:
            report(f"{handle.id}: {status.state}: {problem}")
        if (is_new and is_own) or num_started >= MAX_ATTEMPTS:
            break
    return result_of(trial, records, problem)


def is_of_task(records: list[Record]) -> bool:
    """Return whether a failure is an exception of the task, which would occur again."""
    failures = [record.event for record in records if isinstance(record.event, Failure)]
    return any(failure.is_cause and failure.cause == "task" for failure in failures)


def problem_of(status: str, records: list[Record]) -> str:
    """Return the reason of a failure: the message of its cause, or the status of the job."""
    failures = [record.event for record in records if isinstance(record.event, Failure)]
    causes = [failure for failure in failures if failure.is_cause] or failures
    return (causes[-1].message if causes else status).splitlines()[0]
