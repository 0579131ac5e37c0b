"""The table of a study: a row per policy and number of ranks, with means over seeds and comparisons.

StudyTable   rows of a study, and the row with which the others are compared
cells_of     the table as text
verdicts     sentences about a study
advice_for   advice before a run: whether a study of the job has found the global batch to lose accuracy
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev

from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.plugins.study.results import (
    Evidence,
    Result,
    Study,
    batch_of,
    evidence,
    fingerprint_of,
    folder_of,
    policy_digest,
    read_study,
)
from horovod_train.registry import SCALINGS, SCRIPT


def ranks_text(num_ranks: int) -> str:
    """Return a number of ranks as text.

    >>> ranks_text(1), ranks_text(4)
    ('1 rank', '4 ranks')
    """
    return "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"


@dataclass(frozen=True)
class Metric:
    """Metric that a study compares; ``mode``: whether smaller (min) or larger (max) is better."""

    name: str
    mode: str

    @property
    def is_fraction(self) -> bool:
        """Whether the metric is shown in percent."""
        return "acc" in self.name.lower()


@dataclass(frozen=True)
class Row:
    """One policy on one number of ranks.

    Attributes:
        policy: Name of the policy.
        num_ranks: Number of ranks.
        results: Results of its seeds that succeeded.
        failed: Results of its seeds that failed.
        value: Mean of the metric.
        spread: Standard deviation of the metric over seeds; None: one seed.
        loss: Mean of the loss; None: the evaluation has none.
        seconds: Mean time of training; None: unknown.
    """

    policy: str
    num_ranks: int
    results: tuple[Result, ...]
    failed: tuple[Result, ...]
    value: float | None
    spread: float | None
    loss: float | None
    seconds: float | None

    @property
    def first(self) -> Result:
        """Result of the first seed, for fields that seeds share."""
        return (*self.results, *self.failed)[0]


@dataclass(frozen=True)
class StudyTable:
    """Rows of a study, and the row with which the others are compared.

    Attributes:
        rows: Rows in ascending order of ranks.
        base: The row with the fewest ranks; None: no trial has succeeded.
        metric: The compared metric.
        target_loss: Smallest loss that every trial reaches; None: unknown.
    """

    rows: tuple[Row, ...]
    base: Row | None
    metric: Metric
    target_loss: float | None

    def difference(self, row: Row) -> float | None:
        """Return by how much a row is worse than the base, in the unit of the metric; negative: better."""
        if self.base is None or self.base.value is None or row.value is None:
            return None
        sign = 1 if self.metric.mode == "max" else -1
        return sign * (self.base.value - row.value)

    def limit(self, row: Row) -> float | None:
        """Return the spread of the seeds, of this row or of the base, whichever is larger; None: unknown."""
        spreads = [each.spread for each in (row, self.base) if each is not None and each.spread is not None]
        return max(spreads) if spreads else None

    @cached_property
    def _evidence(self) -> dict[tuple[str, int], Evidence]:
        """Evidence that rows are worse than the base."""
        if self.base is None:
            return {}
        metric = self.metric
        measures = [(metric.name, -1 if metric.mode == "max" else 1, False)]
        measures += [("loss", 1, True)] if metric.name != "loss" else []
        found: dict[tuple[str, int], Evidence] = {}
        for name, sign, is_loss in measures:
            base = {s: value for s, value in _values(self.base, name, sign).items() if math.isfinite(value)}
            known = {
                (row.policy, row.num_ranks): values
                for row in self.rows
                if row is not self.base and len((values := _values(row, name, sign)).keys() & base.keys()) > 1
            }
            if known:
                each = evidence(base, list(known.values()), len(measures), is_loss=is_loss)
                found |= {key: e for key, e in zip(known, each, strict=True) if e is not None} | found
        return found

    def evidence_of(self, row: Row) -> Evidence | None:
        """Return the evidence that a row is worse than the base; None: there is none, or it has one seed."""
        return self._evidence.get((row.policy, row.num_ranks))

    def is_safe(self, row: Row) -> bool | None:
        """Return whether nothing shows that a row is worse than the base; None: one seed shows nothing.

        A row with failed seeds is not safe, nor is one whose metric is not finite.
        """
        if row.failed or (row.results and row.value is None) or self.evidence_of(row) is not None:
            return False
        return True if self.is_tested(row) else None

    def is_tested(self, row: Row) -> bool:
        """Whether a row has at least two seeds of the base, with which it can be compared."""
        if self.base is None or self.difference(row) is None:
            return False
        seeds = [{each.seed for each in some.results} for some in (row, self.base)]
        return len(seeds[0] & seeds[1]) > 1

    def reason(self, row: Row) -> str:
        """Return why a row is not safe, as a part of a sentence; empty: it is."""
        if row.results and row.value is None:
            return f"{self.metric.name} is missing or not finite for a seed"
        found, base = self.evidence_of(row), self.base
        if found is None or base is None:
            return ""
        name = "loss" if found.is_loss else self.metric.name
        if found.seed is None:
            return f"the mean {name} of the seeds is worse than by chance"
        sign = -1 if self.metric.mode == "max" and not found.is_loss else 1
        value = f"{sign * found.value:.4g}" if found.is_loss else value_text(self.metric, sign * found.value)
        return f"seed {found.seed} has {name} {value}, far from those of {ranks_text(base.num_ranks)}"

    def best_of(self, rows: Iterable[Row]) -> Row | None:
        """Return the row with the best mean; None: no row has one. Rows with failed seeds do not count."""
        known = [row for row in rows if not row.failed and self.difference(row) is not None]
        return min(known, key=lambda row: self.difference(row) or 0.0, default=None)


def _values(row: Row, name: str, sign: int) -> dict[int, float]:
    """Return a metric by seed, with a sign so that larger is worse; what is not finite is infinitely bad.

    Other values are limited, so that their squares are finite.
    """
    values = {each.seed: sign * each.metrics[name] for each in row.results if name in each.metrics}
    return {
        seed: min(max(value, -MAX_VALUE), MAX_VALUE) if math.isfinite(value) else math.inf
        for seed, value in values.items()
    }


MAX_VALUE = 1e100
SMALLER_IS_BETTER = ("loss", "error", "perplexity", "wer", "cer", "mse", "mae", "nll", "distance")
LARGER_IS_BETTER = ("acc", "f1", "auc", "precision", "recall", "bleu", "iou", "map", "score", "reward")


def metric_of(job: Job, names: Sequence[str], wanted: str | None) -> Metric:
    """Return the metric that a study compares.

    Args:
        job: The job, whose best checkpoint or early stopping may name a metric.
        names: Metrics of the evaluations.
        wanted: ``NAME``, ``NAME:min`` or ``NAME:max``; None: the job's, ``accuracy``, ``loss``, or the first.

    Raises:
        UserError: It is not known whether smaller or larger values are better.
    """
    wanted_name, _, mode = (wanted or "").partition(":")
    for each in (job.checkpoint.best, job.evaluation.early_stopping):
        if each is not None and not mode and wanted_name in ("", each.metric):
            return Metric(each.metric, each.mode)
    name = wanted_name or next((each for each in ("accuracy", "loss", *names) if each in names), "loss")
    if not mode:
        is_min = any(part in name.lower() for part in SMALLER_IS_BETTER)
        if not is_min and not any(part in name.lower() for part in LARGER_IS_BETTER):
            mode = "unknown"
        else:
            mode = "min" if is_min else "max"
    if mode not in {"min", "max"}:
        raise UserError(
            f"--metric {name}: it is not known whether smaller or larger values are better",
            hint=f"use --metric {name}:min or --metric {name}:max, or set checkpoint.best",
        )
    return Metric(name, mode)


def table_of(results: Iterable[Result], metric: Metric) -> StudyTable:
    """Return the table of the results of a study."""
    groups: dict[tuple[int, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.num_ranks, result.policy), []).append(result)
    keys = sorted(groups, key=lambda key: key[0])
    rows = tuple(_row(*key, groups[key], metric) for key in keys)
    succeeded = [row for row in rows if row.value is not None]
    best = [result.best("loss", "min") for row in rows for result in row.results]
    known = [each for each in best if each is not None]
    target = max(known) if known and len(known) == len(best) else None
    trained = [row for row in rows if row.results]
    return StudyTable(rows, next(iter([*succeeded, *trained]), None), metric, target)


def _row(num_ranks: int, policy: str, results: Sequence[Result], metric: Metric) -> Row:
    done = tuple(result for result in results if not result.error)
    values = [r.metrics[metric.name] for r in done if math.isfinite(r.metrics.get(metric.name, math.nan))]
    losses = [r.metrics["loss"] for r in done if "loss" in r.metrics]
    times = [r.seconds for r in done if r.seconds is not None]
    return Row(
        policy=policy,
        num_ranks=num_ranks,
        results=done,
        failed=tuple(result for result in results if result.error),
        value=fmean(values) if values and len(values) == len(done) else None,
        spread=stdev(values) if len(values) > 1 else None,
        loss=sum(losses) / len(losses) if losses else None,
        seconds=fmean(times) if times else None,
    )


TUNED = "tuned "
"""Beginning of the names of policies whose base rate was searched."""


def is_tuned(row: Row) -> bool:
    """Return whether the base rate of a row was searched."""
    return row.policy.startswith(TUNED)


COLUMNS = (
    "policy", "ranks", "global batch", "peak rate", "epochs", "steps", "time", "speed-up", "efficiency",
)  # fmt: skip


def cells_of(table: StudyTable) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return the columns and the rows of a table as text."""
    metric = table.metric.name
    has_loss = metric != "loss" and any(row.loss is not None for row in table.rows)
    columns = [*COLUMNS, metric, "spread", f"relative {metric}"]
    columns += ["loss", "relative loss"] if has_loss else []
    columns += [f"time to loss {table.target_loss:.3g}"] if table.target_loss is not None else []
    columns += ["noise scale"] if any(r.noise_scale for row in table.rows for r in row.results) else []
    return tuple(columns), tuple(_cells(table, row, columns, has_loss=has_loss) for row in table.rows)


