"""Passes that leave no trace, and random projections of their gradients.

traceless   restores tensors, hooks, modes and random generators after a block
Untouched   mode in which tensors can be restored, and random numbers are constants
Gradient    loss and gradient of a step
projected   random projection of a gradient, which is compared in place of a copy
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from horovod_train.frameworks.torch.comm.collectives import wide_type
from horovod_train.frameworks.torch.state.local import to_local
from horovod_train.frameworks.torch.state.rank_state import load_rng_state, rng_state, seed_generators
from horovod_train.frameworks.torch.step.gradient_hooks import hooks_of

UNDECLARED = {"running_mean", "running_var"}
"""Arguments that operations write although their schemas do not say so: those of batch normalization."""
UPDATES = {
    *("add_", "sub_", "mul_", "div_", "lerp_", "pow_", "clamp_", "neg_", "addcmul_", "addcdiv_", "addmm_"),
    *("baddbmm_", "index_add_", "scatter_add_", "scatter_reduce_", "maximum_", "minimum_", "fmod_"),
}
"""Operations in place whose result depends on what they replace."""
OF_STRATEGIES = {"fsdp", "c10d", "_c10d_functional"}
"""Namespaces of operations with which strategies write buffers of their own."""
MAX_OTHERS_BYTES = 2**30
"""Largest size of tensors of the task that are copied before a pass changes them."""
FRACTION = 0.37
"""The number that a uniform distribution over [0, 1) draws."""
DEVIATIONS = 0.7
"""The number that a normal distribution draws, in standard deviations from its mean."""
HOOKS = tuple(
    name for name, value in vars(torch.nn.Module()).items() if isinstance(value, dict) and "hooks" in name
)
"""Attributes of a module that contain hooks."""


@contextmanager
def same_modules(model: torch.nn.Module) -> Iterator[None]:
    """Restore hooks of modules and parameters, modes, and what is trained, after the block."""
    modules = list(model.modules())
    parameters = list(model.parameters())
    hooks = [
        (found, dict(found))
        for module in modules
        for name in HOOKS
        if (found := vars(module)[name]) is not None
    ]
    hooks += [(found, dict(found)) for p in parameters for found in hooks_of(p)]
    modes = [module.training for module in modules]
    are_trained = [p.requires_grad for p in parameters]
    try:
        yield
    finally:
        for found, before in hooks:
            if found != before:
                found.clear()
                found.update(before)
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for p, is_trained in zip(parameters, are_trained, strict=True):
            if p.requires_grad != is_trained:
                p.requires_grad_(is_trained)


@contextmanager
def traceless(
    model: torch.nn.Module,
    others: Iterable[torch.Tensor] = (),
    transient: Mapping[str, torch.Tensor] | None = None,
) -> Iterator[Untouched]:
    """Restore tensors, hooks, modes and random generators after the block, in which generators are seeded.

    Args:
        model: The model.
        others: Tensors besides those of the model.
        transient: Weights of the model that are not restored, but whose changes are noted; see ``Untouched``.
    """
    random_state = rng_state()
    weights = () if transient else model.parameters()
    mode = Untouched([*weights, *model.buffers()], list(others), transient)
    try:
        with same_modules(model), mode:
            seed_generators(0, 0, 0)
            yield mode
    finally:
        mode.restore()
        load_rng_state(*random_state)


class Untouched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which tensors can be restored, and operations draw constants.

    One process and several ranks draw different numbers, so that their gradients can only be compared
    without randomness. Each operation that draws returns a value that every sample may have drawn.

    Args:
        of_model: Tensors of the model, which are restored.
        others: Further tensors, which are restored, and of which it is noted whether they are read.
        transient: Tensors that are not, by name, but whose changes are noted.

    Attributes:
        lost: Names of transient tensors that operations wrote.
        read: Storages of ``others`` whose content operations read before it was replaced.
        unknown: Names of operations that drew random numbers, and for which no constant is known.
        dtypes: Types of the floating-point numbers that operations read.
    """

    def __init__(
        self,
        of_model: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor] = (),
        transient: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._transient = transient or {}
        self.lost: set[str] = set()
        self._storages_of_others = set(map(storage_of, others))
        self.read: set[int] = set()
        self._written: set[int] = set()
        self.unknown: set[str] = set()
        self.dtypes: set[torch.dtype] = set()
        self._whole = [
            (tensor, to_local(tensor.detach()))
            for tensor in (*of_model, *others)
            if not tensor.is_meta and tensor.layout == torch.strided  # others have no storage of their own
        ]
        self._places: dict[int, list[torch.Tensor]] = {}
        for _, local in self._whole:
            self._places.setdefault(_storage(local), []).append(local)
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._made: set[int] = set()  # storages that operations have made
        self._others: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._others_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Copy what an operation changes; replace random numbers by constants."""
        named = dict(kwargs or {})
        written = set()
        for tensor in _written(func, args, named):
            self._remember(tensor, is_of_strategy=func.namespace in OF_STRATEGIES)
            written.add(storage_of(tensor))
        floats = (each.dtype for each in args if isinstance(each, torch.Tensor) and each.is_floating_point())
        self.dtypes.update(floats)
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        result = self._constant(func, args, named) if is_drawn else func(*args, **named)
        before = {_storage(each) for each in _tensors((*args, *named.values()))}
        after = {_storage(each) for each in _tensors((result,))}
        self._made |= after - before
        replaced = set() if name_of(func) in UPDATES else written
        views = after - written
        self.read |= (before & self._storages_of_others) - views - replaced - self._written
        self._written |= written
        return result

    def _remember(self, tensor: torch.Tensor, *, is_of_strategy: bool) -> None:
        storage = storage_of(tensor)
        if not storage:
            return
        for local in self._places.get(storage, ()):
            if id(local) not in self._before:
                self._before[id(local)] = local, local.clone()
        is_in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001  (no public API)
        if not (storage in self._places or storage in self._made or is_in_backward or is_of_strategy):
            self._remember_other(storage, to_local(tensor.detach()))
        self.lost.update(name for name, each in self._transient.items() if _storage(each.detach()) == storage)

    def _remember_other(self, storage: int, local: torch.Tensor) -> None:
        """Copy the storage of a tensor that was there before, such as a teacher's weight in the task.

        Raises:
            MemoryError: Such tensors are too large.
        """
        whole = torch.empty(0, dtype=torch.uint8, device=local.device).set_(local.untyped_storage())
        if storage in self._others or not whole.numel():
            return
        self._others_bytes += whole.numel()
        if self._others_bytes > MAX_OTHERS_BYTES:
            raise MemoryError("the loss changes too large tensors, such as weights of another model")
        self._others[storage] = whole, whole.clone()

    @torch.no_grad()
    def change_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return by what a watched tensor was changed, of its local part; None: it was not written."""
        if tensor.is_meta or tensor.layout != torch.strided:
            return None
        mine = to_local(tensor.detach())
        for local, before in self._before.values():
            if (local.data_ptr(), local.shape) == (mine.data_ptr(), mine.shape):
                return local - before
        return None

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all watched tensors, also those whose ``data`` was assigned."""
        for tensor, local in self._whole:
            if tensor.data_ptr() != local.data_ptr() and type(tensor.data) is type(local):
                tensor.data = local
        for local, before in self._before.values():
            if local.untyped_storage().size():  # a strategy that gathers weights may have released them
                local.copy_(before)
        for whole, before in self._others.values():
            if whole.untyped_storage().size():
                whole.copy_(before)
        self._before.clear()
        self._others.clear()

    def _constant(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        arguments = Arguments.of(func, args, named)
        if "dropout_p" in arguments:  # of attention
            return func(**{**arguments, "dropout_p": 0.0})
        constant = CONSTANTS.get(name_of(func))
        if constant is None:
            self.unknown.add(name_of(func))
            return func(*args, **named)
        return constant(lambda: func(*args, **named), arguments)


def name_of(func: Any) -> str:
    """Return the name of an operation that a dispatch mode sees, such as ``sum``."""
    return str(func._schema.name.partition("::")[2])  # noqa: SLF001


def _storage(local: torch.Tensor) -> int:
    return int(local.untyped_storage()._cdata)  # noqa: SLF001


def storage_of(tensor: torch.Tensor) -> int:
    """Return what identifies the memory of a tensor as long as it exists; 0: it has none of its own."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return 0
    return _storage(to_local(tensor.detach()))


