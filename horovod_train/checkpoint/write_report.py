"""How writing a checkpoint went."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WriteReport:
    """How writing a checkpoint went.

    Attributes:
        step: Optimizer step of the checkpoint.
        path: Where it is.
        seconds: Time to write and flush it.
        size_bytes: Bytes on disk.
        error: Why there is none; empty when it was written.
    """

    step: int
    path: str
    seconds: float
    size_bytes: int
    error: str = ""
