"""Commands for submitted jobs: submit, list, status, logs, wait, drain and cancel."""

from __future__ import annotations

import json
import sys
import time
from typing import Unpack

import click

from horovod_train.cli.options import (
    JobOrScriptCommand,
    LaunchOptions,
    dry_run_option,
    job_id_argument,
    job_of,
    job_or_script_arguments,
    launch_options,
    script_option,
)


@click.command(name="cancel")
@job_id_argument
@click.option("--now", is_flag=True, help="Kill ranks at once, without saving a checkpoint.")
def cancel_command(job_id: str, *, now: bool) -> None:
    """End the job ID, and wait until all its processes have ended.

    It may first save a checkpoint, within the grace period launch.grace_s.
    """
    from horovod_train.launch.submit import submitted

    launcher, job = submitted(job_id)
    launcher.cancel(job, "kill" if now else "stop")
    status = launcher.wait(job)
    click.echo(f"{job.job_id}: {status}")


@click.command(name="drain")
@job_id_argument
def drain_command(job_id: str) -> None:
    """Request the job ID to save a checkpoint and exit with code 75, without a time limit."""
    from horovod_train.launch.submit import submitted

    launcher, job = submitted(job_id)
    launcher.cancel(job, "drain")
    status = launcher.status(job)
    if status.has_ended:
        click.echo(f"{job.job_id}: {status}")
        return
    click.echo(f"{job.job_id}: drain requested; `horovod-train wait {job.job_id}` returns when it has ended")


@click.command(name="list")
@click.option("-a", "--all", "show_all", is_flag=True, help="Also list ended jobs.")
def list_command(*, show_all: bool) -> None:
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


@click.command(name="logs")
@job_id_argument
@click.option("-f", "--follow", is_flag=True, help="Continue until the job ends.")
def logs_command(job_id: str, *, follow: bool) -> None:
    """Show the output of the job ID."""
    from horovod_train.events.wire import parse_line
    from horovod_train.launch.submit import submitted

    launcher, job = submitted(job_id)
    for line in launcher.logs(job, follow=follow):
        text = parse_line(line).readable()
        if text is not None:
            click.echo(text)


@click.command(name="status")
@job_id_argument
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status_command(job_id: str, *, as_json: bool) -> None:
    """Show the state, the progress and the slow ranks of the job ID."""
    from horovod_train.launch.submit import submitted
    from horovod_train.monitor.history import read_recent, summary_lines

    launcher, job = submitted(job_id)
    status = launcher.status(job)
    if as_json:
        fields = {"job_id": job.job_id, "state": status.state, "exit_code": status.exit_code}
        click.echo(json.dumps({**fields, "message": status.message, "log_dir": str(job.log_dir)}))
        return
    code = "" if status.exit_code is None else f", exit code {status.exit_code}"
    click.echo(f"{job.job_id}: {status.state}{code}")
    if status.message:
        click.echo(f"  {status.message}")
    for line in summary_lines(read_recent(job.log_dir)):
        click.echo(f"  {line}")
    click.echo(f"  {job.log_dir}")


@click.command(name="wait")
@job_id_argument
def wait_command(job_id: str) -> None:
    """Wait until the job ID has ended, and exit with its exit code."""
    from horovod_train.launch.submit import submitted

    launcher, job = submitted(job_id)
    status = launcher.wait(job)
    click.echo(f"{job.job_id}: {status}")
    sys.exit(1 if status.exit_code is None else status.exit_code)


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
def submit_command(
    job: tuple[str, ...], *, dry_run: bool, key: str | None, **options: Unpack[LaunchOptions]
) -> None:
    """Start JOB, print its ID, and return without waiting for its end."""
    from horovod_train.cli.plan import plan_as_text, warn_from_advice
    from horovod_train.launch.submit import make_plan, resolve, submit_job, submit_once

    described = job_of(job, **options)
    request = resolve(described, options["run_id"])
    warn_from_advice(request)
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
