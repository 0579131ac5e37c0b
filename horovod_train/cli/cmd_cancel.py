"""``horovod-train cancel``."""

from __future__ import annotations

import click

from horovod_train.cli.options import job_id_argument


@click.command(name="cancel")
@job_id_argument
@click.option("--now", is_flag=True, help="Do not let it save.")
def command(job_id: str, *, now: bool) -> None:
    """End the job ID and return when nothing of it is left.

    It may save first, for as long as launch.grace_s allows.
    """
    from horovod_train.launch.submit import submitted

    launcher, job = submitted(job_id)
    launcher.cancel(job, "kill" if now else "stop")
    status = launcher.wait(job)
    click.echo(f"{job.job_id}: {status}")