def names_read(tensors: Mapping[str, torch.Tensor], read: Collection[int]) -> list[str]:
    """Return the names of tensors whose storages were read."""
    return sorted(name for name, tensor in tensors.items() if storage_of(tensor) in read)


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yield the local tensors that have memory, among values and in lists of them."""
    for value in values:
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, torch.Tensor) and each.layout == torch.strided and not each.is_meta:
                yield to_local(each)


def _written(func: Any, args: Sequence[object], named: Mapping[str, object]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operation writes."""
    for place, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        if not (is_write or argument.name in UNDECLARED):
            continue
        value = args[place] if place < len(args) else named.get(argument.name)
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, torch.Tensor):
                yield each


class Arguments(dict[str, Any]):
    """The arguments of an operation by name, with their defaults."""

    @classmethod
    def of(cls, func: Any, args: Sequence[object], named: Mapping[str, object]) -> Arguments:
        """Return the arguments of a call."""
        found = cls()
        for place, argument in enumerate(func._schema.arguments):  # noqa: SLF001
            default = argument.default_value if argument.has_default_value() else None
            found[argument.name] = args[place] if place < len(args) else named.get(argument.name, default)
        return found


Draw = Callable[[], torch.Tensor]
Constant = Callable[[Draw, Arguments], object]
"""Returns the constant of an operation, given a function that calls it and its arguments."""


