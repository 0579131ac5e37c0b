"""CUDA graphs on a CPU: what is recorded is every operation, what is replayed computes the same again.

As a graph does, recording leaves everything as it was; what Python decided is not asked again; and results
come into the same memory each time.
"""

from __future__ import annotations

from collections.abc import Callable
from time import sleep
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

UNDECLARED = {"running_mean", "running_var"}
"""What batch normalization writes without saying so."""

READS = {torch.ops.aten._local_scalar_dense.default}


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._made: set[int] = set()  # memory that did not exist before
        self._kept: list[torch.Tensor] = []  # so that memory is not given out again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        given = tensors_of((args, kwargs))
        for argument, value in zip(func._schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written or argument.name in UNDECLARED:
                for tensor in tensors_of(value):
                    self._keep(tensor)
        result = func(*args, **kwargs)
        outs = tensors_of(result)
        self._kept += outs
        self._made |= {memory_of(out) for out in outs} - {memory_of(tensor) for tensor in given}
        self.operations.append((func, args, kwargs, outs))
        return result

    def _keep(self, tensor: torch.Tensor) -> None:
        place = memory_of(tensor)
        if place not in self._made and place not in self.before:
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            self.before[place] = whole, whole.clone()


def is_recording() -> bool:
    """Whether this thread records now: nothing is computed then, on a device."""
    return isinstance(_get_current_dispatch_mode(), _Recording)


class CpuRecorder:
    """Records work on a CPU.

    Attributes:
        num_recorded, num_replayed: How often.
        delay_s: How long a replay takes besides.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self.num_recorded = self.num_replayed = 0
        self.delay_s = delay_s

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        state = torch.get_rng_state()
        recording = _Recording()
        try:
            with recording:
                result = work()
        finally:
            torch.set_rng_state(state)
            with torch.no_grad():
                for tensor, old in recording.before.values():
                    tensor.copy_(old)
        self.num_recorded += 1

        @torch.no_grad()
        def replay() -> None:
            self.num_replayed += 1
            sleep(self.delay_s)
            for func, args, kwargs, outs in recording.operations:
                for out, new in zip(outs, tensors_of(func(*args, **kwargs)), strict=True):
                    if new.data_ptr() != out.data_ptr() and new.numel():
                        out.copy_(new)

        return replay, result

    def discard(self) -> None:
        pass
