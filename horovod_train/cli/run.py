"""Commands that run ranks: ``run``, and ``worker``, which runs one rank."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import click

from horovod_train.cli.options import (
    JobOrScriptCommand,
    LaunchOptions,
    dry_run_option,
    job_of,
    job_or_script_arguments,
    launch_options,
    script_option,
)

PAGE = "horovod_train.plugins.serve.command:page_of"
"""Function that returns a context manager, which serves a page of the runs in a folder."""


@click.command(name="run", cls=JobOrScriptCommand)
@job_or_script_arguments
@script_option
@launch_options
@dry_run_option
@click.option("--ui", is_flag=True, help="Serve a web page of the run, and print its address.")
@click.option("--once", is_flag=True, hidden=True)  # used by `submit`
def run_command(
    job: tuple[str, ...], *, dry_run: bool, ui: bool, once: bool, **options: Unpack[LaunchOptions]
) -> None:
    """Train JOB (a file, or the name of a shipped task), and wait until it ends.

    Run a plain Horovod script, which does not use this package, with `--script train.py -- ARGS`.
    """
    from horovod_train.cli.plan import plan_as_text, warn_from_advice
    from horovod_train.launch.submit import make_plan, resolve, run_job

    request = replace(resolve(job_of(job, **options), options["run_id"]), is_once=once)
    plan = make_plan(request)
    if not options["resolved"]:  # otherwise, `submit` has warned
        warn_from_advice(request)
    if dry_run:
        click.echo(plan_as_text(request, plan))
        return
    refuse_as_rank()
    from rich.console import Console

    from horovod_train.launch.console import EVENTS_VARIABLE, JobConsole
    from horovod_train.registry import load_attribute
    from horovod_train.system.streams import install_dropping_streams

    install_dropping_streams()
    launcher = request.job.launch.launcher
    click.echo(f"run {request.run_id}: {launcher} starts {request.num_ranks} rank(s); {request.run_dir}")
    page: AbstractContextManager[None] = nullcontext()
    if ui:
        page = load_attribute(PAGE, what="--ui")(request.run_dir)
    with page:
        console = JobConsole(Console(), has_events=EVENTS_VARIABLE in os.environ)
        code = run_job(request, plan, console, is_new=not options["resolved"])
    sys.exit(code)


def refuse_as_rank() -> None:
    """Refuse to run under horovodrun, mpirun or srun, because each of their processes would start all ranks.

    Raises:
        UserError: Such a launcher has started this process as one of several.
    """
    from horovod_train.errors import UserError
    from horovod_train.horovod.mpi import how_to_start, started_by, variables_of

    started = started_by(os.environ)
    # `srun --pty bash` also sets the variables of a rank, but its standard input is a terminal.
    if started is None or (started.program == "srun" and sys.stdin is not None and sys.stdin.isatty()):
        return
    raise UserError(
        f"`run` starts the ranks itself, but {started}",
        hint=f"{how_to_start(started, os.environ)}; if no launcher has started this shell, remove its "
        f"variables: `unset {' '.join(variables_of(started, os.environ))}`",
    )


@click.command(name="worker")
@click.argument("job", type=click.Path(path_type=Path))
@click.option("--run-id", metavar="NAME", help="Name of this run; default: derived from the current time.")
@click.option("--events", is_flag=True, help="Write events for `horovod-train run` instead of text.")
def worker_command(job: Path, run_id: str | None, *, events: bool) -> None:
    """Run one rank of JOB.

    `horovodrun -np 4 horovod-train worker job.yaml` trains exactly as `horovod-train run -n 4 job.yaml` does.
    """
    from horovod_train.worker import WorkerOptions, main

    sys.exit(main(WorkerOptions(job, run_id, as_events=events)))
