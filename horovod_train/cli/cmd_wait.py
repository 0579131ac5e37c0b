"""``horovod-train wait``."""

from __future__ import annotations

import sys

import click

from horovod_train.cli.options import job_id_argument


@click.command(name="wait")
@job_id_argument
def command(job_id: str) -> None:
    """Wait until the job ID has ended, and exit with its exit code."""
    from horovod_train.launch.submit import submitted

    launcher, job = submitted(job_id)
    status = launcher.wait(job)
    click.echo(f"{job.job_id}: {status}")
    sys.exit(1 if status.exit_code is None else status.exit_code)
