"""Sum arrays over ranks from compiled JAX code.

On a CPU Horovod sums where XLA's arrays lie. Bytes copied on the host for each byte of gradient: none
where a gradient is large enough to travel alone, one where it joins a bucket (inside the compiled
function); and what the transport itself needs. On other devices a callback takes the gradients to the
host and back.

In the order of the program, because every rank has to call Horovod in the same order, and because
nothing may decide that two sums are one.
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

from horovod_train.collectives.base import Communicator
from horovod_train.frameworks.arrays import Array
from horovod_train.frameworks.buckets import plan_buckets
from horovod_train.frameworks.jax.in_place import in_place, shapes_of
from horovod_train.frameworks.torch.comm.collectives import TensorCollectives, with_tensors

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

    world: Communicator
    bucket_size_bytes: int = 8 * 2**20
    wire_dtype: Any = jnp.float32
    seconds: float = field(default=0.0, init=False)
    error: Exception | None = field(default=None, init=False)
    _ranks: TensorCollectives = field(init=False)

    def __post_init__(self) -> None:
        self._ranks = with_tensors(self.world)  # once: it takes long compared with a step

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
            if len(places) > 1
            else arrays[places[0]].astype(kinds[places[0]])
            for places in plan
        ]
        totals = jax.lax.platform_dependent(
            *buckets,
            cpu=lambda *buckets: in_place(partial(self._sum, name), buckets),
            default=lambda *buckets: io_callback(
                partial(self._sum_copies, name), shapes_of(buckets), *buckets, ordered=True
            ),
        )
        sums: dict[int, jax.Array] = {}
        for places, total in zip(plan, totals, strict=True):
            at = 0
            for place in places:
                array = arrays[place]
                piece = total.ravel()[at : at + array.size] if len(places) > 1 else total
                sums[place] = piece.reshape(array.shape).astype(array.dtype)
                at += array.size
        return [sums[place] for place in range(len(arrays))]

    def mean(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the elementwise means over ranks; otherwise as ``sum``."""
        return [total / self.world.size for total in self.sum(arrays)]

    def bytes_on_wire(self, arrays: Sequence[jax.Array]) -> int:
        """Return how many bytes a rank gives away when such arrays are summed."""
        if self.world.size == 1:
            return 0
        return sum(int(array.size) * int(self._type_on_wire(array.dtype).itemsize) for array in arrays)

    def _type_on_wire(self, dtype: Any) -> np.dtype[Any]:
        if dtype in NARROW:
            return np.dtype(np.float32)
        return np.dtype(self.wire_dtype if dtype == jnp.float32 else dtype)

    def _sum(self, name: str, buckets: Sequence[Array]) -> None:
        """Give all buckets to Horovod at once, and wait until the sums have taken their places."""
        started = perf_counter()
        try:
            handles = [
                self._ranks.start_allreduce(torch.from_numpy(bucket), f"horovod_train.{name}.{number}")
                for number, bucket in enumerate(buckets)
            ]
            for handle in handles:
                self._ranks.wait(handle)
        except Exception as error:
            self.error = error
            raise
        finally:
            self.seconds += perf_counter() - started

    def _sum_copies(self, name: str, *buckets: Any) -> list[Array]:
        sums = [np.array(bucket) for bucket in buckets]
        self._sum(name, sums)
        return sums
