"""Fingerprints of plain values, by which they are compared over time and between ranks."""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from typing import Any

import numpy as np

from horovod_train.frameworks.plain_data import (
    bytes_of,
    is_array_of_jax,
    is_generator,
    is_tensor,
    is_variable,
    sampled,
    state_of,
)

WHOLE_BYTES, SAMPLE_BYTES = 2**16, 2**12
"""An array with more bytes is compared by its version and some of its elements."""
HASHED_ELEMENTS = 50_000
"""Largest number of elements of a value that are compared, with those of its containers."""


def fingerprint(value: object, *, by_identity: bool) -> str:
    """Return a text that differs if plain values differ; a large value may change without it.

    Args:
        value: The value.
        by_identity: Large arrays are equal only if they are at the same address. False: texts of different
            processes can be compared.
    """
    hasher = blake2b(digest_size=16)
    left = HASHED_ELEMENTS

    def update(each: object) -> None:
        nonlocal left
        left -= 1
        hasher.update(f"{type(each).__name__} ".encode())
        if left < 0:
            return
        if isinstance(each, dict):
            hasher.update(f"{len(each)} ".encode())
            for pair in sampled(each.items()):
                update(pair[0])
                update(pair[1])
        elif isinstance(each, list | tuple | deque | set | frozenset):
            hasher.update(f"{len(each)} ".encode())
            is_set = isinstance(each, set | frozenset)
            for one in sorted(map(repr, sampled(each))) if is_set else sampled(each):
                update(one)
        elif is_generator(each):
            update(state_of(each))
        else:
            hasher.update(_leaf(each, by_identity=by_identity))

    update(value)
    return hasher.hexdigest()


def _leaf(value: Any, *, by_identity: bool) -> bytes:
    """Return the content of a value that is not a container, or a part of it if it is large."""
    if is_tensor(value):
        head = f"{tuple(value.shape)} {value.dtype} "
        if value.is_cpu and value.numel() * value.element_size() <= WHOLE_BYTES:
            return head.encode() + bytes_of(value).tobytes()
        place = f"{value._version} {value.data_ptr() if by_identity else 0}"  # noqa: SLF001
        return f"{head}{place}".encode() + (_sample_of(value.detach().numpy()) if value.is_cpu else b"")
    if is_variable(value) or is_array_of_jax(value):
        value = np.asarray(value.numpy() if is_variable(value) else value)
    if isinstance(value, np.ndarray):
        head = f"{value.shape} {value.dtype} "
        if value.nbytes <= WHOLE_BYTES:
            return head.encode() + value.tobytes()
        return f"{head}{value.ctypes.data if by_identity else 0}".encode() + _sample_of(value)
    return repr(value).encode(errors="surrogateescape")


def _sample_of(array: Any) -> bytes:
    """Return some elements of an array, without copying it: it may be a mapped file."""
    count = max(1, SAMPLE_BYTES // array.itemsize)
    places = np.linspace(0, array.size - 1, min(count, array.size), dtype=np.int64)
    return bytes(array.flat[places].tobytes())
