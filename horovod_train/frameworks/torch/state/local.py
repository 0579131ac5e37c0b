"""Local tensors: a rank's shard of model and optimizer state, by names of the whole model.

    to_blob, pack_tensors   conversion between tensors and arrays of a checkpoint
    LocalTensor             a rank's shard of one tensor of the whole model
    optimizer_document      optimizer state of a checkpoint for the parameters of this rank
    unsharded_parameters    parameters that ``fully_shard`` does not shard, which each rank stores whole
    TrainedParameters       the trained parameters, which may change between steps, identically on all ranks
    load_initial            initial weights from a file, of which a model on the meta device loads only this
                            rank's shard

A checkpoint contains the whole state: weights, and optimizer state by parameter name. A rank may load all
of it or a shard, under any strategy and number of ranks.
"""

from __future__ import annotations

import logging
import mmap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.weak import WeakIdKeyDictionary

from horovod_train.checkpoint.arrays import MAP, ArrayBlob, Part, StoredArrays, pack_tree, unpack_tree
from horovod_train.checkpoint.inspect import FIELD
from horovod_train.errors import CheckpointError, UserError, describe_ranks
from horovod_train.frameworks.torch.step.gradient_hooks import num_hooks

LARGE_PAGE_BYTES = 2 * 2**20


def to_blob(tensor: torch.Tensor) -> ArrayBlob:
    """Return a tensor's elements as bytes. They may share memory with the tensor."""
    on_cpu = tensor.detach().to("cpu").contiguous()
    array: npt.NDArray[np.uint8] = on_cpu.reshape(-1).view(torch.uint8).numpy()
    return ArrayBlob(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), array.data)


def copied(tensor: torch.Tensor, cache: dict[str, torch.Tensor], key: str) -> torch.Tensor:
    """Copy a tensor to the CPU, into the memory of the last copy with this key, if shape and dtype agree."""
    kept = cache.get(key)
    if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
        kept = cache[key] = new_memory(tensor)
    return kept.copy_(tensor.detach())


def new_memory(like: torch.Tensor) -> torch.Tensor:
    """Allocate a CPU tensor of the same shape and dtype, in huge pages if the system supports them.

    The first write to ordinary pages causes 250,000 page faults per GB, which take longer than the copy.
    """
    size_bytes = like.numel() * like.element_size()
    if size_bytes < LARGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(like.shape, dtype=like.dtype)
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


def from_blob(blob: ArrayBlob) -> torch.Tensor:
    """Return a new tensor with a blob's elements."""
    dtype: torch.dtype = getattr(torch, blob.dtype)
    if not blob.data:
        return torch.empty(blob.shape, dtype=dtype)
    return torch.frombuffer(bytearray(blob.data), dtype=dtype).reshape(blob.shape)


def blobs_of(
    tensors: Mapping[str, torch.Tensor], cache: dict[str, torch.Tensor] | None, prefix: str
) -> dict[str, ArrayBlob]:
    """Return the blobs of named tensors: of copies in the cache or, without a cache, of the tensors."""
    if cache is None:
        return {name: to_blob(tensor) for name, tensor in tensors.items()}
    return {name: to_blob(copied(tensor, cache, prefix + name)) for name, tensor in tensors.items()}


def pack_tensors(tree: object, cache: dict[str, torch.Tensor] | None) -> tuple[object, dict[str, ArrayBlob]]:
    """Split nested state into a JSON tree and the arrays to which it refers."""
    plain, tensors = pack_tree(tree, lambda leaf: isinstance(leaf, torch.Tensor))
    return plain, blobs_of(tensors, cache, prefix="optimizer.")


def unpack_tensors(plain: Any, blobs: Mapping[str, ArrayBlob]) -> Any:
    """Return the nested state that ``pack_tensors`` split."""
    return unpack_tree(plain, {key: from_blob(blob) for key, blob in blobs.items()})


Cache = dict[str, torch.Tensor] | None
OWN = "rank_state"
"""Key, in a checkpoint, of optimizer state that belongs to no parameter."""


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True)
class LocalTensor:
    """A rank's shard of one tensor of the whole model, or the whole tensor.

    Attributes:
        tensor: The local data.
        part: Position in the whole tensor; None: ``tensor`` is the whole tensor.
        like: Converts a tensor of this shape to the tensor class of optimizer state, such as ``DTensor``.
    """

    tensor: torch.Tensor
    part: Part | None = None
    like: Callable[[torch.Tensor], torch.Tensor] = field(default=_as_it_is, compare=False)

    def blob(self, cache: Cache, key: str) -> ArrayBlob:
        """Return the tensor's bytes: of a copy in the cache or, without a cache, of the tensor itself."""
        blob = to_blob(self.tensor if cache is None else copied(self.tensor, cache, key))
        return ArrayBlob(blob.dtype, blob.shape, blob.data, self.part)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(self.tensor.shape) if self.part is None else self.part.whole


