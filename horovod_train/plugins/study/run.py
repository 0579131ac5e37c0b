"""Runs of a study: its trials, searches of learning rates, branches, and its report.

run_trials        runs trials one after another, and resumes where a study was interrupted
Tuning            the best base learning rate of each row (``--tune-lr``)
Branching         the critical batch size, measured directly by branches of a training
report_of_study   the report of a study: its table, sentences and charts
"""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any

from horovod_train.checkpoint.store import list_checkpoints, read_checkpoint
from horovod_train.client import JobHandle, LocalJob, start
from horovod_train.config.load import changed
from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.events.file import Record
from horovod_train.events.types import Failure
from horovod_train.events.wire import duration
from horovod_train.plugins.report.document import Block, Chart, Curve, Report, Section, Table, Text
from horovod_train.plugins.study.results import (
    CRITICAL,
    TUNING,
    Policy,
    Result,
    Study,
    Trial,
    result_of,
    trials_of,
)
from horovod_train.plugins.study.table import (
    TUNED,
    Metric,
    Row,
    StudyTable,
    cells_of,
    is_tuned,
    metric_of,
    ranks_text,
    verdicts,
)

MAX_ATTEMPTS = 3
"""Starts of a trial in one call, if its launcher or ranks fail without an error of the job."""
OWN_ERRORS = {2, 3}
"""Exit codes of failures that would occur again: configuration, and values that are not finite."""


def run_trials(study: Study, trials: Iterable[Trial], report: Callable[[str], None]) -> None:
    """Run the trials that have no result, and save the study after each.

    A trial is submitted with an idempotency key. If the study is killed, the job of its current trial
    continues, and the next start of the study finds it by the key. A trial whose ranks were killed resumes
    from its checkpoint.

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
            f"{result.error or found}" + (f"; about {duration(rest_s)} left" if rest_s else "")
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
        error = failure_of(str(status), own)
        if is_new:
            report(f"{handle.id}: {status.state}: {error}")
        if (is_new and is_own) or num_started >= MAX_ATTEMPTS:
            break
    return result_of(trial, records, error)


def is_of_task(records: list[Record]) -> bool:
    """Return whether a failure is an exception of the task, which would occur again."""
    failures = [record.event for record in records if isinstance(record.event, Failure)]
    return any(failure.is_cause and failure.cause == "task" for failure in failures)


def failure_of(status: str, records: list[Record]) -> str:
    """Return the reason of a failure: the message of its cause, or the status of the job."""
    failures = [record.event for record in records if isinstance(record.event, Failure)]
    causes = [failure for failure in failures if failure.is_cause] or failures
    return (causes[-1].message if causes else status).splitlines()[0]


SEED_DISTANCE = 2**31
MAX_DOUBLINGS = 6
"""Largest distance from the rate of the job, as a power of two, in both directions."""


@dataclass(frozen=True)
class Tuning:
    """The search of base rates in a study.

    The best base learning rate of each row of a study is searched (``--tune-lr``). A grid with a factor of
    two is searched from the rate of the job, and continued while its best rate is at an end. It is searched
    with one seed of its own: if rates were chosen by the seeds of the table, the table would show those for
    which they were chosen, and be too good.

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
        found = result.error or f"{metric.name} {result.metrics.get(metric.name, math.nan):.4f}"
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
    if result.error or not math.isfinite(value):
        return math.inf
    return -value if metric.mode == "max" else value


BASE = "critical-base"
TOLERANCE = 0.01
"""Tolerated relative increase of the loss."""


