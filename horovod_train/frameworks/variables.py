"""Functions for variables of TensorFlow and Keras, which have ``numpy`` and ``assign`` on all back ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from horovod_train.checkpoint.arrays import ArrayBlob
from horovod_train.collectives.base import Communicator
from horovod_train.errors import UserError
from horovod_train.frameworks.arrays import (
    Array,
    check_fits,
    check_same_layout,
    from_blob,
    from_rank_0,
    to_blob,
    unique_names,
)
from horovod_train.frameworks.randomness import mix


class Variable(Protocol):
    """A variable of TensorFlow or Keras."""

    def numpy(self) -> Array:
        """Return the value."""
        ...

    def assign(self, value: Any) -> Any:
        """Overwrite the value."""
        ...


def refuse_synchronized(layers: Iterable[Any], world: Communicator) -> None:
    """Raise ``UserError`` if a layer requests statistics over ranks, which Keras computes on its own rank.

    Keras synchronizes ``BatchNormalization(synchronized=True)`` over the replicas of ``tf.distribute`` only.
    """
    found = [layer.name for layer in layers if getattr(layer, "synchronized", False) is True]
    if found and world.size > 1:
        raise UserError(
            f"the layer {found[0]!r} has synchronized=True, but Keras would normalize over the samples of "
            "each rank",
            hint="leave synchronized out, to normalize over the samples of each rank; or use framework: "
            "torch with train.sync_batch_norm",
        )


def named(variables: Iterable[Any]) -> dict[str, Any]:
    """Return variables by name; the name is the path in the model, if the variable has one."""
    found = list(variables)
    return dict(zip(unique_names([getattr(v, "path", v.name) for v in found]), found, strict=True))


def blobs_of(variables: Mapping[str, Variable]) -> dict[str, ArrayBlob]:
    """Return copies of the values of variables, as bytes."""
    return {name: to_blob(variable.numpy().copy()) for name, variable in variables.items()}


def load_blobs(variables: Mapping[str, Variable], blobs: Mapping[str, ArrayBlob], what: str) -> None:
    """Assign the values of the same names to variables.

    Raises:
        CheckpointError: Names or shapes differ; no variable has changed.
    """
    check_fits({name: tuple(variable.numpy().shape) for name, variable in variables.items()}, blobs, what)
    for name, variable in variables.items():
        variable.assign(from_blob(blobs[name]))


def correct_momentum(optimizer: Any, lr: float) -> None:
    """Multiply the momentum of a Keras SGD optimizer by (new rate / current rate), before the rate is set.

    Keras' momentum contains the rate: v = m v - rate g. With the correction, a step equals that of the form
    v = m v + g, w = w - rate v (Goyal et al., arXiv:1706.02677, section 3). Other optimizers are unchanged.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    before = float(np.asarray(inner.learning_rate))
    if before in (0.0, lr):
        return
    for momentum in getattr(inner, "momentums", ()):
        momentum.assign(momentum * (lr / before))


def broadcast(world: Communicator, variables: Mapping[str, Variable]) -> None:
    """Assign rank 0's values to the variables of all ranks.

    Raises:
        UserError: Ranks have different variables.
    """
    if world.size == 1:
        return
    check_same_layout(world, {name: variable.numpy() for name, variable in variables.items()})
    for variable in variables.values():
        variable.assign(from_rank_0(world, variable.numpy()))


def seed_states(model: Any) -> list[Any]:
    """Return the state variables of a Keras model's random generators, which differ between ranks."""
    weights = {id(variable) for variable in model.weights} if hasattr(model, "weights") else None
    return [] if weights is None else [v for v in model.variables if id(v) not in weights]


def shared_state(model: Any) -> list[Any]:
    """Return the variables that must be equal on all ranks: weights and running statistics."""
    return list(model.weights if hasattr(model, "weights") else model.variables)


def running_statistics(layers: Sequence[Any]) -> list[Any]:
    """Return the running means and variances of batch normalization, which each rank updates on its own."""
    return [
        variable
        for layer in layers
        if type(layer).__name__ == "BatchNormalization"
        for variable in layer.non_trainable_variables
        if getattr(variable, "path", "").endswith(("moving_mean", "moving_variance"))
    ]


def seed(states: Sequence[Any], seed: int) -> None:
    """Seed the random generators of a model with different numbers, derived from one seed."""
    for place, variable in enumerate(states):
        old = variable.numpy()
        numbers = [mix(seed % 2**32, place, part) % 2**31 for part in range(old.size)]
        variable.assign(np.array(numbers).astype(old.dtype).reshape(old.shape))