def _cells(table: StudyTable, row: Row, columns: Sequence[str], *, has_loss: bool) -> tuple[str, ...]:
    base = table.base
    if not row.results or base is None:
        batch = str(row.first.global_batch_size)
        return (row.policy, str(row.num_ranks), batch, *("-" for _ in columns[3:]))
    times_are_real = all(r.is_real for r in (*row.results, *base.results))
    speedup = base.seconds / row.seconds if row.seconds and base.seconds and times_are_real else None
    efficiency = speedup * base.num_ranks / row.num_ranks if speedup else None
    mark = "" if all(r.is_real for r in row.results) else "*"
    cells = [
        row.policy,
        str(row.num_ranks),
        str(row.first.global_batch_size),
        f"{row.first.peak_lr:.4g}",
        f"{fmean(r.epochs for r in row.results):.3g}",
        f"{fmean(r.num_steps for r in row.results):.0f}",
        _known(row.seconds, "{:.1f} s") + mark,
        _known(speedup, "{:.2f}"),
        _known(efficiency, "{:.0%}"),
        value_text(table.metric, row.value),
        value_text(table.metric, row.spread, is_difference=True),
        _relative(row.value, base.value),
    ]
    cells += [_known(row.loss, "{:.4f}"), _relative(row.loss, base.loss)] if has_loss else []
    if table.target_loss is not None:
        times = [r.seconds_to("loss", table.target_loss) for r in row.results]
        known = [each for each in times if each is not None]
        cells.append((f"{fmean(known):.1f} s" if known else "-") + mark)
    if "noise scale" in columns:
        scales = [r.noise_scale for r in row.results if r.noise_scale]
        cells.append(f"{fmean(scales):.0f}" if scales else "-")
    return tuple(cells)


