"""JAX on Horovod.

framework.py   jobs, and the gradient transformation for users of optax
in_place.py    Python callbacks that change buffers of compiled code in place

Horovod has no binding for JAX. Its PyTorch binding sums JAX arrays, which it receives as plain memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from horovod_train.config.support import FrameworkSupport
from horovod_train.plugins.frameworks import attributes_in, compiles_itself, lacks_bfloat16

if TYPE_CHECKING:
    from horovod_train.plugins.jax.framework import average_over_ranks, broadcast, init


__all__ = ["average_over_ranks", "broadcast", "init"]
__getattr__ = attributes_in(
    __name__,
    {"average_over_ranks": "framework", "broadcast": "framework", "init": "framework"},
)

SUPPORT = FrameworkSupport(
    f"{__name__}.framework:JaxFramework",
    ("jax",),
    "0.10.2",
    "ours, in jax.jit",
    (*compiles_itself("JAX", has_sample_randomness=True), lacks_bfloat16("JAX")),
    affected_by=("jaxlib", "framework"),
    modules=frozenset({"jax"}),
)
