"""Distributed training with Horovod, on one process or a thousand ranks.

``horovod_train.init()`` is the entry point for user-defined training loops; see ``session.py``. Exported
names are imported on first access, so that ``import horovod_train`` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horovod_train.config.schema import LearningRate
    from horovod_train.session import Session, init

__version__ = "0.1.0"

_EXPORTS = {
    "LearningRate": "horovod_train.config.schema",
    "Session": "horovod_train.session",
    "init": "horovod_train.session",
}

__all__ = ["LearningRate", "Session", "__version__", "init"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'horovod_train' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
