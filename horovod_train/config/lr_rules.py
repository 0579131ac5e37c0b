"""Rules for the sections ``lr`` and ``optimizer``, and for the global batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from horovod_train.config.arguments import DECAY_ARGS
from horovod_train.config.duration import Duration, increasing
from horovod_train.config.optimization import AUTO
from horovod_train.config.schema import Job
from horovod_train.config.support import factors_of_rule, follows_gain
from horovod_train.errors import Problem, UserError
from horovod_train.registry import SCALINGS, SCHEDULES


def learning_rate_is_set_once(job: Job) -> Iterator[Problem]:
    """Refuse a learning rate in the optimizer's arguments, because ``lr`` sets it in each step."""
    if "lr" in job.optimizer.args:
        yield Problem(
            "optimizer.args.lr",
            repr(job.optimizer.args["lr"]),
            "the learning rate is set in each step and would overwrite this",
            "move it to lr.base_lr",
        )


def decay_has_its_arguments(job: Job) -> Iterator[Problem]:
    """Check the arguments of the schedule, and whether it fits the warm-up.

    Those of a function or class of a file are checked when it is called, because that runs the file.
    """
    problems = list(DECAY_ARGS.problems(job.lr.decay, job.lr.decay_args))
    yield from problems
    if not problems and job.lr.decay in SCHEDULES.rows:
        try:
            model: Any = DECAY_ARGS.model(job.lr.decay)
        except UserError as error:
            yield Problem("lr.decay", repr(job.lr.decay), error.message, error.hint)
            return
        if model is not None:
            yield from model.model_validate(job.lr.decay_args).problems(job.lr.warmup)


def positions_increase(job: Job) -> Iterator[Problem]:
    """Require increasing positions in one unit in schedules of arguments."""
    for name, points in job.optimizer.schedules.items():
        path = f"optimizer.schedules.{name}"
        if not points:
            yield Problem(path, "[]", "must be a list of [position, value]")
        if isinstance(points, str):
            continue
        positions = [position for position, _ in points]
        try:
            increasing(positions)
        except ValueError as error:
            yield Problem(path, ", ".join(map(str, positions)), str(error))


def _sets_arguments(job: Job) -> bool:
    """Return whether the scaling rule changes arguments of the optimizer besides the rate."""
    scaled = factors_of_rule(job.lr.scaling)
    return scaled.one_minus_beta != 1 or scaled.epsilon != 1


def exceeded(duration: Duration, job: Job) -> str:
    """Return the field that ends a job before a duration, with its value; empty: none, or not known."""
    train = job.train
    if duration.unit == "epochs" and duration.amount > train.most_epochs:
        return f"train.epochs = {train.most_epochs}"
    limit = train.limit
    if duration.unit == "steps" and follows_gain(job.lr.scaling):
        return ""  # those of the reference batch
    if limit is not None and duration.unit == limit.unit and duration.amount > limit.amount:
        return f"train.max_{limit.unit} = {limit.amount}"
    return ""


def warmup_fits(job: Job) -> Iterator[Problem]:
    """Require that warm-up ends before training, and refuse what has no effect without warm-up."""
    lr = job.lr
    if limit := exceeded(lr.warmup, job):
        yield Problem("lr.warmup", str(lr.warmup), f"must be at most {limit}")
    if lr.warmup.amount == 0 and factors_of_rule(lr.scaling).warmup != 1:
        yield Problem(
            "lr.warmup",
            "0",
            f"lr.scaling: {lr.scaling} lengthens the warm-up with the global batch, and there is none",
            "set the warm-up of the reference batch, or use lr.scaling: sqrt",
        )
    if lr.warmup_start_lr is not None and lr.warmup.amount == 0:
        yield Problem(
            "lr.warmup_start_lr",
            f"{lr.warmup_start_lr:g}",
            "has no effect without lr.warmup",
        )


def global_batch_is_set_once(job: Job) -> Iterator[Problem]:
    """Refuse accumulation steps next to a global batch, and a batch warm-up that contradicts other fields."""
    train = job.train
    if train.global_batch_size is not None and train.accumulation_steps != 1:
        yield Problem(
            "train.accumulation_steps",
            str(train.accumulation_steps),
            "is computed from train.global_batch_size",
            "remove one of them",
        )
    if train.batch_warmup is None:
        return
    length = train.batch_warmup.length
    if limit := exceeded(length, job):
        yield Problem("train.batch_warmup.length", str(length), f"must be at most {limit}")
    for path, is_set in (
        ("lr.scaling", _sets_arguments(job)),
        ("lr.scale_weight_decay", job.lr.scale_weight_decay),
    ):
        if is_set:
            yield Problem(
                path,
                "",
                "sets arguments of the optimizer for one global batch, and train.batch_warmup changes it",
                "remove one of them",
            )


