"""Conversion between tensors and arrays of a checkpoint."""

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