def value_text(metric: Metric, value: float | None, *, is_difference: bool = False) -> str:
    """Return a value of a metric as text: accuracies in percent, differences of them in points.

    >>> value_text(Metric("accuracy", "max"), 0.9822), value_text(Metric("loss", "min"), 0.0611)
    ('98.2 %', '0.0611')
    >>> value_text(Metric("accuracy", "max"), 0.005, is_difference=True)
    '0.5'
    """
    if value is None:
        return "-"
    if not metric.is_fraction or abs(value) > 1:
        return f"{value:.4f}"
    return f"{100 * value:.1f}" if is_difference else f"{100 * value:.1f} %"


def _known(value: float | None, how: str) -> str:
    return "-" if value is None else how.format(value)


def _relative(value: float | None, base: float | None) -> str:
    return "-" if value is None or not base else f"{value / base - 1:+.1%}"


def verdicts(table: StudyTable) -> Iterator[str]:
    """Yield sentences: what was lost by scaling, and which policy holds at each number of ranks."""
    base, metric = table.base, table.metric
    if base is None:
        return
    for row in table.rows:
        if row.failed:
            num_seeds = len(row.failed) + len(row.results)
            yield (
                f"{ranks_text(row.num_ranks)}, {row.policy}: {len(row.failed)} of {num_seeds} seeds failed: "
                f"{row.failed[0].error}."
            )
        if row is not base and (sentence := _comparison(table, base, row)):
            yield sentence
    for num_ranks in sorted({row.num_ranks for row in table.rows} - {base.num_ranks}):
        rows = [row for row in table.rows if row.num_ranks == num_ranks]
        best = table.best_of(rows)
        if best is not None and len(rows) > 1:
            yield f"Best at {ranks_text(num_ranks)}: {best.policy}, {value_text(metric, best.value)}."


