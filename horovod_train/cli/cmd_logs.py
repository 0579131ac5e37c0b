"""``horovod-train logs``."""

from __future__ import annotations

import click

from horovod_train.cli.options import job_id_argument


@click.command(name="logs")
@job_id_argument
@click.option("-f", "--follow", is_flag=True, help="Continue until the job ends.")
def command(job_id: str, *, follow: bool) -> None:
    """Show the output of the job ID."""
    from horovod_train.events.wire import parse_line
    from horovod_train.launch.submit import submitted

    launcher, job = submitted(job_id)
    for line in launcher.logs(job, follow=follow):
        text = parse_line(line).readable()
        if text is not None:
            click.echo(text)
