"""``horovod-train plan``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Unpack

import click

from horovod_train.cli.options import LaunchOptions, job_argument, job_of, launch_options

if TYPE_CHECKING:
    from horovod_train.config.memory import JobSizes, MemoryEstimate
    from horovod_train.config.schema import Job

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
@click.option("--memory", is_flag=True, help="Estimate the memory of a rank under each strategy.")
@click.option(
    "--device-memory",
    type=Size(),
    metavar="SIZE",
    help="Memory limit of a rank: also print the fastest strategy that fits.",
)
def command(job: str, *, memory: bool, device_memory: float | None, **options: Unpack[LaunchOptions]) -> None:
    """Show the learning rate and the commands of JOB, or the memory that it needs.

    Memory is estimated with fake tensors: nothing is trained, and the model may exceed this machine's memory.
    """
    from horovod_train.cli.plan import plan_as_text, warn_from_study
    from horovod_train.launch.submit import make_plan, resolve

    request = resolve(job_of((job,), **options), options["run_id"])
    if not memory and device_memory is None:
        warn_from_study(request)
        click.echo(plan_as_text(request, make_plan(request), draws=True))
        return
    for line in format_memory(request.job, request.num_ranks, device_memory):
        click.echo(line)


def format_memory(job: Job, num_ranks: int, limit_bytes: float | None) -> list[str]:
    """Return a table of the memory that a rank needs under each strategy, as lines."""
    from horovod_train.config.memory import fastest_that_fits, needs

    found = needs(sizes_of(job, num_ranks))
    micro_batch = f"micro-batches of {job.train.batch_size_per_rank}"
    lines = [
        f"# a rank of {num_ranks} needs, in MiB ({micro_batch}, optimizer {job.optimizer.name})",
        f"{'strategy':<26}{'weights':>9}{'gradients':>11}{'optimizer':>11}{'peak':>9}{'process':>9}",
        *(_line(name, need) for name, need in sorted(found.items(), key=lambda item: -item[1].peak)),
    ]
    if limit_bytes is not None:
        name = fastest_that_fits(found, limit_bytes)
        lines.append(
            f"# the fastest that fits {limit_bytes / 2**20:.0f} MiB: {name}"
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
    from horovod_train.config.memory import JobSizes, Sizes
    from horovod_train.errors import UserError

    if job.framework != "torch":
        raise UserError(
            f"plan --memory is for PyTorch's jobs, and this one is framework: {job.framework}",
            hint="watch horovod_train_resident_memory_peak_bytes of a run",
        )
    done = subprocess.run(
        [sys.executable, "-P", "-m", "horovod_train.frameworks.torch.sizes.memory"],
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
