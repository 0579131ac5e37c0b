"""Units of a model, and what a step of it costs: FLOPs, and activations that are saved for backward.

    FlopCounter           floating-point operations: counted in one step, scaled by the samples of each step
    units_of              modules that are gathered, recomputed, or assigned to a rank as a whole
    units_to_shard        the units that FSDP gathers separately
    saved_activations     bytes that a forward pass saves for backward, by layer, with fake tensors
    layers_to_recompute   activation checkpointing: choice of the layers, given a memory budget

``memory.py`` estimates the memory of a job with these numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from horovod_train.errors import UserError
from horovod_train.frameworks.torch.state.rank_state import python_state

SETTLED_AFTER_STEPS = 2
"""First step that is counted: the step before it may run additional initialization."""


class FlopCounter:
    """Counter of a step's operations in attention, convolutions and matrix products (``FlopCounterMode``)."""

    def __init__(self, *, is_enabled: bool = True) -> None:
        self._is_enabled = is_enabled
        self._num_steps = 0
        self._num_samples = 0
        self._per_sample: float | None = None

    @contextmanager
    def counting(self, num_samples: int) -> Iterator[None]:
        """Record the number of samples of a step; in one step, count the operations of the block."""
        self._num_steps += 1
        self._num_samples = num_samples
        is_due = self._per_sample is None and self._num_steps >= SETTLED_AFTER_STEPS
        if not (self._is_enabled and is_due and num_samples):
            yield
            return
        with FlopCounterMode(display=False) as counter:
            yield
        self._per_sample = counter.get_total_flops() / num_samples

    def of_step(self) -> float | None:
        """Return the number of operations of the step; None: no step was counted, or it counted none."""
        return self._per_sample * self._num_samples if self._per_sample else None


CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential)


def modules_matching(
    model: torch.nn.Module, patterns: Iterable[str], field: str
) -> dict[str, torch.nn.Module]:
    """Return the outermost modules whose names match a pattern, by name.

    Args:
        model: The model.
        patterns: Shell-style patterns, such as ``layers.*``.
        field: Field of the job that contains the patterns, for error messages.

    Raises:
        UserError: A pattern matches no module.
    """
    found: dict[str, torch.nn.Module] = {}
    for pattern in patterns:
        fitting: dict[str, torch.nn.Module] = {}
        for name, module in model.named_modules():
            if name and fnmatchcase(name, pattern) and not _is_inside(name, fitting):
                fitting[name] = module
        if not fitting:
            names = [name for name, _ in model.named_modules() if name]
            raise UserError(
                f"{field}: {pattern!r} fits no module",
                hint=f"modules are {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}",
            )
        found.update(fitting)
    return found


def units_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the members of the outermost ``ModuleList`` and ``Sequential`` modules of a model, by name.

    In most models these are the layers. Without such containers, the children of the model are returned. A
    nested container is one unit. Modules without parameters are left out.
    """
    found: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, CONTAINERS) and not _is_inside(name, found):
            prefix = f"{name}." if name else ""
            found.update({f"{prefix}{key}": child for key, child in module.named_children()})
    return _with_parameters(found or dict(model.named_children()))


def units_to_shard(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the units of a model that FSDP can gather separately, by name.

    A unit without its own ``forward`` is replaced by its children, because only they are called. A unit that
    shares a parameter with the rest of the model is left out: it is gathered with the model.
    """
    units: dict[str, torch.nn.Module] = {}
    for name, module in units_of(model).items():
        units.update(_callable_parts(name, module))
    used_in: Counter[int] = Counter()
    for module in model.modules():
        used_in.update(id(each) for each in module.parameters(recurse=False))
    return {
        name: unit
        for name, unit in units.items()
        if not isinstance(unit, torch.jit.ScriptModule) and not _is_tied(unit, used_in)
    }