def _filled(value: Callable[[Arguments], object]) -> Constant:
    """Return a constant for an operation that makes or fills a tensor: its result is overwritten."""

    def constant(draw: Draw, arguments: Arguments) -> torch.Tensor:
        made, filling = draw(), value(arguments)
        return made.copy_(torch.as_tensor(filling))

    return constant


def _between(arguments: Arguments) -> float:
    low, high = arguments.get("from") or 0.0, arguments.get("to")
    return float(low + FRACTION * ((1.0 if high is None else high) - low))


def _integer(arguments: Arguments) -> int:
    low = arguments.get("low", arguments.get("from")) or 0
    high = arguments.get("high", arguments.get("to"))
    return int(low + FRACTION * ((2**24 if high is None else high) - low))


def _normal(arguments: Arguments) -> object:
    mean, std = arguments.get("mean", 0.0), arguments.get("std", 1.0)
    return (0.0 if mean is None else mean) + DEVIATIONS * (1.0 if std is None else std)


def _bernoulli(arguments: Arguments) -> object:
    p = arguments.get("p")
    p = arguments.get("self") if p is None else p
    return (p > FRACTION).to(p.dtype) if isinstance(p, torch.Tensor) else float((p or 0.0) > FRACTION)


def _dropout(_: Draw, arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep all elements, with the factor with which ``native_dropout_backward`` multiplies gradients."""
    value, p = arguments["input"], arguments["p"]
    is_training = arguments.get("train") is not False
    factor = 1 / (1 - p) if is_training and p < 1 else 1.0
    return value * factor, torch.ones_like(value, dtype=torch.bool)


def _permutation(draw: Draw, arguments: Arguments) -> torch.Tensor:
    made = draw()
    return made.copy_(torch.arange(arguments["n"], device=made.device))


def _multinomial(draw: Draw, arguments: Arguments) -> torch.Tensor:
    made, weights = draw(), arguments["self"]
    if arguments.get("replacement"):
        return made.copy_(weights.argmax(-1, keepdim=True).expand_as(made))
    return made.copy_(weights.topk(arguments["num_samples"], -1).indices)


UNIFORM, NORMAL, INTEGER = _filled(_between), _filled(_normal), _filled(_integer)
CONSTANTS: Mapping[str, Constant] = {
    **dict.fromkeys(("rand", "rand_like", "uniform_", "uniform"), UNIFORM),
    **dict.fromkeys(("randn", "randn_like", "normal_", "normal", "normal_functional"), NORMAL),
    **dict.fromkeys(("randint", "randint_like", "random_", "random"), INTEGER),
    **dict.fromkeys(("bernoulli", "bernoulli_"), _filled(_bernoulli)),
    **dict.fromkeys(("exponential_", "exponential"), _filled(lambda each: 0.46 / (each.get("lambd") or 1.0))),
    "geometric_": _filled(lambda _: 1.0),
    "poisson": _filled(lambda each: each["self"].round()),
    "native_dropout": _dropout,
    "randperm": _permutation,
    "multinomial": _multinomial,
}


NUM_COMPONENTS = 256
"""Length of the projection of a gradient."""
_CHUNK = 2**16
"""Length of the sequence of signs, which is repeated; a multiple of ``NUM_COMPONENTS``."""
_NUM_CHUNKS = 16
"""Number of sequences that are processed at once: each operation takes its time."""


@dataclass(frozen=True)
class Gradient:
    """Loss and gradient of a step.

    Attributes:
        loss: Loss of the step.
        projected: Of this rank's part of each gradient and of each written weight, its projection, shape
            [``NUM_COMPONENTS``], and its sum of squares; by name.
        count: By what the sum of the loss was divided, up to a factor; None: the loss is a mean.
    """

    loss: float
    projected: Mapping[str, tuple[torch.Tensor, float]]
    count: float | None = None


def weighted_sum(gradients: Sequence[Gradient], weights: Sequence[float]) -> Gradient:
    """Return the weighted sum of gradients; sums of squares are upper limits.

    Losses that are a sum and a count have the weights of their counts.
    """
    counts = [each.count for each in gradients if each.count is not None]
    if len(counts) == len(gradients):
        weights = [count / (sum(counts) or 1.0) for count in counts]
    loss = sum(weight * each.loss for weight, each in zip(weights, gradients, strict=True))
    kept: dict[str, tuple[torch.Tensor, float]] = {}
    for weight, each in zip(weights, gradients, strict=True):
        for name, (components, square) in each.projected.items():
            before, largest = kept.get(name, (torch.zeros_like(components), 0.0))
            kept[name] = before + weight * components, max(largest, square)
    return Gradient(loss, kept)


@torch.no_grad()
def projected(gradient: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return a random projection of a gradient, shape [``NUM_COMPONENTS``], float64; and its sum of squares.

    Elements are multiplied by random signs, and added up in as many groups as there are components ("count
    sketch"; Charikar, Chen and Farach-Colton, 2002). The projection is linear in the gradient.
    """
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    flat = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    flat = flat.reshape(-1)
    signs = _signs(flat.device)
    sums = torch.zeros(NUM_COMPONENTS, dtype=torch.float64, device=flat.device)
    square = torch.zeros((), dtype=torch.float64, device=flat.device)
    padded = -(-len(flat) // NUM_COMPONENTS) * NUM_COMPONENTS
    length = min(_CHUNK, max(NUM_COMPONENTS, padded))
    for chunk in torch.split(flat, _CHUNK * _NUM_CHUNKS):
        wide = chunk.to(wide_type(chunk.dtype)).double()
        square += wide.dot(wide)
        rows = torch.nn.functional.pad(wide, (0, -len(wide) % length))
        signed = rows.view(-1, length) * signs[:length]
        sums += signed.view(-1, NUM_COMPONENTS).sum(0)
    return sums.cpu(), float(square)


@cache
def _signs(device: torch.device) -> torch.Tensor:
    generator = np.random.default_rng(0)
    return torch.from_numpy(generator.integers(0, 2, _CHUNK) * 2.0 - 1).to(device)
