"""``horovod-train ui``, an alias of ``horovod-train serve``."""

from __future__ import annotations

from horovod_train.cli.cmd_serve import command

__all__ = ["command"]
