"""``horovod-train cancel``."""

from __future__ import annotations

import click

from horovod_train.cli.options import job_id_argument


@click.command(name="cancel")
@job_id_argument
@click.option("--now", is_flag=True, help="Kill ranks at once, without saving a checkpoint.")
def command(job_id: str, *, now: bool) -> None:
    """End the job ID, and wait until all its processes have ended.

    It may first save a checkpoint, within the grace period launch.grace_s.
    """
    from horovod_train.launch.submit import submitted

    launcher, job = submitted(job_id)
    launcher.cancel(job, "kill" if now else "stop")
    status = launcher.wait(job)
    click.echo(f"{job.job_id}: {status}")