def _callable_parts(name: str, module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    if type(module).forward is not torch.nn.Module.forward:
        return {name: module}
    parts: dict[str, torch.nn.Module] = {}
    for key, child in module.named_children():
        parts.update(_callable_parts(f"{name}.{key}", child))
    return _with_parameters(parts)


def _is_tied(unit: torch.nn.Module, used_in: Mapping[int, int]) -> bool:
    """Return whether a parameter of a unit also belongs to a module outside of the unit."""
    inside: Counter[int] = Counter()
    for module in unit.modules():
        inside.update(id(each) for each in module.parameters(recurse=False))
    return any(used_in[parameter] > number for parameter, number in inside.items())


def _with_parameters(modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    return {name: module for name, module in modules.items() if any(True for _ in module.parameters())}


def _is_inside(name: str, outer: Iterable[str]) -> bool:
    """Return whether a module is one of the outer modules or a submodule of one."""
    return any(name == each or name.startswith(f"{each}.") for each in outer)


NUM_CHECKED_PASSES = 3
_NUM_CHECKED: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()
"""Number of forward passes of a module that were checked for changes of its attributes."""
_ATTRIBUTES: WeakKeyDictionary[torch.nn.Module, set[str]] = WeakKeyDictionary()
"""Names of the public attributes that a module had when recomputation was enabled."""

MIB = 2**20


@dataclass(frozen=True)
class SavedActivations:
    """Bytes that a forward pass saves for backward.

    Attributes:
        elsewhere: Bytes saved outside of layers.
        layers: Bytes saved in each layer, in the order of the model.
        inputs: Bytes of the inputs of each layer that require gradients.
    """

    elsewhere: int
    layers: Mapping[str, int]
    inputs: Mapping[str, int]

    def peak(self, recomputed: set[str]) -> int:
        """Return the peak in bytes if some layers recompute their activations."""
        kept_bytes = sum(
            self.inputs[name] if name in recomputed else size for name, size in self.layers.items()
        )
        return self.elsewhere + kept_bytes + max((self.layers[name] for name in recomputed), default=0)


def saved_activations(model: torch.nn.Module, loss: Callable[[], object]) -> SavedActivations:
    """Measure the bytes that a forward pass saves for backward.

    Args:
        model: The model; its layers are those of ``units_of``.
        loss: Runs the forward pass, with fake or real tensors.
    """
    layers = units_of(model)
    sizes, inputs = dict.fromkeys(layers, 0), dict.fromkeys(layers, 0)
    elsewhere = 0
    running: list[str] = []
    weights = {p.untyped_storage()._cdata for p in model.parameters()}  # noqa: SLF001
    seen: set[int] = set()

    def enter(_module: object, given: Any, named: Any, *, name: str) -> None:
        running.append(name)
        tensors = [leaf for leaf in tree_leaves((given, named)) if isinstance(leaf, torch.Tensor)]
        inputs[name] += sum(tensor.nbytes for tensor in tensors if tensor.requires_grad)

    def leave(*_: object) -> None:
        running.pop()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal elsewhere
        storage = tensor.untyped_storage()
        if storage._cdata in weights or storage._cdata in seen:  # noqa: SLF001
            return tensor
        seen.add(storage._cdata)  # noqa: SLF001
        if running:
            sizes[running[0]] += storage.nbytes()
        else:
            elsewhere += storage.nbytes()
        return tensor

    hooks = [
        hook
        for name, layer in layers.items()
        for hook in (
            layer.register_forward_pre_hook(partial(enter, name=name), with_kwargs=True),
            layer.register_forward_hook(leave, always_call=True),
        )
    ]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            kept_alive = loss()
        del kept_alive
    finally:
        for hook in hooks:
            hook.remove()
    return SavedActivations(elsewhere, sizes, inputs)


def layers_to_recompute(kept: SavedActivations, budget_mib: float) -> list[str]:
    """Return the shortest list of layers, from the first on, whose recomputation meets the budget.

    A layer that recomputes saves only its inputs; its activations exist again while its backward pass runs.

    Raises:
        UserError: No such list meets the budget.
    """
    chosen: list[str] = []
    for name in [None, *kept.layers]:
        if name is not None:
            chosen.append(name)
        if kept.peak(set(chosen)) <= budget_mib * MIB:
            return chosen
    least = min(kept.peak(set(list(kept.layers)[:num])) for num in range(len(kept.layers) + 1))
    raise UserError(
        f"train.activation_memory_mib: {budget_mib:g} MiB are too few: a micro-batch keeps "
        f"{kept.peak(set()) / MIB:.0f} MiB, and {least / MIB:.0f} MiB if its {len(kept.layers)} layers "
        "recompute activations",
        hint="allow more, or lower train.batch_size_per_rank and raise train.accumulation_steps",
    )


def recompute_activations(model: torch.nn.Module, patterns: Iterable[str]) -> None:
    """Enable activation checkpointing for the modules whose names match a pattern.

    Recomputation starts with the buffer values of the first computation, and does not change buffers.

    Raises:
        UserError: A pattern matches no module.
    """
    for module in modules_matching(model, patterns, "train.activation_checkpointing").values():
        for each in module.modules():  # a strategy adds attributes later, which are not compared
            _ATTRIBUTES[each] = {
                name for name in vars(each) if not name.startswith("_") and name != "training"
            }
        module.forward = partial(_recomputed, module, module.forward)


def _recomputed(module: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    before = [(buffer, buffer.clone()) for buffer in module.buffers()] if module.training else []
    is_looked_at = module.training and _NUM_CHECKED.get(module, 0) < NUM_CHECKED_PASSES
    in_python = attributes_of(module) if is_looked_at else []
    found = checkpoint(
        forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _from(before)), **kwargs
    )
    if is_looked_at:
        _NUM_CHECKED[module] = _NUM_CHECKED.get(module, 0) + 1
        if attributes_of(module) != in_python:
            raise UserError(
                f"activation checkpointing: a forward pass of a {type(module).__name__} changes its "
                "attributes, and would change them twice when it is computed again",
                hint="keep what it counts in a buffer, or recompute other modules",
            )
    return found


def attributes_of(module: torch.nn.Module) -> list[tuple[str, str]]:
    """Return (name, text) pairs of the attributes of a module and its submodules, for comparison."""
    return [
        (name, python_state(value))
        for each in module.modules()
        for name, value in vars(each).items()
        if name in _ATTRIBUTES.get(each, ())
    ]


@contextmanager
def _from(before: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Set buffers to other values while the block runs, hidden from autograd, which may have saved them."""
    now = [buffer.data for buffer, _ in before]
    for buffer, value in before:
        buffer.data = value.clone()
    try:
        yield
    finally:
        for (buffer, _), value in zip(before, now, strict=True):
            buffer.data = value