@dataclass(frozen=True)
class OptimizedParameter:
    """A parameter of the optimizer: a parameter of the model, or this rank's shard of it.

    Attributes:
        name: Name in the whole model; the number in the optimizer if the parameter is not in the model.
        local: This rank's shard of the parameter.
    """

    name: str | int
    local: LocalTensor


def whole_model(model: torch.nn.Module) -> dict[str, LocalTensor]:
    """Return the weights and buffers of a model without sharding."""
    return {name: LocalTensor(tensor) for name, tensor in model.state_dict().items()}


def whole_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[OptimizedParameter]:
    """Return the parameters of an optimizer without sharding, in its order."""
    names: dict[int, str] = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [
        OptimizedParameter(names.get(id(p), number), LocalTensor(p)) for number, p in enumerate(parameters)
    ]


def model_blobs(local_tensors: Mapping[str, LocalTensor], cache: Cache) -> dict[str, ArrayBlob]:
    """Return weights and buffers as bytes."""
    return {name: each.blob(cache, f"model.{name}") for name, each in local_tensors.items()}


def optimizer_blobs(
    optimizer: torch.optim.Optimizer,
    optimized: Sequence[OptimizedParameter],
    cache: Cache,
    *,
    settings_only: bool,
) -> tuple[object, dict[str, ArrayBlob]]:
    """Return an optimizer's state by parameter name: a JSON tree and the arrays to which it refers."""
    tree, arrays = _packed(optimizer, optimized, settings_only=settings_only)
    return tree, {key: local.blob(cache, f"optimizer.{key}") for key, local in arrays.items()}


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, optimized: Sequence[OptimizedParameter]
) -> dict[str, LocalTensor]:
    """Return the tensors of an optimizer's state, by the keys of a checkpoint's arrays."""
    return _packed(optimizer, optimized, settings_only=False)[1]


def _packed(
    optimizer: torch.optim.Optimizer, optimized: Sequence[OptimizedParameter], *, settings_only: bool
) -> tuple[object, dict[str, LocalTensor]]:
    plain = optimizer.state_dict()
    document = _by_name({**plain, "state": {}} if settings_only else plain, optimized)
    return pack_tree(
        {"class": type(optimizer).__qualname__, "state": document}, lambda leaf: isinstance(leaf, LocalTensor)
    )


def _by_name(document: Mapping[str, Any], optimized: Sequence[OptimizedParameter]) -> object:
    """Replace parameter numbers in an optimizer's state by names, and tensors by local tensors."""
    if not _has_numbers(document):
        return _map_leaves(document, LocalTensor)  # custom state_dict format
    state = {
        optimized[number].name: _map_leaves(entry, partial(_leaf, parameter=optimized[number].local))
        for number, entry in document["state"].items()
        if isinstance(number, int)
    }
    own = {
        key: _map_leaves(entry, LocalTensor)
        for key, entry in document["state"].items()
        if not isinstance(key, int)
    }
    groups = [
        {**_map_leaves(group, LocalTensor), "params": [optimized[number].name for number in group["params"]]}
        for group in document["param_groups"]
    ]
    rest = {
        key: _map_leaves(document[key], LocalTensor) for key in document.keys() - {"state", "param_groups"}
    }
    if own:
        rest[OWN] = own
    return {**rest, "state": state, "param_groups": groups}


def _has_numbers(document: Mapping[str, Any]) -> bool:
    """Return whether an optimizer's state has the format of PyTorch's optimizers."""
    return isinstance(document.get("state"), dict) and isinstance(document.get("param_groups"), list)


def _leaf(leaf: torch.Tensor, parameter: LocalTensor) -> LocalTensor:
    """Return this rank's shard of a state tensor, which is sharded like its parameter if shapes agree."""
    local: torch.Tensor = leaf.to_local() if hasattr(leaf, "to_local") else leaf
    is_like = local.shape == parameter.tensor.shape
    return LocalTensor(local, parameter.part if is_like else None)