def _comparison(table: StudyTable, base: Row, row: Row) -> str:
    """Return a sentence for a row that is worse, or has one seed; empty: it is as good as the base."""
    metric, difference, reason = table.metric, table.difference(row), table.reason(row)
    where = f"{ranks_text(row.num_ranks)}, {row.policy}: "
    if difference is None:
        return f"{where}{reason}." if reason else ""
    unit = " points" if metric.is_fraction else ""
    size = value_text(metric, abs(difference), is_difference=True)
    is_one_seed = not table.is_tested(row) and float(size) != 0
    if not reason and not is_one_seed:
        return ""
    return (
        f"{where}{metric.name} {value_text(metric, row.value)} is {size}{unit} "
        f"{'worse' if difference > 0 else 'better'} than {ranks_text(base.num_ranks)} "
        f"({value_text(metric, base.value)})"
        + (f": {reason}." if reason else "; one seed does not show if that is chance.")
    )


MENTIONED_EPOCHS = 1.05
"""Ratio of epochs from which a policy has a price."""


def advice_for(job: Job, num_ranks: int, folder: Path | None = None) -> str:
    """Return a warning for a job on a number of ranks; empty: no study advises against it.

    Args:
        job: The job.
        num_ranks: Number of ranks.
        folder: Folder of the study; None: that of the job.
    """
    if job.framework == SCRIPT:
        return ""
    try:
        study = read_study(folder_of(job) if folder is None else folder)
    except UserError as error:
        return f"the study of this job gives no advice: {error}"
    if study is None or study.fingerprint != fingerprint_of(job) or not study.metric:
        return ""
    table = table_of(study.trials, Metric(*study.metric))
    same = [row for row in table.rows if row.first.policy_digest == policy_digest(job)]
    return _advice(study, table, same, batch_of(job, num_ranks))


