"""The best base learning rate of each row of a study (``--tune-lr``).

A grid with a factor of two is searched from the rate of the job, and continued while its best rate is at an
end. It is searched with one seed of its own: if rates were chosen by the seeds of the table, the table would
show those for which they were chosen, and be too good.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.study.results import TUNING, Result, Study
from horovod_train.study.run import run_trial
from horovod_train.study.table import TUNED, Metric, metric_of, ranks_text
from horovod_train.study.trials import Policy, Trial, trials_of

SEED_DISTANCE = 2**31
MAX_DOUBLINGS = 6
"""Largest distance from the rate of the job, as a power of two, in both directions."""


@dataclass(frozen=True)
class Tuning:
    """The search of base rates in a study.

    Attributes:
        study: The study; results of the search are added.
        job: The job of the study.
        num_seeds: Number of seeds of a row.
        folder: Folder of the runs of the trials.
        num_cores: CPU cores of this machine.
        metric: Metric by which rates are compared, as ``metric_of`` expects; None: the default.
        report: Prints a line.
    """

    study: Study
    job: Job
    num_seeds: int
    folder: Path
    num_cores: int
    metric: str | None
    report: Callable[[str], None]

    def tuned(self, trials: Sequence[Trial], policies: Sequence[Policy]) -> list[Trial]:
        """Return the trials of a table with the best base rate of each row.

        Args:
            trials: The trials with the base rates of the policies.
            policies: The policies of the study.

        Raises:
            UserError: No rate of a row trains, or a trial is not possible.
        """
        by_name = {policy.name: policy for policy in policies}
        found = []
        for name, num_ranks in dict.fromkeys((trial.policy, trial.num_ranks) for trial in trials):
            policy = self._tuned(by_name[name], num_ranks)
            found += self._trials(self.job, policy, num_ranks, self.num_seeds)
        return found

    def _trials(self, job: Job, policy: Policy, num_ranks: int, num_seeds: int) -> list[Trial]:
        return trials_of(job, [policy], [num_ranks], num_seeds, folder=self.folder, num_cores=self.num_cores)

    def _tuned(self, policy: Policy, num_ranks: int) -> Policy:
        """Return a policy with the best base rate on a number of ranks."""
        base_lr = float(policy.settings.get("lr.base_lr", self.job.lr.base_lr))
        where = f"{policy.name}, {ranks_text(num_ranks)}"
        best = search(lambda doublings: self._value_at(base_lr * 2.0**doublings, policy, num_ranks))
        if best is None:
            raise UserError(
                f"{where}: no base rate from {base_lr / 2**MAX_DOUBLINGS:.4g} to {2 * base_lr:.4g} trains",
                hint="see the messages above, or use another lr.base_lr",
            )
        rate = base_lr * 2.0**best
        self.report(f"{where}: the best base rate is {rate:.4g}")
        return Policy(TUNED + policy.name, {**policy.settings, "lr.base_lr": rate})

    def _value_at(self, rate: float, policy: Policy, num_ranks: int) -> float:
        """Return the metric of a trial at a base rate, so that smaller is better."""
        seed = (self.job.train.seed + SEED_DISTANCE) % 2**32  # none of the table, also of more seeds
        job = self.job.model_copy(update={"train": self.job.train.model_copy(update={"seed": seed})})
        with_rate = Policy(f"{rate:.4g} {policy.name}", {**policy.settings, "lr.base_lr": rate})
        (trial,) = self._trials(job, with_rate, num_ranks, 1)
        result = self._result_of(replace(trial, policy=TUNING))
        metric = metric_of(self.job, sorted(result.metrics), self.metric)
        found = result.problem or f"{metric.name} {result.metrics.get(metric.name, math.nan):.4f}"
        self.report(f"{policy.name}, {ranks_text(num_ranks)}: base rate {rate:.4g}: {found}")
        return value_of(result, metric)

    def _result_of(self, trial: Trial) -> Result:
        """Return the result of a trial, which an earlier call may have trained."""
        found = self.study.result_of(trial)
        if found is None:
            found = self.study.results[trial.name] = run_trial(self.study, trial, self.report)
            self.study.save()
        return found


def search(value_at: Callable[[int], float]) -> int | None:
    """Return the doubling with the smallest value; None: no value is finite.

    The grid begins with -1, 0 and 1, and is continued at the end at which its best value is. If no value is
    finite, it is continued downwards, because large rates diverge.

    >>> search(lambda doublings: abs(doublings - 3)), search(lambda doublings: abs(doublings + 9))
    (3, -6)
    """
    values = {doublings: value_at(doublings) for doublings in (0, -1, 1)}
    while True:
        best = min(values, key=lambda doublings: (values[doublings], abs(doublings)))
        if math.isinf(values[best]):
            following = min(values) - 1
        elif best == min(values):
            following = best - 1
        elif best == max(values):
            following = best + 1
        else:
            return best
        if abs(following) > MAX_DOUBLINGS:
            return None if math.isinf(values[best]) else best
        values[following] = value_at(following)


def value_of(result: Result, metric: Metric) -> float:
    """Return a metric of a result, so that smaller is better; a failed trial has infinity."""
    value = result.metrics.get(metric.name, math.nan)
    if result.problem or not math.isfinite(value):
        return math.inf
    return -value if metric.mode == "max" else value