@dataclass(frozen=True)
class Branching:
    """Settings of a measurement of the critical batch size.

    From checkpoints of one training, short branches train on the same samples with 1, 2, 4, ... times the
    batch, and with the rate that the scaling rule gives for it. The critical batch size at a checkpoint is
    the largest batch whose loss at the end of the branch is not above that of the smallest batch by more
    than a tolerance. Between two batches, the loss is interpolated in the logarithm of the batch.

    Source: Merrill et al., "Critical Batch Size Revisited", arXiv:2505.23971.

    Attributes:
        epochs: Epochs of the training after which branches begin.
        multiples: Factors of the batch; the first is 1.
        length_epochs: Length of a branch, in epochs.
        num_seeds: Number of orders of the samples.
    """

    epochs: tuple[int, ...]
    multiples: tuple[int, ...] = (1, 2, 4, 8, 16)
    length_epochs: float = 1.0
    num_seeds: int = 1

    def check(self, job: Job) -> None:
        """Raise UserError if branches do not fit in the training of a job."""
        ends = {
            "train.max_steps": job.train.max_steps is not None,
            "train.max_samples": job.train.max_samples is not None,
            "train.stop_at_step": job.train.stop_at_step is not None,
            "evaluation.early_stopping": job.evaluation.early_stopping is not None,
        }
        if found := [path for path, is_set in ends.items() if is_set]:
            raise UserError(
                f"--critical-batch: {found[0]} may end the training before a branch",
                hint=f"use --set {found[0]}=null",
            )
        if not 0 < self.length_epochs < math.inf:
            raise UserError(f"--branch-length {self.length_epochs:g} must be a number of epochs above 0")
        if job.train.most_epochs == 1:
            raise UserError(
                "--critical-batch: the job has one epoch, and branches begin after one",
                hint="use --set train.epochs",
            )
        if not self.epochs or max(self.epochs) + self.length_epochs > job.train.most_epochs:
            raise UserError(
                f"branches of {self.length_epochs:g} epochs cannot begin after {max(self.epochs, default=0)} "
                f"epochs of {job.train.most_epochs}",
                hint="use --branch-epochs with earlier epochs, or a shorter --branch-length",
            )
        if self.multiples[0] != 1 or list(self.multiples) != sorted(set(self.multiples)):
            raise UserError(
                f"--multiples {','.join(map(str, self.multiples))} must be increasing and begin with 1",
                hint="such as 1,2,4,8",
            )


@dataclass(frozen=True)
class Branch:
    """End of a branch: epoch of its begin, seed, samples per step, and the loss of its evaluation."""

    epoch: int
    seed: int
    batch: int
    loss: float


def default_epochs(num_epochs: int) -> tuple[int, ...]:
    """Return the epochs of branches: after a tenth, a quarter, a half and three quarters of the training.

    >>> default_epochs(14), default_epochs(2)
    ((1, 4, 7, 10), (1,))
    """
    found = {max(1, round(num_epochs * part)) for part in (0.1, 0.25, 0.5, 0.75)}
    return tuple(sorted(epoch for epoch in found if epoch < num_epochs))


def measure(study: Study, job: Job, branching: Branching, report: Callable[[str], None]) -> None:
    """Train the base and all branches that are not in the study yet; results are added to the study.

    Raises:
        UserError: The base or a branch fails, or its evaluation has no loss.
    """
    branching.check(job)
    base = _trial(job, study.folder, BASE, {"checkpoint.keep_last": job.train.most_epochs + 1})
    for multiple in branching.multiples:  # refuses a batch that the scaling rule does not support
        _trial(job, study.folder, BASE, _sizes(base.global_batch_size * multiple))
    if study.result_of(base) is None:
        report(
            f"training {BASE}: {job.train.most_epochs} epochs at a global batch of {base.global_batch_size}"
        )
        study.results[BASE] = run_trial(study, base, report)
        study.save()
    if study.results[BASE].error:
        raise UserError(f"{BASE} failed: {study.results[BASE].error}", hint=f"delete {study.folder}")
    checkpoints = checkpoints_by_epoch(study.folder / BASE / "checkpoints")
    if missing := [epoch for epoch in branching.epochs if epoch not in checkpoints]:
        raise UserError(f"{BASE} has no checkpoint after epoch {missing[0]}", hint=f"delete {study.folder}")
    if any(branch["length"] != branching.length_epochs for branch in study.critical):
        raise UserError(
            f"{study.folder} has branches of another length", hint="use --output, or delete this folder"
        )
    known = {(b["epoch"], b["seed"], b["batch"]) for b in study.critical}
    for epoch in branching.epochs:
        for seed in range(job.train.seed, job.train.seed + branching.num_seeds):
            for multiple in branching.multiples:
                batch = base.global_batch_size * multiple
                if (epoch, seed, batch) in known:
                    continue
                branch = _train_branch(study, job, checkpoints[epoch], epoch, seed, batch, branching, report)
                study.critical.append({**asdict(branch), "length": branching.length_epochs})
                study.save()
                report(f"epoch {epoch}, seed {seed}, batch {batch}: loss {branch.loss:.5f}")


