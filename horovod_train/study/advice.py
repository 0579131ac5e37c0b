"""Advice before a run: whether a study of the job has found the global batch to lose accuracy."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.registry import SCALINGS, SCRIPT
from horovod_train.study.results import Study, folder_of, read_study
from horovod_train.study.table import TUNED, Metric, Row, StudyTable, is_tuned, table_of, value_text
from horovod_train.study.trials import batch_of, policy_digest, problem_of

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
    if study is None or study.problem != problem_of(job) or not study.metric:
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
            f"{num_seeds} seeds: {own.failed[0].problem}"
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
