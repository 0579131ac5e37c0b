"""``horovod-train list``."""

from __future__ import annotations

import time

import click


@click.command(name="list")
@click.option("-a", "--all", "show_all", is_flag=True, help="Also list ended jobs.")
def command(*, show_all: bool) -> None:
    """List the jobs that were started from this account, newest first."""
    from horovod_train.errors import HorovodTrainError
    from horovod_train.launch.base import JobStatus
    from horovod_train.launch.jobs import known_jobs
    from horovod_train.launch.submit import launcher_named

    for job in known_jobs():
        try:
            status = launcher_named(job.launcher).status(job)
        except HorovodTrainError as error:
            status = JobStatus("unknown", message=error.message)
        if show_all or not status.has_ended:
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.submitted_unix_s))
            click.echo(f"{job.job_id:<44} {job.launcher:<10} {when}  {status.state}")
