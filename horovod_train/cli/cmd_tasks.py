"""``horovod-train tasks``."""

from __future__ import annotations

import click

from horovod_train.config.shipped import job_file


@click.group(name="tasks")
def command() -> None:
    """Show the tasks that ship with this package."""


@command.command(name="ls")
def list_tasks() -> None:
    """List the names of tasks, and the locations of their code."""
    from horovod_train.registry import TASKS

    for name, location in sorted(TASKS.rows.items()):
        click.echo(f"{name:<16} {location}")


@command.command()
@click.argument("task")
def show(task: str) -> None:
    """Print the job description of TASK, as a template for another job."""
    click.echo(job_file(task).read_text(encoding="utf-8"), nl=False)
