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
@click.option(
    "--key",
    metavar="TEXT",
    help="Idempotency key. If a job was started with this key, print its ID instead of starting another one.",
)
def command(
    job: tuple[str, ...], *, dry_run: bool, key: str | None, **options: Unpack[LaunchOptions]
) -> None:
    """Start JOB, print its ID, and return without waiting for its end."""
    from horovod_train.cli.plan import plan_as_text, warn_from_study
    from horovod_train.launch.submit import make_plan, resolve, submit_job, submit_once

    described = job_of(job, **options)
    request = resolve(described, options["run_id"])
    warn_from_study(request)
    if dry_run:
        click.echo(plan_as_text(request, make_plan(request)))
        return

    def warn(text: str) -> None:
        click.echo(text, err=True)

    if key:
        submitted, _ = submit_once(described, key, warn)
    else:
        submitted = submit_job(request, make_plan(request), warn)
    click.echo(submitted.job_id)
