"""JAX on Horovod.

in_place.py    Python callbacks that change buffers of compiled code in place
optax.py       gradient transformation for users of optax

Horovod has no binding for JAX. Its PyTorch binding sums JAX arrays, which it receives as plain memory.
"""

from horovod_train.frameworks.jax.optax import average_over_ranks, broadcast, init

__all__ = ["average_over_ranks", "broadcast", "init"]
