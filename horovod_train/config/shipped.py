"""Job descriptions that ship with this package, by name."""

from __future__ import annotations

from pathlib import Path

from horovod_train.errors import UserError, did_you_mean

TASKS_FOLDER = Path(__file__).parent.parent / "tasks"


def job_file(name: str) -> Path:
    """Return the file of a job, given its path or the name of a shipped task.

    Raises:
        UserError: Neither exists, or the path is that of a script.
    """
    refuse_script(name)
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


def refuse_script(name: str) -> None:
    """Raise ``UserError`` if a job is named by the path of a Python script."""
    if name.endswith(".py"):
        raise UserError(f"{name} is a script, not a job", hint=f"run it with --script {name} -- ARGS")
