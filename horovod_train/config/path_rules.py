"""Rules for paths of a job."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

from horovod_train.config.code_fields import PATHS, code_fields
from horovod_train.config.problems import shorten
from horovod_train.config.schema import Job
from horovod_train.config.support import launcher_support
from horovod_train.errors import Problem

# Limits of Linux; a path also needs room for the files of a run.
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 3800
SECTIONS = {path.partition(".")[0] for path in PATHS}


def folders_are_valid(job: Job) -> Iterator[Problem]:
    """The home folder in a path exists, and names are not too long."""
    folders = {
        "run_dir": job.run_dir,
        "checkpoint.dir": job.checkpoint.dir,
        "metrics.targets_dir": job.metrics.targets_dir,
    }
    for path, folder in folders.items():
        if folder is None:
            continue
        try:
            parts = Path(folder).expanduser().parts
        except RuntimeError as error:
            yield Problem(path, shorten(folder), f"{error}", "write the whole path")
            continue
        sizes = [len(os.fsencode(part)) for part in parts]
        if max(sizes, default=0) > MAX_NAME_BYTES or sum(sizes) + len(sizes) > MAX_PATH_BYTES:
            text = f"is too long: at most {MAX_NAME_BYTES} bytes for a name, and {MAX_PATH_BYTES} for a path"
            yield Problem(path, shorten(folder), text)


def code_files_exist(job: Job) -> Iterator[Problem]:
    """Require that files of the user's code exist; on Kubernetes, they may exist only in the image."""
    if launcher_support(job.launch.launcher).has_own_image:
        return
    if job.task.startswith("__main__:"):
        hint = "put it into a file, and write task: FILE.py:" + job.task.partition(":")[2]
        yield Problem("task", repr(job.task), "is in the program itself, which ranks do not import", hint)
    for path, _, _, location in code_fields(job.model_dump(include=SECTIONS)):
        file, _, attribute = location.rpartition(":")
        if not file.endswith(".py") and "/" in file:
            found = f"{file!r} is neither a module nor a file that ends in .py"
            yield Problem(path, repr(location), found, "write module:Class or path/to/file.py:Class")
        if not file.endswith(".py"):
            continue
        try:
            is_missing = not Path(file).expanduser().is_file()
        except (OSError, RuntimeError) as error:  # a name that is too long, or `~nobody`
            yield Problem(path, shorten(location), f"cannot be found: {error}")
            continue
        if is_missing:
            yield no_such_file(path, location, file)
        elif attribute != "__main__" and attribute not in (names := names_in(Path(file).expanduser())):
            hint = f"it defines {', '.join(sorted(names)[:10])}" if names else ""
            yield Problem(path, repr(location), f"{file} does not define {attribute}", hint)


class _Everything(frozenset[str]):
    """The names of a file that cannot be known without running it."""

    def __contains__(self, name: object) -> bool:
        return True


def names_in(file: Path) -> frozenset[str]:
    """Return the names that a Python file defines at its top level, without running it.

    All names are contained if the file cannot be read or parsed, or defines names in another way.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return _Everything()  # running it reports the reason
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.alias(name="*"):
                return _Everything()
            case ast.alias(name=name, asname=other):
                names.add(other or name.partition(".")[0])
            case ast.Name(id="globals" | "locals" | "vars" | "exec" | "eval" | "setattr"):
                return _Everything()
            case ast.Attribute(attr="__dict__"):
                return _Everything()
    return _Everything() if "__getattr__" in names else frozenset(names)


def no_such_file(path: str, location: str, file: str) -> Problem:
    """Return the problem of a field whose file does not exist."""
    return Problem(path, repr(location), f"no such file: {file}", "paths start at the job file's folder")
