"""Prometheus' recording and alerting rules; ``horovod-train dashboards export`` writes them as YAML.

Recording rules are queries that dashboards and alerts share. Each alert has a section in docs/runbook.md with
its name as the title.

No alert fires after a normal end, a drain or a cancel: the series of ended ranks end together, because their
targets are removed, and jobs that are draining or have ended are excluded by their state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import yaml

from horovod_train.monitor.live import SLOWER_BY

RUNBOOK = "docs/runbook.md"
"""Default address of the runbook to which alerts link."""

CHECKPOINT_AGE_S = 3600.0

JOB = "training_job, run"
RANK = "training_job, run, rank, local_rank, host"
_P = "horovod_train_"


@dataclass(frozen=True)
class Recording:
    """Recording rule: name of the series (``level:metric:operations``), PromQL query, and meaning."""

    name: str
    expr: str
    help: str


@dataclass(frozen=True)
class Alert:
    """Alerting rule.

    Attributes:
        name: Name, and title of the section in the runbook.
        expr: PromQL query. The alert fires for each series in its result.
        hold: Duration ``for``, in Prometheus' notation.
        severity: critical: act now, the job makes no progress or may lose work; warning: examine the job.
        summary: One sentence, with labels of the series.
    """

    name: str
    expr: str
    hold: str
    severity: Literal["critical", "warning"]
    summary: str


def _rate(metric: str, window: str = "2m") -> str:
    return f"rate({_P}{metric}[{window}])"


_PER_STEP = f"{_rate('own_seconds_total')} / ({_rate('steps_total')} > 0)"

RECORDINGS = (
    Recording(
        "horovod_train:own_seconds:per_step",
        _PER_STEP,
        "Own time of a rank per step: step time minus all-reduce wait.",
    ),
    Recording(
        "horovod_train:own_seconds:ratio_to_median",
        "horovod_train:own_seconds:per_step / on (training_job, run) group_left () "
        f"quantile by ({JOB}) (0.5, horovod_train:own_seconds:per_step)",
        "Own time of a rank relative to the median of all ranks of its job.",
    ),
    Recording(
        "horovod_train:samples:rate",
        _rate("samples_total"),
        "Throughput of a rank, in samples per second.",
    ),
    Recording(
        "horovod_train:samples:job_rate",
        f"sum by ({JOB}) (horovod_train:samples:rate)",
        "Throughput of a job, in samples per second.",
    ),
    Recording(
        "horovod_train:scaling_efficiency:ratio",
        f"horovod_train:samples:job_rate / on ({JOB}) (max by ({JOB}) ({_P}world_size_present) "
        f"* on ({JOB}) max by ({JOB}) ({_P}baseline_samples_per_second))",
        "Throughput of a job with N ranks relative to N times that of one rank.",
    ),
    Recording(
        "horovod_train:phase_seconds:per_step",
        f"{_rate('step_phase_seconds_sum')} / on ({RANK}) group_left () ({_rate('steps_total')} > 0)",
        "Time of a phase per step.",
    ),
    Recording(
        "horovod_train:phase:ratio",
        f"{_rate('step_phase_seconds_sum')} / on ({RANK}) group_left () ({_rate('step_seconds_sum')} > 0)",
        "Fraction of step time in a phase.",
    ),
    Recording(
        "horovod_train:waiting:ratio",
        _rate("waiting_seconds_total"),
        "Fraction of time in which a rank waits for ranks that arrive later.",
    ),
    Recording(
        "horovod_train:waited_for:idle_ranks",
        _rate("waited_for_seconds_total"),
        "Average number of ranks that are idle because of a rank.",
    ),
    Recording(
        "horovod_train:communication:ratio",
        _rate("communication_seconds_total"),
        "Fraction of time spent in communication that does not overlap computation.",
    ),
    Recording(
        "horovod_train:allreduce_bus:bytes_per_second",
        f"2 * (1 - 1 / {_P}world_size_present) * {_rate('exchanged_bytes_total')} "
        f"/ ({_rate('exchange_seconds_total')} > 0)",
        "Bus bandwidth of all-reduce: 2 (n - 1) / n of its bytes a second, as nccl-tests defines it.",
    ),
    Recording(
        "horovod_train:model_flops:utilization_ratio",
        f"{_rate('model_flops_total')} / on ({RANK}) ({_P}device_peak_flops > 0)",
        "Fraction of the device's peak FLOP/s used by forward and backward of a rank.",
    ),
    Recording(
        "horovod_train:ranks:present",
        f"count by ({JOB}) ({_P}steps_total)",
        "Ranks of a job that Prometheus can scrape.",
    ),
)

_NOT_TRAINING = f'{_P}job_state{{state=~"stopping|succeeded|failed|cancelled|preempted"}}'

_NO_FIRST_STEP = f"max by ({JOB}) ({_P}steps_total offset 30m) == 0"
"""No step for half an hour after the start: the first step may include compilation of the model."""

_EVALUATES = (
    f"(max by ({JOB}) ({_P}evaluating) > 0 "
    f"unless on ({JOB}) min by ({JOB}) (min_over_time({_P}evaluating[30m])) > 0)"
)
"""Jobs with an evaluation that has run for less than half an hour."""

_LEFT_BEHIND = f"min by ({JOB}) ({_P}rank_ended_timestamp_seconds) > 0"
"""Jobs of which only the last metrics of ended ranks remain (Pushgateway, node_exporter)."""

_PRESENT = f"max by ({JOB}) ({_P}world_size_present)"
"""Jobs with running ranks. Without this, alerts on rates could fire up to an hour after a job's end."""

