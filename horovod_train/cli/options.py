"""Arguments that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from horovod_train.errors import UserError, did_you_mean

TASKS_FOLDER = Path(__file__).parent.parent / "tasks"

job_argument = click.argument("job", metavar="JOB")
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Override a field, as in --set train.epochs=3. Can be given several times.",
)


def find_job(name: str) -> Path:
    """Return the file of a job: a path, or the name of a shipped task.

    Raises:
        UserError: There is neither.
    """
    path = Path(name)
    shipped = {file.stem: file for file in sorted(TASKS_FOLDER.glob("*.yaml"))}
    if path.is_file():
        return path
    if name in shipped:
        return shipped[name]
    near = [*shipped, *(file.name for file in Path().glob("*.yaml"))]
    raise UserError(
        f"no job {name!r}: neither a file nor a shipped task ({', '.join(shipped)})",
        hint=did_you_mean(name, near),
    )


def say(text: Any) -> None:
    """Print a line at once, so that long steps can be followed through a pipe."""
    click.echo(text)
