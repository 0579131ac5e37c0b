"""JAX on Horovod.

exchange.py    arrays, summed over ranks from compiled code
in_place.py    Python changes the arrays of compiled code where they lie
optax.py       for users of optax: a gradient transformation
framework.py   makes everything for a job
replica.py     the training step
task.py        what a user brings

Horovod has no binding for JAX. Arrays pass through PyTorch's binding as plain memory: no JAX
array becomes a tensor that computes.
"""

from horovod_train.frameworks.jax.optax import average_over_ranks, broadcast, init

__all__ = ["average_over_ranks", "broadcast", "init"]
