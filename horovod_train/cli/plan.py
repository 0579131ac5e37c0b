"""Commands that show how a job would run, ``plan`` and ``render``, and the output of ``--dry-run``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Unpack

import click

from horovod_train.cli.options import (
    JobOrScriptCommand,
    LaunchOptions,
    job_argument,
    job_of,
    job_or_script_arguments,
    launch_options,
    script_option,
)
from horovod_train.config.arguments import axes_of
from horovod_train.config.schema import Job
from horovod_train.events.wire import learning_rate
from horovod_train.launch.base import LaunchPlan, LaunchRequest
from horovod_train.lr.policy import ArgumentScaling, ArgumentSchedules, EpochLength, chart, policy_of
from horovod_train.registry import ADVICE, SCRIPT, load_attribute

if TYPE_CHECKING:
    from horovod_train.config.support import JobSizes, MemoryEstimate


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


def warn_from_advice(request: LaunchRequest) -> None:
    """Print what is known against the job on its number of ranks, such as accuracy that a study saw lost."""
    for location in ADVICE:
        if text := load_attribute(location, what="advice")(request.job, request.num_ranks):
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


UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class Size(click.ParamType[float]):
    """Type of an option for a number of bytes, such as 16GiB."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the value in bytes."""
        found = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(UNITS)})", str(value))
        if found is None:
            self.fail(
                f"{value!r} is not a size; write a number and a unit, as in 16GiB or 500MiB", param, ctx
            )
        return float(found[1]) * UNITS[found[2]]


@click.command(name="plan")
@job_argument
@launch_options
@click.option(
    "--memory", is_flag=True, help="Estimate the memory of a rank under the strategies that declare it."
)
@click.option(
    "--device-memory",
    type=Size(),
    metavar="SIZE",
    help="Memory limit of a rank: also print the first strategy that fits, in a fixed order.",
)
def plan_command(
    job: str, *, memory: bool, device_memory: float | None, **options: Unpack[LaunchOptions]
) -> None:
    """Show the learning rate and the commands of JOB, or the memory that it needs.

    Memory is estimated with fake tensors: nothing is trained, and the model may exceed this machine's memory.
    """
    from horovod_train.launch.submit import make_plan, resolve

    request = resolve(job_of((job,), **options), options["run_id"])
    if not memory and device_memory is None:
        warn_from_advice(request)
        click.echo(plan_as_text(request, make_plan(request), draws=True))
        return
    for line in format_memory(request.job, request.num_ranks, device_memory):
        click.echo(line)


def format_memory(job: Job, num_ranks: int, limit_bytes: float | None) -> list[str]:
    """Return a table of the memory that a rank needs under strategies, as lines."""
    from horovod_train.config.support import first_that_fits, needs

    found = needs(sizes_of(job, num_ranks))
    micro_batch = f"micro-batches of {job.train.batch_size_per_rank}"
    lines = [
        f"# a rank of {num_ranks} needs, in MiB ({micro_batch}, optimizer {job.optimizer.name})",
        f"{'strategy':<26}{'weights':>9}{'gradients':>11}{'optimizer':>11}{'peak':>9}{'process':>9}",
        *(_line(name, need) for name, need in sorted(found.items(), key=lambda item: -item[1].peak)),
    ]
    if limit_bytes is not None:
        name = first_that_fits(found, limit_bytes)
        lines.append(
            f"# the first that fits {limit_bytes / 2**20:.0f} MiB: {name}"
            if name
            else f"# none fits {limit_bytes / 2**20:.0f} MiB: more ranks, smaller micro-batches "
            "(train.accumulation_steps), or train.activation_checkpointing"
        )
    return lines


def _line(name: str, need: MemoryEstimate) -> str:
    columns = (need.weights, need.gradients, need.optimizer, need.peak, need.process)
    numbers = [f"{size_bytes / 2**20:.0f}" for size_bytes in columns]
    widths = (9, 11, 11, 9, 9)
    return f"{name:<26}" + "".join(f"{n:>{w}}" for n, w in zip(numbers, widths, strict=True))


def sizes_of(job: Job, num_ranks: int) -> JobSizes:
    """Determine the sizes of a job in a separate process.

    Raises:
        UserError: The framework is not PyTorch, or the sizes cannot be determined.
    """
    from horovod_train.config.support import JobSizes, Sizes
    from horovod_train.errors import UserError

    if job.framework != "torch":
        raise UserError(
            f"plan --memory is for PyTorch's jobs, and this one is framework: {job.framework}",
            hint="watch horovod_train_resident_memory_peak_bytes of a run",
        )
    done = subprocess.run(
        [sys.executable, "-P", "-m", "horovod_train.frameworks.torch.memory"],
        input=json.dumps({"job": job.model_dump(mode="json"), "num_ranks": num_ranks}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or not done.stdout.strip():
        raise UserError(f"the memory of the job could not be counted: {done.stderr.strip()[-2000:]}")
    document = json.loads(done.stdout.splitlines()[-1])
    if "problem" in document:
        raise UserError(document["problem"], hint=document["hint"])
    part = document["of_tensor_rank"]
    return JobSizes(job, num_ranks, Sizes(**document["whole"]), None if part is None else Sizes(**part))


@click.command(name="render", cls=JobOrScriptCommand)
@job_or_script_arguments
@script_option
@launch_options
def render_command(job: tuple[str, ...], **options: Unpack[LaunchOptions]) -> None:
    """Print the command, batch script or manifests with which the launcher starts JOB."""
    from horovod_train.launch.submit import make_plan, resolve

    click.echo(make_plan(resolve(job_of(job, **options), options["run_id"])).as_text_with_files())
