"""``horovod-train render``."""

from __future__ import annotations

from typing import Any

import click

from horovod_train.cli.options import job_argument, launch_options, make_request


@click.command(name="render")
@job_argument
@launch_options
def command(job: str, **options: Any) -> None:
    """Print what the launcher of JOB would run, submit or apply: a command, a batch script, manifests."""
    from horovod_train.launch.submit import make_plan

    click.echo(make_plan(make_request(job, **options)).in_full())
