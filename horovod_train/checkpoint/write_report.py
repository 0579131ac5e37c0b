"""Result of writing a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WriteReport:
    """Result of an attempt to write a checkpoint.

    Attributes:
        step: Optimizer step of the checkpoint.
        seconds: Time for writing and flushing.
        size_bytes: Size of its files, without the manifest; 0 after an error.
        error: Reason why it was not written; empty: it was written.
    """

    step: int
    path: str
    seconds: float
    size_bytes: int
    error: str = ""
