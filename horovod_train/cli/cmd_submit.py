"""``horovod-train submit``."""

from __future__ import annotations

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


@click.command(name="submit", cls=JobOrScriptCommand)
@job_or_script_arguments
@script_option
@launch_options
@dry_run_option
def command(job: tuple[str, ...], *, dry_run: bool, **options: Unpack[LaunchOptions]) -> None:
    """Start JOB, print its ID, and return immediately."""
    from horovod_train.cli.plan import plan_as_text
    from horovod_train.launch.submit import make_plan, resolve, submit_job

    request = resolve(job_of(job, **options), options["run_id"])
    plan = make_plan(request)
    if dry_run:
        click.echo(plan_as_text(request, plan))
        return
    click.echo(submit_job(request, plan, lambda text: click.echo(text, err=True)).job_id)
