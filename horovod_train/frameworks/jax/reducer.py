"""Sum arrays over ranks from compiled JAX code.

Gradients are joined into flat buckets inside the compiled function, and an ordered callback hands
them to Horovod as they lie in memory. Bytes copied on the host for each byte of gradient:

    1  join into a bucket (compiled, fused with what made the gradient)
    2  from XLA's memory into the callback's argument: JAX copies when it calls, and again for the device
    1  into the memory in which the sum is made
    1  from there into XLA's memory

and what the transport itself needs (seen by comparing addresses, JAX 0.10.2).

Ordered, because every rank has to call Horovod in the same order, and because nothing may decide that
two sums are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental import io_callback

from horovod_train.engine.base import World
from horovod_train.frameworks.arrays import Array
from horovod_train.frameworks.buckets import plan_buckets
from horovod_train.frameworks.torch.world import TorchWorld

NARROW = (jnp.bfloat16, jnp.float16)  # summed in 32 bits: Horovod knows no bfloat16, and fp16 overflows


@dataclass
class Exchange:
    """Sums lists of arrays over ranks.

    Args:
        world: The ranks.
        bucket_size_bytes: About how much travels in one piece.
        wire_dtype: Type of 32-bit arrays on the way: float32 or float16.

    Attributes:
        seconds: Time spent in Horovod, so far.
        error: What ended the last exchange; JAX passes on its text only.
    """

    world: World
    bucket_size_bytes: int = 8 * 2**20
    wire_dtype: Any = jnp.float32
    seconds: float = field(default=0.0, init=False)
    error: Exception | None = field(default=None, init=False)

    def sum(self, arrays: Sequence[jax.Array], name: str = "gradients") -> list[jax.Array]:
        """Return the elementwise sums over ranks, in the types and shapes of the arrays.

        Every rank calls it with arrays of the same shapes in the same order; under ``jit`` or not.
        """
        if self.world.size == 1:
            return list(arrays)
        kinds = [self._type_on_wire(array.dtype) for array in arrays]
        plan = plan_buckets(
            kinds, [a.size * k.itemsize for a, k in zip(arrays, kinds, strict=True)], self.bucket_size_bytes
        )
        buckets = [
            jnp.concatenate([arrays[place].astype(kinds[place]).ravel() for place in places])
            for places in plan
        ]
        shapes = [jax.ShapeDtypeStruct(bucket.shape, bucket.dtype) for bucket in buckets]
        totals = io_callback(partial(self._on_host, name), shapes, *buckets, ordered=True)
        sums: dict[int, jax.Array] = {}
        for places, total in zip(plan, totals, strict=True):
            at = 0
            for place in places:
                array = arrays[place]
                sums[place] = total[at : at + array.size].reshape(array.shape).astype(array.dtype)
                at += array.size
        return [sums[place] for place in range(len(arrays))]

    def bytes_on_wire(self, arrays: Sequence[jax.Array]) -> int:
        """Return how many bytes a rank gives away when such arrays are summed."""
        if self.world.size == 1:
            return 0
        return sum(int(array.size) * int(self._type_on_wire(array.dtype).itemsize) for array in arrays)

    def _type_on_wire(self, dtype: Any) -> np.dtype[Any]:
        if dtype in NARROW:
            return np.dtype(np.float32)
        return np.dtype(self.wire_dtype if dtype == jnp.float32 else dtype)

    def _on_host(self, name: str, *buckets: Any) -> list[Array]:
        """Give all buckets to Horovod at once, and wait for the sums."""
        started = perf_counter()
        assert isinstance(self.world, TorchWorld)
        world = self.world
        try:
            sums = [torch.from_numpy(np.array(bucket)) for bucket in buckets]
            handles = [
                world.start_sum(tensor, f"horovod_train.{name}.{number}")
                for number, tensor in enumerate(sums)
            ]
            for handle in handles:
                world.finish(handle)
        except Exception as error:
            self.error = error
            raise
        finally:
            self.seconds += perf_counter() - started
        return [tensor.numpy() for tensor in sums]
