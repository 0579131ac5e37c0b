"""Sums of arrays over ranks in compiled JAX code.

On a CPU, Horovod sums in the memory of XLA's buffers. For each byte of gradient, the host copies one byte
if the gradient is packed into a bucket (in the compiled function), and none if the gradient is sent alone.
On other devices, a callback copies gradients to the host and back.

Callbacks are ordered, because all ranks must call Horovod in the same order; XLA must not merge two of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental import io_callback

from horovod_train.frameworks import exchange
from horovod_train.frameworks.arrays import Array
from horovod_train.frameworks.jax.in_place import in_place, shapes_of
from horovod_train.frameworks.torch.comm.collectives import TensorCollectives, tensor_communicator

NARROW = (jnp.bfloat16, jnp.float16)  # summed in float32: Horovod has no bfloat16, and fp16 overflows


@dataclass
class Exchange(exchange.Exchange):
    """Sums lists of JAX arrays over ranks, with or without ``jax.jit``.

    Attributes:
        error: Exception of the last exchange; JAX reports only its text.
    """

    error: Exception | None = field(default=None, init=False)
    _ranks: TensorCollectives = field(init=False)

    def __post_init__(self) -> None:
        self._ranks = tensor_communicator(self.world)  # once: slow compared with a step

    def kind(self, array: jax.Array) -> np.dtype[Any]:
        """Return the wire dtype."""
        if array.dtype in NARROW:
            return np.dtype(np.float32)
        return np.dtype((self.wire_dtype or jnp.float32) if array.dtype == jnp.float32 else array.dtype)

    def size_on_wire_bytes(self, array: jax.Array) -> int:
        """Return the size of an array in its wire dtype."""
        return int(array.size) * self.kind(array).itemsize

    def pack(self, arrays: Sequence[jax.Array], kind: np.dtype[Any]) -> jax.Array:
        """Return one array in the wire dtype with the elements of all arrays; flat, if there are several."""
        typed = [array.astype(kind) for array in arrays]
        return jnp.concatenate([array.ravel() for array in typed]) if len(typed) > 1 else typed[0]

    def reduce(self, buckets: Iterable[jax.Array], names: Iterable[str]) -> Sequence[jax.Array]:
        """Return the sum of each bucket over ranks."""
        add = partial(self._sum, list(names))
        result: Sequence[jax.Array] = jax.lax.platform_dependent(
            *buckets,
            cpu=lambda *buckets: in_place(add, buckets),
            default=lambda *buckets: io_callback(
                partial(_on_copies, add), shapes_of(buckets), *buckets, ordered=True
            ),
        )
        return result

    def unpack(self, total: jax.Array, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the parts of a summed bucket in the types and shapes of its arrays."""
        ends = np.cumsum([array.size for array in arrays])[:-1]
        parts = jnp.split(total.ravel(), ends) if len(arrays) > 1 else [total]
        return [part.reshape(a.shape).astype(a.dtype) for part, a in zip(parts, arrays, strict=True)]

    def _sum(self, names: Sequence[str], buckets: Sequence[Array]) -> None:
        """Start the all-reduce of all buckets, in place, and wait for them."""
        started = perf_counter()
        try:
            handles = [
                self._ranks.start_allreduce(torch.from_numpy(bucket), name)
                for bucket, name in zip(buckets, names, strict=True)
            ]
            for handle in handles:
                self._ranks.wait(handle)
        except Exception as error:
            self.error = error
            raise
        finally:
            self.seconds += perf_counter() - started


def _on_copies(function: Any, *buckets: Any) -> list[Array]:
    """Return copies of arrays after a function changed them in place."""
    copies = [np.array(bucket) for bucket in buckets]
    function(copies)
    return copies
