"""``horovod-train render``."""

from __future__ import annotations

from typing import Unpack

import click

from horovod_train.cli.options import (
    JobOrScriptCommand,
    LaunchOptions,
    job_of,
    job_or_script_arguments,
    launch_options,
    script_option,
)


@click.command(name="render", cls=JobOrScriptCommand)
@job_or_script_arguments
@script_option
@launch_options
def command(job: tuple[str, ...], **options: Unpack[LaunchOptions]) -> None:
    """Print the command, batch script or manifests with which the launcher starts JOB."""
    from horovod_train.launch.submit import make_plan, resolve

    click.echo(make_plan(resolve(job_of(job, **options), options["run_id"])).as_text_with_files())