_AGE = "CHECKPOINT_AGE"  # placeholder for a configurable number of seconds

_ALERTS = (
    Alert(
        "HorovodTrainRankMissing",
        f"(max by ({JOB}) ({_P}world_size_present) > horovod_train:ranks:present) "
        f"unless on ({JOB}) {_NOT_TRAINING}",
        "2m",
        "critical",
        "{{ $labels.training_job }}: Prometheus can scrape only some of its {{ $value }} ranks",
    ),
    Alert(
        "HorovodTrainStraggler",
        f"horovod_train:own_seconds:ratio_to_median > {1 + SLOWER_BY:g}",
        "5m",
        "warning",
        "{{ $labels.training_job }}: rank {{ $labels.rank }} on {{ $labels.host }} needs "
        "{{ $value | humanize }} times as long for its own part of a step as the median rank",
    ),
    Alert(
        "HorovodTrainNoProgress",
        f"((max by ({JOB}) (rate({_P}steps_total[5m])) == 0) "
        f"and on ({JOB}) (max by ({JOB}) ({_P}steps_total offset 5m) > 0 or {_NO_FIRST_STEP})) "
        f"unless on ({JOB}) {_NOT_TRAINING} unless on ({JOB}) {_EVALUATES}",
        "2m",
        "critical",
        "{{ $labels.training_job }}: no rank has made a step for five minutes, and none evaluates",
    ),
    Alert(
        "HorovodTrainRankNotInCollective",
        f"({_P}waiting_now_seconds == 0) and on ({JOB}) (max by ({JOB}) ({_P}waiting_now_seconds) > 120)",
        "0m",
        "critical",
        "{{ $labels.training_job }}: rank {{ $labels.rank }} on {{ $labels.host }} has not started the "
        "collective that others have been waiting in for two minutes",
    ),
    Alert(
        "HorovodTrainNonFiniteSteps",
        f"max by ({JOB}) (increase({_P}non_finite_steps_total[10m])) > 0",
        "0m",
        "warning",
        "{{ $labels.training_job }}: steps with a loss or gradient that was not finite",
    ),
    Alert(
        "HorovodTrainLossSpike",
        f"max by ({JOB}) ({_P}loss) > 2 * (max by ({JOB}) (avg_over_time({_P}loss[30m] offset 5m)) > 0) "
        f"and on ({JOB}) max by ({JOB}) ({_P}loss) > 0.1 * max by ({JOB}) (max_over_time({_P}loss[6h]))",
        "2m",
        "warning",
        "{{ $labels.training_job }}: the loss is {{ $value | humanize }}, more than twice its mean of "
        "half an hour",
    ),
    Alert(
        "HorovodTrainCheckpointTooOld",
        f"max by ({JOB}) ({_P}checkpoint_age_seconds) > {_AGE}",
        "5m",
        "warning",
        "{{ $labels.training_job }}: its last checkpoint is {{ $value | humanizeDuration }} old",
    ),
    Alert(
        "HorovodTrainCheckpointsFail",
        f"max by ({JOB}) (increase({_P}checkpoint_failures_total[1h])) > 0",
        "0m",
        "critical",
        "{{ $labels.training_job }}: a checkpoint could not be written",
    ),
    Alert(
        "HorovodTrainDataBound",
        f'avg by ({JOB}) (horovod_train:phase:ratio{{phase="data"}}) > 0.2',
        "10m",
        "warning",
        "{{ $labels.training_job }}: ranks spend {{ $value | humanizePercentage }} of their steps "
        "waiting for data",
    ),
    Alert(
        "HorovodTrainWorldTooSmall",
        f"max by ({JOB}) ({_P}world_size_present) < max by ({JOB}) ({_P}world_size_desired)",
        "10m",
        "warning",
        "{{ $labels.training_job }}: trains on {{ $value }} ranks, fewer than requested",
    ),
    Alert(
        "HorovodTrainGpuThrottled",
        f'max by ({RANK}) ({_P}gpu_throttled{{reason!="power_cap"}}) > 0',
        "10m",
        "warning",
        "{{ $labels.training_job }}: the clock of rank {{ $labels.rank }}'s GPU on {{ $labels.host }} is "
        "throttled",
    ),
    Alert(
        "HorovodTrainGpuMemoryErrors",
        f'increase({_P}gpu_ecc_errors_total{{kind="uncorrected"}}[1h]) > 0',
        "0m",
        "critical",
        "{{ $labels.training_job }}: the GPU of rank {{ $labels.rank }} on {{ $labels.host }} has memory "
        "errors",
    ),
    Alert(
        "HorovodTrainReplicasDiffer",
        f'{_P}job_failed{{cause="replicas_differ"}} == 1',
        "0m",
        "critical",
        "{{ $labels.training_job }}: ended, because weights differ between ranks",
    ),
    Alert(
        "HorovodTrainJobFailed",
        f'{_P}job_failed{{cause!="replicas_differ"}} == 1 and on ({JOB}) '
        f"(time() - {_P}job_ended_timestamp_seconds < 3600)",
        "0m",
        "warning",
        "{{ $labels.training_job }}: it has failed ({{ $labels.cause }})",
    ),
    Alert(
        "HorovodTrainGraceTooShort",
        f"max by ({JOB}) ({_P}grace_needed_seconds) > max by ({JOB}) ({_P}grace_granted_seconds)",
        "5m",
        "warning",
        "{{ $labels.training_job }}: a preemption would take {{ $value | humanizeDuration }}, more "
        "than launch.grace_s",
    ),
)


