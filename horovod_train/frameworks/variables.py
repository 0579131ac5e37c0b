"""Variables of TensorFlow and Keras as plain arrays: on every back end they can ``numpy`` and ``assign``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from horovod_train.checkpoint.arrays import ArrayBlob
from horovod_train.frameworks.arrays import Array, check_fits, from_blob, to_blob, unique_names
from horovod_train.frameworks.randomness import mix


class Variable(Protocol):
    """What these functions need of a variable."""

    def numpy(self) -> Array:
        """Return the value."""
        ...

    def assign(self, value: Any) -> Any:
        """Overwrite the value."""
        ...


def named(variables: Iterable[Any]) -> dict[str, Any]:
    """Return variables by name: by their path in the model where they have one."""
    found = list(variables)
    return dict(zip(unique_names([getattr(v, "path", v.name) for v in found]), found, strict=True))


def arrays_of(variables: Mapping[str, Variable]) -> dict[str, Array]:
    """Return the values of variables."""
    return {name: variable.numpy() for name, variable in variables.items()}


def blobs_of(variables: Mapping[str, Variable]) -> dict[str, ArrayBlob]:
    """Return the values of variables as bytes; the copies stay when the variables change."""
    return {name: to_blob(variable.numpy().copy()) for name, variable in variables.items()}


def load_blobs(variables: Mapping[str, Variable], blobs: Mapping[str, ArrayBlob], what: str) -> None:
    """Overwrite variables with the values of the same names.

    Raises:
        CheckpointError: Names or shapes differ; nothing was changed then.
    """
    check_fits({name: tuple(variable.numpy().shape) for name, variable in variables.items()}, blobs, what)
    for name, variable in variables.items():
        variable.assign(from_blob(blobs[name]))


def seed_states(model: Any) -> list[Any]:
    """Return the states of a Keras model's random generators: a rank's own, unlike weights."""
    weights = {id(variable) for variable in model.weights} if hasattr(model, "weights") else None
    return [] if weights is None else [v for v in model.variables if id(v) not in weights]


def shared_state(model: Any) -> list[Any]:
    """Return what has to be equal on all ranks: weights and statistics."""
    return list(model.weights if hasattr(model, "weights") else model.variables)


def running_statistics(layers: Sequence[Any]) -> list[Any]:
    """Return the running means and variances of batch normalization, which ranks update by themselves."""
    return [
        variable
        for layer in layers
        if type(layer).__name__ == "BatchNormalization"
        for variable in layer.non_trainable_variables
        if getattr(variable, "path", "").endswith(("moving_mean", "moving_variance"))
    ]


def seed(states: Sequence[Any], seed: int) -> None:
    """Give each random generator of a model its own state, from one number."""
    for place, variable in enumerate(states):
        old = variable.numpy()
        numbers = [mix(seed % 2**32, place, part) % 2**31 for part in range(old.size)]
        variable.assign(np.array(numbers).astype(old.dtype).reshape(old.shape))
