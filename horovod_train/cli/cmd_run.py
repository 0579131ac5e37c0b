"""``horovod-train run``."""

from __future__ import annotations

import sys
from typing import Unpack

import click

from horovod_train.cli.options import (
    LaunchOptions,
    dry_run_option,
    job_argument,
    launch_options,
    make_request,
)


@click.command(name="run")
@job_argument
@launch_options
@dry_run_option
def command(job: str, *, dry_run: bool, **options: Unpack[LaunchOptions]) -> None:
    """Train JOB (a file, or the name of a shipped task) and stay with it to its end."""
    from horovod_train.cli.plan import in_words
    from horovod_train.launch.submit import make_plan, run_job

    request = make_request(job, **options)
    plan = make_plan(request)
    if dry_run:
        click.echo(in_words(request, plan))
        return
    from rich.console import Console

    from horovod_train.launch.console import JobConsole
    from horovod_train.streams import drop_what_cannot_be_shown

    drop_what_cannot_be_shown()
    launcher = request.job.launch.launcher
    click.echo(f"run {request.run_id}: {launcher} starts {request.num_ranks} rank(s); {request.run_dir}")
    sys.exit(run_job(request, plan, JobConsole(Console()), is_new=not options["resolved"]))
