"""``horovod-train drain``."""

from __future__ import annotations

import click

from horovod_train.cli.options import job_id_argument


@click.command(name="drain")
@job_id_argument
def command(job_id: str) -> None:
    """Request the job ID to save a checkpoint and exit with code 75, without a time limit."""
    from horovod_train.launch.submit import submitted

    launcher, job = submitted(job_id)
    launcher.cancel(job, "drain")
    status = launcher.status(job)
    if status.has_ended:
        click.echo(f"{job.job_id}: {status}")
        return
    click.echo(f"{job.job_id}: drain requested; `horovod-train wait {job.job_id}` returns when it has ended")