def _train_branch(
    study: Study,
    job: Job,
    checkpoint: Path,
    epoch: int,
    seed: int,
    batch: int,
    branching: Branching,
    report: Callable[[str], None],
) -> Branch:
    progress = progress_of(checkpoint)
    num_samples = branching.length_epochs * progress["order"]["num_samples"]
    settings = {
        "train.seed": seed,
        **_sizes(batch),
        "train.stop_at_step": progress["step"] + max(1, round(num_samples / batch)),
        "checkpoint.resume": "required",
    }
    trial = _trial(job, study.folder, f"critical-e{epoch}-b{batch}-s{seed}", settings)
    own = study.folder / trial.name / "checkpoints" / checkpoint.name
    if not own.exists():
        partial = own.with_name(f".copy-{own.name}")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(checkpoint, partial)
        partial.rename(own)
    result = run_trial(study, trial, report)
    shutil.rmtree(own.parent, ignore_errors=True)
    if result.error:
        raise UserError(f"{trial.name} failed: {result.error}")
    if "loss" not in result.metrics:
        raise UserError(
            f"{trial.name}: its evaluation has no metric named loss",
            hint="the critical batch size is measured by the loss of the evaluation",
        )
    return Branch(epoch, seed, batch, result.metrics["loss"])


def _sizes(batch: int) -> dict[str, Any]:
    return {"train.global_batch_size": batch, "train.accumulation_steps": 1}


def _trial(job: Job, folder: Path, name: str, settings: Mapping[str, Any]) -> Trial:
    fields = {"name": name, "run_dir": str(folder), "checkpoint.dir": None, "checkpoint.every": "1 epoch"}
    described = changed(job, {**fields, **settings}, name)
    return Trial.of(CRITICAL, described.launch.num_ranks or 1, described)


