"""Local tensors: a rank's shard of model and optimizer state, by names of the whole model.

A checkpoint contains the whole state: weights, and optimizer state by parameter name. A rank may load all of
it or a shard, under any strategy and number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from horovod_train.checkpoint.arrays import ArrayBlob, Part
from horovod_train.checkpoint.stored_arrays import StoredArrays
from horovod_train.checkpoint.tree import MAP, pack_tree, unpack_tree
from horovod_train.frameworks.torch.state.blobs import copied, from_blob, to_blob

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
    """Return the part of an array that a local tensor stores."""
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