def _map_leaves(tree: Any, change: Callable[[torch.Tensor], object]) -> Any:
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _map_leaves(value, change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_map_leaves(value, change) for value in tree)
    return tree


@torch.no_grad()
def load_model(local_tensors: Mapping[str, LocalTensor], arrays: Mapping[str, ArrayBlob]) -> None:
    """Overwrite the local tensors of a model, one at a time.

    Raises:
        ValueError: The arrays belong to another model.
    """
    _check_names(local_tensors, arrays)
    for name, each in local_tensors.items():
        each.tensor.copy_(from_blob(_own(arrays, name, each)))


def _check_names(local_tensors: Iterable[str], arrays: Iterable[str]) -> None:
    missing = sorted(set(local_tensors) - set(arrays))
    if missing:
        raise ValueError(f"the checkpoint does not contain {missing[0]!r}")


def _own(arrays: Mapping[str, ArrayBlob], name: str, wanted: LocalTensor) -> ArrayBlob:
    if isinstance(arrays, StoredArrays):
        return arrays.part(name, tuple(wanted.tensor.shape), wanted.part)
    found = arrays[name]  # in memory, from a replica with the same sharding
    if (found.shape, found.part) != (tuple(wanted.tensor.shape), wanted.part):
        raise ValueError(
            f"{name} has shape {list(found.shape)} in the checkpoint, but "
            f"{list(wanted.tensor.shape)} in the model"
        )
    return found


def optimizer_document(
    tree: Any,
    arrays: Mapping[str, ArrayBlob],
    optimized: Sequence[OptimizedParameter],
    groups: Sequence[Mapping[str, Any]],
    numbering: Sequence[str | int],
    *,
    is_sharded: bool,
) -> Any:
    """Return the ``load_state_dict`` argument with this rank's part of an optimizer's state.

    Args:
        tree: Result of ``optimizer_blobs``; older checkpoints contain parameter numbers instead of names.
        arrays: The arrays to which the tree refers.
        optimized: The optimizer's parameters, in its order.
        groups: The optimizer's ``param_groups``.
        numbering: Parameter names in the order of an optimizer of the whole model.
        is_sharded: Whether other ranks may have parameters that this rank does not have.

    Raises:
        KeyError: An array is missing.
        ValueError: The state belongs to another optimizer.
    """
    if not isinstance(tree, dict) or "param_groups" not in tree or "state" not in tree:
        return unpack_tree(tree, _Whole(arrays))
    saved_groups = unpack_tree(tree["param_groups"], _Whole(arrays))
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"the checkpoint has {len(saved_groups)} parameter groups, but the job's optimizer has "
            f"{len(groups)}"
        )
    saved = [name for group in saved_groups for name in group["params"]]
    by_number = bool(saved) and all(isinstance(name, int) for name in saved)
    if by_number and len(saved) != len(numbering):
        raise ValueError(f"its optimizer has {len(saved)} parameters, and {len(numbering)} here")
    unknown = [] if by_number or is_sharded else sorted(set(saved) - set(numbering), key=str)
    if unknown:
        raise ValueError(f"its optimizer trains {unknown[0]!r}")
    entries = {numbering[key] if by_number else key: entry for key, entry in _entries(tree["state"])}
    state = {
        number: unpack_tree(entries[each.name], _Parts(arrays, each.local))
        for number, each in enumerate(optimized)
        if each.name in entries
    }
    numbers = iter(range(len(optimized)))
    own_groups = [
        {**saved_group, "params": [next(numbers) for _ in group["params"]]}
        for saved_group, group in zip(saved_groups, groups, strict=True)
    ]
    rest = {key: unpack_tree(tree[key], _Whole(arrays)) for key in tree.keys() - {"state", "param_groups"}}
    state |= rest.pop(OWN, {})
    return {**rest, "state": state, "param_groups": own_groups}


