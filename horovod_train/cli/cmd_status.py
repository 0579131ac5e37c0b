"""``horovod-train status``."""

from __future__ import annotations

import json

import click

from horovod_train.cli.options import job_id_argument


@click.command(name="status")
@job_id_argument
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(job_id: str, *, as_json: bool) -> None:
    """Show the state, the progress and the slow ranks of the job ID."""
    from horovod_train.launch.submit import submitted
    from horovod_train.monitor.brief import read_recent, summary_lines

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