def _advice(study: Study, table: StudyTable, same: list[Row], batch: int) -> str:
    """Return the advice for a global batch, given the rows of the job's own policy."""
    base, metric = table.base, table.metric
    if base is None or batch <= base.first.global_batch_size:
        return ""
    origin = f"a study of this job ({study.begun} UTC)"
    largest = max((row.first.global_batch_size for row in same), default=0)
    if batch > largest:
        policies = ", ".join(sorted({row.policy for row in table.rows}))
        return f"{origin} has not examined " + (
            f"a global batch of {batch} with this policy; its largest is {largest}"
            if same
            else f"this learning rate and optimizer; it has examined {policies}"
        )
    known = [row for row in table.rows if row.results or row.failed]
    nearest = max(b for row in known if (b := row.first.global_batch_size) <= batch)
    at = [row for row in known if row.first.global_batch_size == nearest]
    own = next((row for row in at if row in same), None)
    if own is None or table.is_safe(own) is not False:
        return f"{origin}{doubt}" if (doubt := _doubt(table, same, own, batch)) else ""
    if own.failed:
        num_seeds = len(own.failed) + len(own.results)
        return (
            f"{origin} has failed at a global batch of {nearest} with {own.policy}, for {len(own.failed)} of "
            f"{num_seeds} seeds: {own.failed[0].error}"
        )
    found = (
        f"{origin} has found {metric.name} {value_text(metric, own.value)} at a global batch of {nearest} "
        f"with {own.policy}, and {value_text(metric, base.value)} at {base.first.global_batch_size}: "
        f"{table.reason(own)}"
    )
    better = table.best_of(row for row in at if row is not own and _is_advisable(table, row, own))
    if better is not None:
        use = settings_text(better) + price_text(better, own)
        return f"{found}; {better.policy} has {value_text(metric, better.value)} ({use})"
    safe = [row.first.global_batch_size for row in same if row is base or table.is_safe(row)]
    return f"{found}; the largest batch without a loss is {max(safe, default=base.first.global_batch_size)}"


def _doubt(table: StudyTable, same: list[Row], own: Row | None, batch: int) -> str:
    """Return what the study does not show about a batch; empty: there is nothing to doubt."""
    base, metric = table.base, table.metric
    assert base is not None
    above = min((row for row in same if row.first.global_batch_size > batch), key=_batch, default=None)
    is_between = own is None or _batch(own) != batch
    if is_between and above is not None and table.is_safe(above) is False:
        return f" has not examined a global batch of {batch}; at {_batch(above)}, it is worse"
    difference = None if own is None else table.difference(own)
    if own is None or own is base or difference is None or difference <= 0 or table.is_tested(own):
        return ""
    if value_text(metric, own.value) == value_text(metric, base.value):
        return ""
    return (
        f" has found {metric.name} {value_text(metric, own.value)} at a global batch of {_batch(own)} with "
        f"{own.policy}, and {value_text(metric, base.value)} at {_batch(base)}; one seed does not show if "
        "that is chance (study --seeds 3)"
    )


def _batch(row: Row) -> int:
    return row.first.global_batch_size


def _is_advisable(table: StudyTable, row: Row, own: Row) -> bool:
    """Return whether a row has no loss, or is better than the job's own policy by more than the spread."""
    limit, ours, theirs = table.limit(row), table.difference(own), table.difference(row)
    if table.is_safe(row):
        return True
    if table.is_safe(row) is None or limit is None or ours is None or theirs is None:
        return False
    return ours - theirs > limit


def settings_text(row: Row) -> str:
    """Return how to use the policy of a row, as text."""
    name = row.policy.removeprefix(TUNED)
    rate = f" --set lr.base_lr={row.first.base_lr:.6g}" if is_tuned(row) else ""
    if name not in SCALINGS.builtin:
        return f"see the policy of the study{' with' if rate else ''}{rate}"
    return f"--set lr.scaling={name}{rate}"


def price_text(row: Row, own: Row) -> str:
    """Return how many more epochs a row has trained than the job's own policy; empty: as many."""
    epochs = [fmean(each.epochs for each in some.results) for some in (row, own) if some.results]
    if len(epochs) < 2 or not epochs[1] or epochs[0] / epochs[1] < MENTIONED_EPOCHS:
        return ""
    return f", {epochs[0] / epochs[1]:.2g} times as many epochs"
