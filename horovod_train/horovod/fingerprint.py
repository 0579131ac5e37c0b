"""Fingerprint of an environment: versions, engine and code, which must be equal on all hosts of a job.

Hosts are compared before a launch, and ranks before training. The latter includes launches without `run`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from horovod_train.config.support import frameworks_with_support
from horovod_train.horovod.cuda import torch_build
from horovod_train.horovod.mpi import installed_key, installed_mpi
from horovod_train.registry import make_task_importable

PACKAGES = ("horovod", "numpy", "mpi4py")
"""Distributions that affect results, or communication between ranks, with each framework."""
MAX_CODE_FILES = 2000
TIMEOUT_S = 20.0
OUR_CODE = Path(__file__).parent.parent

Fingerprint = Mapping[str, str]


def environment_fingerprint(task: str | None = None) -> dict[str, str]:
    """Return the fingerprint of this environment by name; ``task`` None: a task of this package."""
    versions = {f"{name} version": version for name in _packages() if (version := package_version(name))}
    if (torch := torch_build()) is not None:
        versions["torch version"] = torch.version  # with the local version, such as +cu130 or +cpu
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        **versions,
        "MPI library": str(installed_mpi() or "unknown"),
        "horovod build": installed_key() or "not built by horovod-train",
        "horovod_train code": code_digest(sorted(OUR_CODE.rglob("*.py"))),
        **({"task code": code_digest(task_files(task))} if task is not None else {}),
    }


def _packages() -> Iterator[str]:
    """Yield the distributions that affect results, or communication between ranks."""
    yield from PACKAGES
    for _, support in frameworks_with_support():
        yield from (*support.distributions, *support.affected_by)


def printed_fingerprint(script: str) -> dict[str, str]:
    """Return the fingerprint that a shell script prints, such as that of a container.

    Raises:
        OSError: The script fails, or does not end in time; contains the last line of its output.
    """
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", script],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"the container did not start within {TIMEOUT_S:g} s") from error
    if done.returncode:
        lines = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()
        raise OSError(f"the container does not start: {lines[-1]}")
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def task_files(task: str) -> list[Path]:
    """Return the source files of a task (``file.py:Class`` or ``module:Class``), at most ``MAX_CODE_FILES``.

    They are the Python files and packages in the folder of ``file.py``, or the module or its whole package.
    """
    place = task.rpartition(":")[0]
    if place.endswith(".py"):
        folder = Path(place).parent
    else:
        make_task_importable(task)
        try:
            spec = importlib.util.find_spec(place.partition(".")[0])
        except (ImportError, ValueError):
            return []
        if spec is None or spec.origin is None:
            return []
        folder = Path(spec.origin).parent
        if not (folder / "__init__.py").exists():
            return [Path(spec.origin)]
        return _python_files([folder])
    packages = [entry.parent for entry in sorted(folder.glob("*/__init__.py"))]
    return [*sorted(folder.glob("*.py")), *_python_files(packages)][:MAX_CODE_FILES]


def _python_files(folders: Iterable[Path]) -> list[Path]:
    return [file for folder in folders for file in sorted(folder.rglob("*.py"))][:MAX_CODE_FILES]


def code_digest(files: Sequence[Path]) -> str:
    """Return a short digest of the names and contents of files; unreadable files are ignored."""
    digest = hashlib.sha256()
    for file in files:
        try:
            content = file.read_bytes()
        except OSError:
            continue
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()[:12]


def package_version(name: str) -> str | None:
    """Return the version of an installed distribution; None: it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":  # in a container
    sys.stdout.write(json.dumps(environment_fingerprint(*sys.argv[1:])))
