"""Tensors as plain arrays, and back: what checkpoints and comparisons need."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from horovod_train.checkpoint.arrays import ArrayBlob
from horovod_train.checkpoint.tree import pack_tree, unpack_tree


def to_blob(tensor: torch.Tensor, *, copy: bool = False) -> ArrayBlob:
    """Return a tensor's elements as bytes; without ``copy`` they may still change with it."""
    on_cpu = tensor.detach().to("cpu", copy=copy).contiguous()
    array: npt.NDArray[np.uint8] = on_cpu.reshape(-1).view(torch.uint8).numpy()
    return ArrayBlob(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), array.data)


def from_blob(blob: ArrayBlob) -> torch.Tensor:
    """Return a new tensor with a blob's elements."""
    dtype: torch.dtype = getattr(torch, blob.dtype)
    if not blob.data:
        return torch.empty(blob.shape, dtype=dtype)
    return torch.frombuffer(bytearray(blob.data), dtype=dtype).reshape(blob.shape)


def blobs_of(tensors: Mapping[str, torch.Tensor], *, copy: bool) -> dict[str, ArrayBlob]:
    """Return the blobs of named tensors."""
    return {name: to_blob(tensor, copy=copy) for name, tensor in tensors.items()}


def pack_tensors(tree: Any, *, copy: bool) -> tuple[Any, dict[str, ArrayBlob]]:
    """Split nested state into a JSON tree and the arrays it refers to."""
    plain, tensors = pack_tree(tree, lambda leaf: isinstance(leaf, torch.Tensor))
    return plain, blobs_of(tensors, copy=copy)


def unpack_tensors(plain: Any, blobs: Mapping[str, ArrayBlob]) -> Any:
    """Join what ``pack_tensors`` split."""
    return unpack_tree(plain, {key: from_blob(blob) for key, blob in blobs.items()})


def rng_state() -> tuple[Any, dict[str, ArrayBlob]]:
    """Return the state of Python's, NumPy's and PyTorch's generators."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    return pack_tensors(state, copy=True)


def load_rng_state(tree: Any, arrays: Mapping[str, ArrayBlob]) -> None:
    """Take over what ``rng_state`` returned."""
    state = unpack_tensors(tree, arrays)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
