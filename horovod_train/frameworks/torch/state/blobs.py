"""Tensors as plain arrays, and back: what checkpoints and comparisons need."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from horovod_train.checkpoint.arrays import ArrayBlob
from horovod_train.checkpoint.tree import pack_tree, unpack_tree

LARGE_PAGE_BYTES = 2 * 2**20


def to_blob(tensor: torch.Tensor) -> ArrayBlob:
    """Return a tensor's elements as bytes; they may still change with it."""
    on_cpu = tensor.detach().to("cpu").contiguous()
    array: npt.NDArray[np.uint8] = on_cpu.reshape(-1).view(torch.uint8).numpy()
    return ArrayBlob(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), array.data)


def copied(tensor: torch.Tensor, cache: dict[str, torch.Tensor], key: str) -> torch.Tensor:
    """Return a copy in memory that the last copy of that key used: fresh pages cost more than copying."""
    kept = cache.get(key)
    if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
        kept = cache[key] = new_memory(tensor)
    return kept.copy_(tensor.detach())


def new_memory(like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized tensor on the CPU, in large pages where the system has them.

    The first touch of ordinary pages costs many times the copy: a quarter of a million faults per GB.
    """
    size_bytes = like.numel() * like.element_size()
    if size_bytes < LARGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(like.shape, dtype=like.dtype)
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages
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
    """Return the blobs of named tensors: of copies kept in a cache, or without one of themselves."""
    if cache is None:
        return {name: to_blob(tensor) for name, tensor in tensors.items()}
    return {name: to_blob(copied(tensor, cache, prefix + name)) for name, tensor in tensors.items()}


def pack_tensors(tree: object, cache: dict[str, torch.Tensor] | None) -> tuple[object, dict[str, ArrayBlob]]:
    """Split nested state into a JSON tree and the arrays it refers to."""
    plain, tensors = pack_tree(tree, lambda leaf: isinstance(leaf, torch.Tensor))
    return plain, blobs_of(tensors, cache, prefix="optimizer.")


def unpack_tensors(plain: Any, blobs: Mapping[str, ArrayBlob]) -> Any:
    """Join what ``pack_tensors`` split."""
    return unpack_tree(plain, {key: from_blob(blob) for key, blob in blobs.items()})
