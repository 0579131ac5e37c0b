"""Distributed training with Horovod, on one process or a thousand ranks.

``horovod_train.submit()`` starts jobs (``client.py``). ``horovod_train.init()`` is the entry point for
user-defined training loops (``session.py``). Exported names are imported on first access, so that
``import horovod_train`` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from horovod_train.version import __version__

if TYPE_CHECKING:
    from horovod_train.client import JobHandle, JobResult, job, jobs, submit
    from horovod_train.config.optimization import LearningRate
    from horovod_train.data.dataset import open_files
    from horovod_train.errors import JobFailedError
    from horovod_train.frameworks.torch.step.gathering import gather
    from horovod_train.plugins.serve.remote import Client
    from horovod_train.session import Session, init

_EXPORTS = {
    "Client": "horovod_train.plugins.serve.remote",
    "JobFailedError": "horovod_train.errors",
    "JobHandle": "horovod_train.client",
    "JobResult": "horovod_train.client",
    "LearningRate": "horovod_train.config.optimization",
    "Session": "horovod_train.session",
    "gather": "horovod_train.frameworks.torch.step.gathering",
    "init": "horovod_train.session",
    "job": "horovod_train.client",
    "jobs": "horovod_train.client",
    "open_files": "horovod_train.data.dataset",
    "submit": "horovod_train.client",
}

__all__ = [
    "Client",
    "JobFailedError",
    "JobHandle",
    "JobResult",
    "LearningRate",
    "Session",
    "__version__",
    "gather",
    "init",
    "job",
    "jobs",
    "open_files",
    "submit",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'horovod_train' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
