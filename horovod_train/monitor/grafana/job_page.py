"""Dashboard of a job: loss, evaluation, throughput and checkpoints."""

from __future__ import annotations

from horovod_train.monitor.grafana.panels import JOB_VARIABLES, Page, of_selected, panel, same_on_all
from horovod_train.telemetry.catalog import SHOWN_NUMBERS

_JOB = "{{training_job}} {{run}}"
_BY = "by (training_job, run)"

STANDS = (
    panel("number", "Epoch", "How far is training?", (same_on_all("horovod_train_epoch"), _JOB), span=4),
    panel("number", "Loss", "Mean over all ranks.", (same_on_all("horovod_train_loss"), _JOB), span=4),
    panel(
        "number",
        "Samples a second",
        "Of all ranks together.",
        (of_selected("horovod_train:samples:job_rate"), _JOB),
        span=4,
    ),
    panel(
        "number",
        "Ranks",
        "Ranks that take part, and ranks that the job asked for.",
        (same_on_all("horovod_train_world_size_present"), "present"),
        (same_on_all("horovod_train_world_size_wanted"), "wanted"),
        span=4,
    ),
    panel(
        "number",
        "Scaling efficiency",
        "Samples a second in units of as many ranks that each do what one alone has done. Empty while "
        "run_dir has no finished run of the same job on one rank.",
        (of_selected("horovod_train:scaling_efficiency:ratio"), _JOB),
        unit="percentunit",
        span=4,
    ),
    panel(
        "number",
        "Last checkpoint",
        "So much work would be lost if a host failed now.",
        (same_on_all("horovod_train_checkpoint_age_seconds"), _JOB),
        unit="s",
        span=4,
    ),
)

LEARNING = (
    panel(
        "graph",
        "Loss over time",
        "Does it learn? Mean over all ranks.",
        (same_on_all("horovod_train_loss"), _JOB),
        span=12,
    ),
    panel(
        "graph",
        "Evaluation",
        "How good is the model? Over all samples of all ranks.",
        (same_on_all("horovod_train_evaluation", "training_job, run, metric"), "{{metric}}"),
        span=12,
    ),
    panel(
        "graph",
        "Learning rate",
        "Is it what the schedule and the global batch say?",
        (same_on_all("horovod_train_learning_rate"), _JOB),
    ),
    panel(
        "graph",
        "Gradient norm",
        "Do gradients explode or vanish? Before clipping.",
        (same_on_all("horovod_train_gradient_norm"), _JOB),
    ),
    panel(
        "graph",
        "Steps not used",
        "Steps lost to NaN and infinity.",
        (same_on_all("horovod_train_non_finite_steps_total"), _JOB),
    ),
)

SPEED = (
    panel(
        "graph",
        "Samples a second over time",
        "Of all ranks together.",
        (of_selected("horovod_train:samples:job_rate"), _JOB),
        span=12,
    ),
    panel(
        "graph",
        "Where the time of a step goes",
        "Mean over ranks. In allreduce_wait ranks wait for each other and for the network; the panel below "
        "tells these apart.",
        (
            f"avg by (training_job, run, phase) ({of_selected('horovod_train:phase_seconds:per_step')})",
            "{{phase}}",
        ),
        unit="s",
        span=12,
    ),
    panel(
        "graph",
        "Idle ranks",
        "Number of ranks whose time is lost to slower ranks, and to communication.",
        (f"sum {_BY} ({of_selected('horovod_train:waiting:ratio')})", "slower ranks"),
        (f"sum {_BY} ({of_selected('horovod_train:communication:ratio')})", "network"),
    ),
    panel(
        "graph",
        "Gradient bytes a second",
        "What a rank gives to all-reduce.",
        (f"avg {_BY} (rate({of_selected('horovod_train_allreduce_bytes_total')}[2m]))", _JOB),
        unit="Bps",
    ),
    panel(
        "graph",
        "Model FLOP utilization",
        "Part of the devices' peak that forward and backward use. Empty where the peak is not known.",
        (f"avg {_BY} ({of_selected('horovod_train:model_flops:utilization_ratio')})", _JOB),
        unit="percentunit",
    ),
    *(
        panel("graph", metric.shown, metric.question, (same_on_all(metric.name), _JOB))
        for metric in SHOWN_NUMBERS.values()
    ),
    panel(
        "graph",
        "Gradient noise scale by parameter group",
        "Critical batch size of each parameter group, in samples. Empty unless the job measures it.",
        (
            same_on_all("horovod_train_group_noise_scale_samples", "training_job, run, group"),
            f"{_JOB} group {{{{group}}}}",
        ),
    ),
)

_WRITE = "horovod_train_checkpoint_write_seconds"
SAFETY = (
    panel(
        "graph",
        "Age of the last checkpoint",
        "So much work would be lost if a host failed then.",
        (same_on_all("horovod_train_checkpoint_age_seconds"), _JOB),
        unit="s",
        span=6,
    ),
    panel(
        "graph",
        "Time to write a checkpoint",
        "Is the file system fast enough?",
        (f"max {_BY} ({of_selected(f'{_WRITE}_sum')} / {of_selected(f'{_WRITE}_count')})", "mean"),
        unit="s",
        span=6,
    ),
    panel(
        "graph",
        "Size of a checkpoint",
        "How much room do checkpoints take?",
        (same_on_all("horovod_train_checkpoint_size_bytes"), _JOB),
        unit="bytes",
        span=6,
    ),
    panel(
        "graph",
        "Grace",
        "Time that ranks need to save and leave, and time that they get (launch.grace_s).",
        (same_on_all("horovod_train_grace_needed_seconds"), "needed"),
        (same_on_all("horovod_train_grace_granted_seconds"), "granted"),
        unit="s",
        span=6,
    ),
    panel(
        "graph",
        "Lost calls of trackers",
        "Calls of experiment trackers that were dropped or failed, since the ranks started.",
        (same_on_all("horovod_train_tracker_lost_calls_total"), _JOB),
        span=6,
    ),
)

PAGE = Page(
    "horovod-train-job",
    "horovod_train: Job",
    "Whether a job learns, how fast, and whether its work is safe.",
    JOB_VARIABLES,
    (("How it stands", STANDS), ("Learning", LEARNING), ("Speed", SPEED), ("Is the work safe?", SAFETY)),
)
