"""The report of a study: its table, sentences and charts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from horovod_train.report.document import Block, Chart, Curve, Report, Section, Table, Text
from horovod_train.study.critical import critical_blocks
from horovod_train.study.results import Study
from horovod_train.study.table import Row, StudyTable, cells_of, is_tuned, verdicts

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
