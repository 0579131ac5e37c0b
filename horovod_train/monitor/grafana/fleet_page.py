"""Dashboard of all jobs: states, requested and running ranks, failures."""

from __future__ import annotations

from horovod_train.monitor.grafana.panels import Page, panel

_JOB = "{{training_job}}"
_MISSING = "(horovod_train_job_wanted_ranks - horovod_train_job_present_ranks)"
_RUNNING = 'horovod_train_job_state{state=~"starting|running"}'

JOBS = (
    panel(
        "number",
        "Jobs by state",
        "The newest run of each job.",
        ("count by (state) (horovod_train_job_state)", "{{state}}"),
        span=24,
    ),
    panel(
        "table",
        "States",
        "The newest run of each job.",
        ("max by (training_job, run, state) (horovod_train_job_state)", ""),
        span=8,
    ),
    panel(
        "bars",
        "Running for",
        "How long jobs that go on have been running.",
        (f"(time() - horovod_train_job_begun_timestamp_seconds) and on (training_job, run) {_RUNNING}", _JOB),
        unit="s",
        span=8,
    ),
    panel(
        "table",
        "Failures",
        "Why jobs have failed, in the last week.",
        ("max by (training_job, run, cause) (horovod_train_job_failed)", ""),
        span=8,
    ),
)

RANKS = (
    panel("graph", "Ranks that train", "Of all jobs.", ("horovod_train_job_present_ranks", _JOB)),
    panel(
        "graph",
        "Ranks that are missing",
        "Requested by the job but missing, while it runs.",
        (
            f"{_MISSING} and on (training_job, run) {_RUNNING}",
            _JOB,
        ),
    ),
    panel(
        "graph",
        "Idle ranks",
        "Time lost to slower ranks and to the network, of all jobs.",
        (
            "sum by (training_job) (horovod_train:waiting:ratio + horovod_train:communication:ratio)",
            _JOB,
        ),
    ),
)

TROUBLE = (
    panel(
        "graph",
        "Started again",
        "Restarts of ranks of a run.",
        ("horovod_train_job_restarts_total", _JOB),
        span=6,
    ),
    panel(
        "graph",
        "Preemptions",
        "Ranks that were preempted, and saved.",
        ("horovod_train_job_preemptions_total", _JOB),
        span=6,
    ),
    panel("graph", "Hosts lost", "Counted each time.", ("horovod_train_job_lost_hosts_total", _JOB), span=6),
    panel(
        "graph",
        "Events a minute",
        "By kind, of all jobs.",
        ("sum by (kind) (rate(horovod_train_job_events_total[5m])) * 60", "{{kind}}"),
        span=6,
    ),
)

PAGE = Page(
    "horovod-train-fleet",
    "horovod_train: Fleet",
    "All jobs: how they stand, ranks wanted and present, failures. It needs `horovod-train targets serve`.",
    (),
    (("Jobs", JOBS), ("Ranks", RANKS), ("Trouble", TROUBLE)),
)
