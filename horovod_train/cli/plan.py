"""Output of ``--dry-run`` and of ``plan``."""

from __future__ import annotations

from collections.abc import Iterator

import click

from horovod_train.config.schema import Job
from horovod_train.config.strategies import axes_of
from horovod_train.events.text import learning_rate
from horovod_train.launch.base import LaunchPlan, LaunchRequest
from horovod_train.lr.arguments import ArgumentSchedules
from horovod_train.lr.chart import chart
from horovod_train.lr.optimizer_arguments import ArgumentScaling
from horovod_train.lr.policy import EpochLength, policy_of
from horovod_train.registry import SCRIPT

ARGUMENT_HEIGHT = 3


def plan_as_text(request: LaunchRequest, plan: LaunchPlan, *, draws: bool = False) -> str:
    """Return the launch plan of a job as text, preceded by the learning rate unless the job is a script.

    Args:
        request: The job and its ranks.
        plan: The launch plan.
        draws: Also draw the learning rate, and the schedules of the optimizer's arguments, as charts.

    Raises:
        UserError: The learning rate is not valid at this number of ranks.
    """
    job = request.job
    if job.framework == SCRIPT:  # a script sets its own learning rate
        return plan.as_text()
    num_data_ranks = axes_of(job.strategy, request.num_ranks).data
    global_batch_size = job.global_batch_size(num_data_ranks)
    policy = policy_of(job, num_data_ranks)
    policy.check()
    ArgumentScaling.of(job, num_data_ranks).check(job)
    lr = learning_rate(job.lr.scaling, job.lr.base_lr, job.lr.reference_batch_size, policy.peak_lr)
    batch = f"{request.num_ranks} rank(s), global batch {global_batch_size}"
    lines = [f"# learning rate {lr} ({batch})", *(charts(job, num_data_ranks) if draws else ())]
    return "\n".join([*lines, plan.as_text()])


def warn_from_study(request: LaunchRequest) -> None:
    """Print a warning if a study of the job has found that its global batch loses accuracy."""
    from horovod_train.study.advice import advice_for

    if text := advice_for(request.job, request.num_ranks):
        click.echo(f"warning: {text}", err=True)


def charts(job: Job, num_data_ranks: int) -> Iterator[str]:
    """Yield charts of the schedules of a job on a number of data-parallel ranks, as comment lines."""
    policy, train = policy_of(job, num_data_ranks), job.train
    epochs, warmup = float(train.most_epochs), train.batch_warmup
    limit = train.limit
    ends_by_limit = train.epochs is None and limit is not None
    # The number of samples is not known here, so that only durations in the unit of the job's length are.
    unit = limit.unit if limit is not None and ends_by_limit else "epochs"
    durations = policy.durations
    for given in job.optimizer.schedules.values():
        durations += [] if isinstance(given, str) else [position for position, _ in given]
    others = [str(each) for each in durations if each.amount and each.unit != unit]
    convert = EpochLength(train.max_steps or 1, train.max_samples).in_epochs
    if ends_by_limit:
        epochs = 1.0  # of the limit
        policy = policy.ending_at(epochs)
    of_limit = f"if the job ends after {limit}, the schedule ends with it"
    if ends_by_limit:
        of_limit = f"the schedule ends after {limit}, whichever part of an epoch that is"
    notes = [
        of_limit if limit is not None else "",
        "the largest possible rate: AdaScale multiplies the base rate by the measured gain"
        if policy.scaled.follows_gain
        else "",
        "without reductions on a plateau" if policy.schedule.metric_name is not None else "",
        f"the batch grows from {warmup.start} samples during {warmup.length}" if warmup else "",
        f"no chart: where {', '.join(dict.fromkeys(others))} ends depends on the data" if others else "",
    ]
    yield from (f"# {note}" for note in notes if note)
    if others or (ends_by_limit and warmup):
        return
    policy = policy.in_epochs(convert, train)
    gain = policy.scaled.rate if policy.scaled.follows_gain else None
    end = str(limit) if ends_by_limit else f"{epochs:g} epochs"
    yield from (f"# {line}" for line in chart(lambda at: policy.at(at, gain=gain), epochs, end=end))
    schedules = ArgumentSchedules(job.optimizer.schedules, epochs, convert)
    for name in job.optimizer.schedules:
        yield f"# optimizer.schedules.{name}"
        lines = chart(lambda at, name=name: schedules.at(at)[name], epochs, height=ARGUMENT_HEIGHT, end=end)  # type: ignore[misc]
        yield from (f"# {line}" for line in lines)