def length_is_set_once(job: Job) -> Iterator[Problem]:
    """Refuse two limits: which of them ends the job would depend on the number of ranks."""
    if job.train.max_steps is not None and job.train.max_samples is not None:
        yield Problem(
            "train.max_samples",
            str(job.train.max_samples),
            f"ends the job, and so does train.max_steps = {job.train.max_steps}",
            "remove one of them",
        )


def scaling_is_known(job: Job) -> Iterator[Problem]:
    """Require ``lr.scaling`` with an optimizer for which no rule is established."""
    if job.lr.scaling == AUTO and job.optimizer.scaling is None:
        yield Problem(
            "lr.scaling",
            "",
            f"must be set: no scaling rule is established for optimizer {job.optimizer.name}",
            "none, if base_lr is tuned for the global batch; otherwise sqrt or linear, which "
            "`horovod-train study` compares",
        )


def gain_is_supported(job: Job) -> Iterator[Problem]:
    """Refuse a measured gain with optimizers other than SGD, and with rules that it replaces."""
    if not follows_gain(job.lr.scaling):
        return
    if job.optimizer.name != "sgd" and ":" not in job.optimizer.name:
        yield Problem(
            "optimizer.name",
            repr(job.optimizer.name),
            f"lr.scaling: {job.lr.scaling} is derived for SGD with momentum",
            "use sgd, or lr.scaling: sqrt or adam_sqrt",
        )
    if job.train.epochs is None and job.train.limit is not None:
        yield Problem(
            "train.epochs",
            "null",
            f"lr.scaling: {job.lr.scaling} counts scale-invariant epochs, whose number of steps is not known",
            "set train.epochs, with which schedules end",
        )
    if job.lr.scale_weight_decay:
        yield Problem(
            "lr.scale_weight_decay",
            "True",
            f"lr.scaling: {job.lr.scaling} has no fixed factor",
            "leave it out",
        )


def noise_scale_is_measurable(job: Job) -> Iterator[Problem]:
    """Refuse the gradient noise scale where local gradients are not available."""
    interval = job.metrics.noise_scale_every_steps
    field, found = "metrics.noise_scale_every_steps", str(interval)
    if follows_gain(job.lr.scaling):
        field, found = "lr.scaling", repr(job.lr.scaling)
    elif interval is None:
        if job.metrics.noise_scale_groups:
            yield Problem(
                "metrics.noise_scale_groups",
                "True",
                "has no effect without metrics.noise_scale_every_steps",
                "set both",
            )
        return
    if job.allreduce.codec is not None:
        reason = "the sum of compressed gradients is not the mean of the ranks' gradients"
        yield Problem(
            field, found, f"cannot be combined with allreduce.codec: {reason}", "leave the codec out"
        )
    if job.train.cuda_graph is not False:
        yield Problem(
            field,
            found,
            "cannot be combined with train.cuda_graph: the local norms are computed by the host's calls",
            "set train.cuda_graph: false",
        )


def schedules_are_supported(job: Job) -> Iterator[Problem]:
    """Refuse schedules of the rate as an argument, and schedules that other fields contradict."""
    schedules = job.optimizer.schedules
    if "lr" in schedules:
        yield Problem("optimizer.schedules.lr", "", "the learning rate has its own schedule", "use lr.decay")
    if schedules and job.train.cuda_graph is not False:
        yield Problem(
            "optimizer.schedules",
            "",
            "cannot be combined with train.cuda_graph: a graph contains the arguments of the optimizer",
            "set train.cuda_graph: false",
        )
    for name in sorted({"beta1", "beta2", "momentum"} & schedules.keys()):
        points = schedules[name]
        if isinstance(points, list) and any(point[1] >= 1 for point in points):
            yield Problem(f"optimizer.schedules.{name}", str(points), "must have values below 1")
    if {"beta1", "beta2"} & schedules.keys() and _sets_arguments(job):
        reason = "sets the betas, which optimizer.schedules replaces"
        yield Problem("lr.scaling", repr(job.lr.scaling), reason, "remove one")
    if "weight_decay" in schedules and job.lr.scale_weight_decay:
        yield Problem(
            "lr.scale_weight_decay", "True", "optimizer.schedules.weight_decay sets the values", "remove one"
        )


def momentum_correction_is_supported(job: Job) -> Iterator[Problem]:
    """Refuse momentum correction where momentum is not corrected."""
    if job.lr.momentum_correction and job.optimizer.name != "sgd" and ":" not in job.optimizer.name:
        yield Problem(
            "lr.momentum_correction", "True", "is a correction for sgd with momentum", "leave it out"
        )


CODE_TABLES = {"lr.scaling": SCALINGS, "lr.decay": SCHEDULES}

LR_RULES = (
    learning_rate_is_set_once,
    decay_has_its_arguments,
    positions_increase,
    warmup_fits,
    global_batch_is_set_once,
    length_is_set_once,
    scaling_is_known,
    gain_is_supported,
    noise_scale_is_measurable,
    schedules_are_supported,
    momentum_correction_is_supported,
)
