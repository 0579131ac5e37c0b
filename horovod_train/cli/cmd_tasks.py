"""``horovod-train tasks``."""

from __future__ import annotations

import click

from horovod_train.cli.options import find_job


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
    click.echo(find_job(task).read_text(encoding="utf-8"), nl=False)
