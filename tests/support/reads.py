"""Who reads a number that may be on a device, and so waits for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import horovod_train
from horovod_train.frameworks.torch.step.deferred import Sent

PACKAGE = Path(horovod_train.__file__).parent
SITE = Path(torch.__file__).parents[1]
READS = [
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "cpu", "numpy", "__float__", "__bool__", "__int__", "__index__")
]


class ReadsOfOursError(AssertionError):
    """This package has read a number from the device."""


class Watch:
    """Refuses reads of this package, and notes those of others.

    Attributes:
        others: The modules that read, by their place in site-packages, and the functions.
    """

    def __init__(self) -> None:
        self.others: set[tuple[str, str]] = set()

    def look(self, frame: FrameType | None) -> None:
        """Judge a read by the nearest code that is not PyTorch's."""
        while frame is not None and Path(frame.f_code.co_filename).is_relative_to(SITE / "torch"):
            if Path(frame.f_code.co_filename).is_relative_to(SITE / "torch/utils/data"):
                return  # of a loader, which has the host's numbers only
            frame = frame.f_back
        if frame is None:
            return
        file, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if frame.f_code is Sent.read.__code__:
            return  # what has arrived in the host's memory
        if is_called_by(frame, PACKAGE / "frameworks/torch/verify/one_process.py"):
            return  # once, after the first step
        if file.is_relative_to(PACKAGE):
            where = f"{file.relative_to(PACKAGE)}:{frame.f_lineno}"
            raise ReadsOfOursError(f"{where} reads a number from the device")
        if file.is_relative_to(SITE):
            self.others.add((str(file.relative_to(SITE)), name))


def is_called_by(frame: FrameType | None, file: Path) -> bool:
    """Whether one of a frame's callers, or itself, is code of a file."""
    while frame is not None:
        if Path(frame.f_code.co_filename) == file:
            return True
        frame = frame.f_back
    return False


class _Functions(TorchFunctionMode):
    """Sees the methods of tensors that are called from Python."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self._watch.look(sys._getframe(1))
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Sees the operation behind all of them, whoever asks for it."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self._watch.look(sys._getframe(1))
        return func(*args, **(kwargs or {}))


@contextmanager
def without_reads() -> Iterator[Watch]:
    """Refuse that this package reads a number which a GPU would have to be waited for."""
    watch = Watch()
    with _Functions(watch), _Operations(watch):
        yield watch