def progress_of(checkpoint: Path) -> Mapping[str, Any]:
    """Return the progress that a checkpoint contains.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    progress: Mapping[str, Any] = read_checkpoint(checkpoint, ["state"]).documents["state"]["progress"]
    return progress


def checkpoints_by_epoch(folder: Path) -> dict[int, Path]:
    """Return the checkpoints at the end of epochs, by number of completed epochs."""
    found = {}
    for stored in list_checkpoints(folder):
        progress = progress_of(stored.path)
        if progress["cursor"] == 0:
            found[int(progress["epoch"])] = stored.path
    return found


def critical_batch(losses: Mapping[int, float], tolerance: float) -> float | None:
    """Return the largest batch whose loss is at most (1 + tolerance) x that of the smallest batch.

    Args:
        losses: Loss by batch.
        tolerance: Tolerated relative increase.

    Returns:
        The batch in samples, interpolated in its logarithm; None: no batch has exceeded the tolerance.

    >>> critical_batch({8: 1.0, 16: 1.0, 32: 1.02}, tolerance=0.01)
    22.627416997969522
    """
    batches = sorted(losses)
    limit = losses[batches[0]] + tolerance * abs(losses[batches[0]])
    for small, large in pairwise(batches):
        if losses[large] > limit:
            part = (limit - losses[small]) / (losses[large] - losses[small])
            return float(small * (large / small) ** part)
    return None


def mean_losses(branches: Sequence[Mapping[str, float]]) -> dict[int, dict[int, float]]:
    """Return the mean loss over seeds by epoch and batch, both in ascending order."""
    found: dict[int, dict[int, list[float]]] = {}
    for branch in sorted(branches, key=lambda branch: (branch["epoch"], branch["batch"])):
        of_epoch = found.setdefault(int(branch["epoch"]), {})
        of_epoch.setdefault(int(branch["batch"]), []).append(branch["loss"])
    return {
        epoch: {batch: fmean(values) for batch, values in of_epoch.items()}
        for epoch, of_epoch in found.items()
    }


def batch_warmup(critical: Mapping[int, float], full: float) -> tuple[int, float] | None:
    """Return the start and the length in epochs of a batch warm-up that stays below the critical batch size.

    Args:
        critical: Critical batch size by epoch.
        full: Global batch after the warm-up.

    Returns:
        ``train.batch_warmup.start``, and its length in epochs; None: none is needed, or the batch is above
        the critical batch size at the last epoch.

    >>> batch_warmup({1: 32.0, 4: 64.0, 8: 160.0}, 128)
    (16, 9.333333333333334)
    """
    below = {epoch: batch for epoch, batch in critical.items() if batch < full}
    if not below or critical[max(critical)] < full:
        return None
    start = max(1, math.floor(min(below.values()) / 2))
    return start, max(epoch * (full - start) / (batch - start) for epoch, batch in below.items())


def critical_blocks(branches: Sequence[Mapping[str, float]]) -> Iterator[Block]:
    """Yield the table, the chart and the suggested batch warm-up of a measurement."""
    losses = mean_losses(branches)
    found = {epoch: critical_batch(of_epoch, TOLERANCE) for epoch, of_epoch in losses.items()}
    largest = {epoch: max(of_epoch) for epoch, of_epoch in losses.items()}
    rows = [
        (str(epoch), f"at least {largest[epoch]}" if batch is None else f"{batch:.0f}", str(largest[epoch]))
        for epoch, batch in found.items()
    ]
    yield Text(
        f"The largest batch whose loss after a branch is at most {TOLERANCE:.0%} above that of the smallest "
        "batch, on the same samples."
    )
    yield Table("By epoch", ("epoch", "critical batch size", "largest examined"), tuple(rows))
    curves = [
        Curve(f"epoch {epoch}", tuple(map(float, of_epoch)), tuple(of_epoch.values()))
        for epoch, of_epoch in losses.items()
    ]
    yield Chart("Loss of branches by batch", "batch (samples)", "loss", tuple(curves))
    known = {epoch: float(largest[epoch]) if batch is None else batch for epoch, batch in found.items()}
    full = max(known.values())
    warmup = batch_warmup(known, full)
    if warmup is not None:
        start, epochs = warmup
        yield Text(
            f"A batch that grows to {full:.0f} without exceeding it: train.batch_warmup: {{start: {start}, "
            f"length: {epochs:.3g} epochs}} with train.global_batch_size: {full:.0f}."
        )


NOT_REAL = (
    "* This machine has fewer cores than ranks: these rows trained the same global batches on fewer ranks, "
    "with more micro-batches. Their times are not those of the ranks. Their weights are, up to rounding "
    "(which grows over steps if training is unstable), unless the policy is adascale, the loss uses "
    "horovod_train.gather, or the model has batch normalization or draws random numbers by rank."
)


PEAK_OF_ADASCALE = (
    "The peak rate of adascale is an upper limit: the rate is the base rate, multiplied by the measured gain."
)


def report_of_study(study: Study, table: StudyTable) -> Report:
    """Return the report of a study."""
    sections = []
    if table.rows:
        sections.append(Section("Ranks and policies", tuple(_blocks(table))))
    if study.critical:
        sections.append(Section("Critical batch size", tuple(critical_blocks(study.critical))))
    return Report(f"Study of {study.job}", tuple(sections))


def _blocks(table: StudyTable) -> Iterator[Block]:
    yield Table("Means over seeds", *cells_of(table))
    if any(not result.is_real for row in table.rows for result in row.results):
        yield Text(NOT_REAL)
    if any(result.follows_gain for row in table.rows for result in row.results):
        yield Text(PEAK_OF_ADASCALE)
    if tuned := sorted({row.policy for row in table.rows if is_tuned(row)}):
        yield Text(
            f"{', '.join(tuned)}: the base rate of each row was searched with a seed outside of the table."
        )
    for sentence in verdicts(table):
        yield Text(sentence)
    yield _chart(
        table, f"{table.metric.name} by global batch", table.metric.name, lambda row: row.value,
        lambda row: row.spread,
    )  # fmt: skip
    if table.metric.name != "loss":
        yield _chart(table, "Loss by global batch", "loss", lambda row: row.loss)
    yield _chart(table, "Time of training by global batch", "seconds", time_of)


def time_of(row: Row) -> float | None:
    """Return the time of training; None: unknown, or that of fewer ranks."""
    return row.seconds if all(result.is_real for result in row.results) else None


def _chart(
    table: StudyTable,
    title: str,
    y_title: str,
    value: Callable[[Row], float | None],
    spread: Callable[[Row], float | None] | None = None,
) -> Chart:
    curves = []
    for policy in dict.fromkeys(row.policy for row in table.rows):
        rows = [row for row in table.rows if row.results and (row.policy == policy or row is table.base)]
        if any(value(row) is not None for row in rows):
            batches = tuple(float(row.first.global_batch_size) for row in rows)
            spreads = tuple(map(spread, rows)) if spread else None
            curves.append(Curve(policy, batches, tuple(map(value, rows)), spreads))
    return Chart(title, "global batch (samples)", y_title, tuple(curves), is_log=True)