def _entries(plain: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the entries of a packed dictionary."""
    yield from plain[MAP] if MAP in plain else plain.items()


class _Whole(Mapping[str, Any]):
    """Mapping from array keys to whole tensors."""

    def __init__(self, arrays: Mapping[str, ArrayBlob]) -> None:
        self._arrays = arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __getitem__(self, key: str) -> torch.Tensor:
        return from_blob(self._arrays[key])


class _Parts(_Whole):
    """Mapping from array keys to tensors: this rank's shard of arrays that have the parameter's shape."""

    def __init__(self, arrays: Mapping[str, ArrayBlob], parameter: LocalTensor) -> None:
        super().__init__(arrays)
        self._parameter = parameter

    def __getitem__(self, key: str) -> torch.Tensor:
        arrays, parameter = self._arrays, self._parameter
        whole = arrays.kind(key)[1] if isinstance(arrays, StoredArrays) else arrays[key].whole_shape
        if whole != parameter.whole_shape:
            return super().__getitem__(key)
        return parameter.like(from_blob(_own(arrays, key, parameter)))


Parameters = Mapping[torch.nn.Parameter, str]
"""Reason why each parameter is not sharded: a clause whose subject is the parameter."""
SPARSE = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def unsharded_parameters(
    model: torch.nn.Module, units: Iterable[torch.nn.Module]
) -> dict[torch.nn.Parameter, str]:
    """Return the parameters that ``fully_shard`` refuses or does not train correctly, with reasons.

    Args:
        model: The model.
        units: Modules that are gathered as units; parameters outside of units are gathered with the model.
    """
    storages = Counter(_storage(parameter) for parameter in model.parameters())
    found = {}
    for parameter in model.parameters():
        if parameter.dim() == 0 or parameter.numel() == 0:
            found[parameter] = "has no elements to share"
        elif num_hooks(parameter):
            found[parameter] = "has hooks of its gradient"
        elif not parameter.is_contiguous():
            found[parameter] = "is not contiguous"
        elif storages[_storage(parameter)] > 1:
            found[parameter] = "shares memory with another parameter"
    for module in model.modules():
        if isinstance(module, SPARSE) and module.sparse:
            found.update(dict.fromkeys(module.parameters(), "has sparse gradients"))
        if isinstance(module, torch.jit.ScriptModule):
            found.update(dict.fromkeys(module.parameters(), "belongs to a ScriptModule"))
    return found | _of_rare_types(model, units, found)


def _of_rare_types(
    model: torch.nn.Module, units: Iterable[torch.nn.Module], whole: Parameters
) -> dict[torch.nn.Parameter, str]:
    """Return the parameters whose dtype is not the dtype of most elements of their unit."""
    found = {}
    seen = set(whole)
    for unit in (*units, model):
        of_unit = [parameter for parameter in unit.parameters() if parameter not in seen]
        seen.update(of_unit)
        sizes: Counter[torch.dtype] = Counter()
        for parameter in of_unit:
            sizes[parameter.dtype] += parameter.numel()
        for parameter in of_unit:
            if parameter.dtype != sizes.most_common(1)[0][0]:
                found[parameter] = (
                    f"is {_name(parameter.dtype)} among others of {_name(sizes.most_common(1)[0][0])}"
                )
    return found


def describe(model: torch.nn.Module, whole: Parameters) -> str:
    """Return a human-readable sentence about unsharded parameters; empty if all of them are scalars."""
    large = {parameter: reason for parameter, reason in whole.items() if parameter.numel() > 1}
    if not large:
        return ""
    names = {parameter: name for name, parameter in model.named_parameters()}
    named = [f"{names[parameter]} {reason}" for parameter, reason in large.items()]
    more = f", and {len(named) - 3} more" if len(named) > 3 else ""
    total = sum(parameter.numel() for parameter in model.parameters())
    part = sum(parameter.numel() for parameter in large) / total
    return (
        f"{part:.1%} of the weights are whole on each rank, with their gradients and optimizer state: "
        f"{'; '.join(named[:3])}{more}"
    )


def move(parameters: Iterable[torch.nn.Parameter], device: torch.device) -> None:
    """Move parameters to a device. Parameters that share memory share it on the device, too."""
    moved: dict[int, torch.UntypedStorage] = {}
    for parameter in parameters:
        if parameter.device == device:
            continue
        storage = moved.setdefault(_storage(parameter), parameter.untyped_storage().to(device=device))
        placeholder = torch.empty(0, dtype=parameter.dtype, device=device)
        parameter.data = placeholder.set_(
            storage, parameter.storage_offset(), parameter.shape, parameter.stride()
        )


def _storage(parameter: torch.nn.Parameter) -> int:
    return parameter.untyped_storage()._cdata  # noqa: SLF001  (meta tensors have no address)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Named = Mapping[str, torch.nn.Parameter]


class TrainedParameters(Protocol):
    """The parameters of an optimizer, which change when layers are unfrozen or groups are added."""

    def count(self) -> int:
        """Return the number of parameters. This is called in each step, so it must be cheap."""
        ...

    def named(self) -> Named:
        """Return the parameters by name, in model order; raise ``UserError`` if the model lacks one."""
        ...


@dataclass(frozen=True)
class OptimizedParameters:
    """The current parameters of an optimizer of a model."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def count(self) -> int:
        """Return the number of parameters."""
        return sum(len(group["params"]) for group in self.optimizer.param_groups)

    def named(self) -> Named:
        """Return the parameters by name, in model order; raise ``UserError`` if the model lacks one."""
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        found = {name: p for name, p in self.model.named_parameters() if id(p) in trained}
        if len(trained) > len(found):
            raise UserError(
                "the optimizer trains parameters that are not in the model: ranks could not keep them equal",
                hint="make them part of the model, as a submodule or with register_parameter",
            )
        return found

    def check(self) -> None:
        """Raise ``UserError`` if no parameter requires a gradient, or if one is not in the model."""
        if not any(parameter.requires_grad for parameter in self.named().values()):
            raise UserError(
                "the optimizer trains no parameter", hint="does any parameter require a gradient?"
            )


def check_same_trained(everyone: Sequence[tuple[str, list[list[str]]]]) -> None:
    """Raise ``UserError`` if ranks train different parameters, or a rank's optimizer has a problem.

    Args:
        everyone: For each rank, the problem of its optimizer (empty: none), and [name, shape, type] of each
            parameter that it trains.
    """
    for rank, (problem, _) in enumerate(everyone):
        if problem:
            raise UserError(f"{describe_ranks([rank])}: {problem}")
    trained = [{entry[0] for entry in layout} for _, layout in everyone]
    if all(layout == everyone[0][1] for _, layout in everyone):
        return
    for name in sorted(set().union(*trained)):
        having = [rank for rank, names in enumerate(trained) if name in names]
        if len(having) < len(everyone):
            lacking = [rank for rank in range(len(everyone)) if rank not in having]
            verbs = ["train" if len(having) > 1 else "trains", "do" if len(lacking) > 1 else "does"]
            raise UserError(
                f"{describe_ranks(having)} {verbs[0]} {name!r} and {describe_ranks(lacking)} {verbs[1]} not",
                hint="freeze and unfreeze parameters on all ranks in the same step",
            )
    raise UserError("ranks train parameters of different shapes, types or order")


log = logging.getLogger(__name__)


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Place parameters that are created in the block on the meta device.

    Buffers are created as usual, because the file lacks those that constructors compute, such as the
    frequencies of positional encodings.
    """
    plain = torch.nn.Module.register_parameter
    made = WeakIdKeyDictionary()  # shared weights remain shared; weak keys, so that memory is freed

    def register(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            if param not in made:
                empty = torch.nn.Parameter(param.detach().to("meta"), param.requires_grad)
                empty.__dict__.update(param.__dict__)
                made[param] = empty
            param = made[param]
        plain(self, name, param)

    torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = plain  # type: ignore[method-assign]


def load_initial(
    model: torch.nn.Module, local_tensors: Mapping[str, LocalTensor], weights: Mapping[str, ArrayBlob]
) -> None:
    """Load the weights of a file into a model.

    Args:
        model: The model. If it registers a weight under several names, the file may contain only one of them.
        local_tensors: This rank's shard of the model, by name.
        weights: Arrays of the file.

    Raises:
        UserError: The weights belong to another model.
    """
    one = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    loaded = {one[name] for name in weights if name in one}
    wanted = {
        name: each for name, each in local_tensors.items() if name in weights or one.get(name) not in loaded
    }
    if unused := sorted(set(weights) - set(local_tensors) - set(one)):
        log.warning(
            "%s: the file has %d tensors that the model does not have, first %r: they are not used",
            FIELD,
            len(unused),
            unused[0],
        )
    try:
        load_model(wanted, weights)
    except (CheckpointError, ValueError, KeyError) as error:
        others = sorted(set(weights) - set(local_tensors))
        raise UserError(
            f"{FIELD}: they are of another model: {error}",
            hint=f"the file also contains {', '.join(others[:5])}; names must be those of the model"
            if others
            else "names and shapes must be those of the task's model",
        ) from error


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a ``DTensor``; other tensors are returned unchanged."""
    to_local: Callable[[], torch.Tensor] | None = getattr(tensor.detach(), "to_local", None)
    return tensor if to_local is None else to_local()
