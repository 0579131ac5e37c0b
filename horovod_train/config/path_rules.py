"""Rules for paths of a job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from horovod_train.config.kubernetes_rules import LAUNCHER
from horovod_train.config.problems import shorten
from horovod_train.config.schema import Job
from horovod_train.errors import Problem

# Limits of Linux; a path also needs room for the files of a run.
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 3800


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


def task_file_exists(job: Job) -> Iterator[Problem]:
    """Require that the file of a task exists; on Kubernetes, it may exist only in the image."""
    file, _, _ = job.task.rpartition(":")
    if not file.endswith(".py") or job.launch.launcher == LAUNCHER:
        return
    try:
        is_missing = not Path(file).expanduser().is_file()
    except (OSError, RuntimeError) as error:  # a name that is too long, or `~nobody`
        yield Problem("task", shorten(job.task), f"cannot be found: {error}")
        return
    if is_missing:
        yield no_such_file(job.task, file)


def no_such_file(task: str, file: str) -> Problem:
    """Return the problem of a task whose file does not exist."""
    return Problem("task", repr(task), f"no such file: {file}", "paths start at the job file's folder")