def alerts(checkpoint_age_s: float = CHECKPOINT_AGE_S) -> tuple[Alert, ...]:
    """Return the alerting rules. CheckpointTooOld fires above ``checkpoint_age_s``, in seconds."""
    return tuple(replace(alert, expr=_completed(alert.expr, checkpoint_age_s)) for alert in _ALERTS)


def _completed(expr: str, checkpoint_age_s: float) -> str:
    expr = expr.replace(_AGE, f"{checkpoint_age_s:g}")
    is_of_job = expr.startswith(f"{_P}job_")
    return expr if is_of_job else f"({expr}) and on ({JOB}) {_PRESENT} unless on ({JOB}) ({_LEFT_BEHIND})"


def anchor(alert: Alert) -> str:
    """Return the anchor of an alert's section in the runbook."""
    return alert.name.lower()


def document(runbook: str = RUNBOOK, checkpoint_age_s: float = CHECKPOINT_AGE_S) -> dict[str, object]:
    """Return all rules in the structure of a rule file; alerts link to sections of the page ``runbook``."""
    recordings: list[dict[str, object]] = [{"record": each.name, "expr": each.expr} for each in RECORDINGS]
    alerting: list[dict[str, object]] = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.hold,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "runbook_url": f"{runbook}#{anchor(alert)}"},
        }
        for alert in alerts(checkpoint_age_s)
    ]
    return {
        "groups": [
            {"name": "horovod_train_recordings", "interval": "15s", "rules": recordings},
            {"name": "horovod_train_alerts", "interval": "15s", "rules": alerting},
        ]
    }


def as_yaml(rules: dict[str, object]) -> str:
    """Return rules as the text of a rule file."""
    return yaml.safe_dump(rules, sort_keys=False, width=1000)


def recordings_as_markdown(recordings: Iterable[Recording] = RECORDINGS) -> str:
    """Return a Markdown table of recording rules for the documentation."""
    rows = ["| series | meaning |", "|---|---|"]
    return "\n".join([*rows, *(f"| `{each.name}` | {each.help} |" for each in recordings)])
