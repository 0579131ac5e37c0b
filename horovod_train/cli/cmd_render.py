"""``horovod-train render``."""

from __future__ import annotations

from typing import Unpack

import click

from horovod_train.cli.options import LaunchOptions, job_argument, launch_options, make_request


@click.command(name="render")
@job_argument
@launch_options
def command(job: str, **options: Unpack[LaunchOptions]) -> None:
    """Print what the launcher of JOB would run, submit or apply: a command, a batch script, manifests."""
    from horovod_train.launch.submit import make_plan

    click.echo(make_plan(make_request(job, **options)).in_full())
