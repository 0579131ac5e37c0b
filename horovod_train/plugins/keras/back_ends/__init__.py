"""Interface of a back end of Keras, and the table of supported back ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import keras

from horovod_train.collectives.base import Communicator
from horovod_train.collectives.horovod import HorovodCommunicator
from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.frameworks.exchange import Exchange
from horovod_train.registry import load_attribute

BACK_ENDS = {
    "tensorflow": "horovod_train.plugins.keras.back_ends.tensorflow:TensorflowBackEnd",
    "torch": "horovod_train.plugins.keras.back_ends.torch:TorchBackEnd",
    "jax": "horovod_train.plugins.keras.back_ends.jax:JaxBackEnd",
}


class BackEnd:
    """Base class of the back ends.

    Attributes:
        reads_inside_step: The compiled step reads its batch, so the time for reading cannot be measured.
        optimizer_sees_micro_steps: The optimizer receives the gradients of each micro-batch.
    """

    reads_inside_step = False
    optimizer_sees_micro_steps = False

    def communicator_class(self) -> type[HorovodCommunicator]:
        """Return the communicator class for the back end."""
        raise NotImplementedError

    def exchange(self, world: Communicator, bucket_size_bytes: int, wire_dtype: str) -> Exchange:
        """Return the exchange of the back end; ``wire_dtype`` is float32 or float16."""
        raise NotImplementedError

    def limit_threads(self, num_threads: int) -> None:
        """Set the number of threads for computation."""
        raise NotImplementedError

    def be_deterministic(self) -> None:
        """Disable nondeterministic operations."""
        raise NotImplementedError

    def choose_device(self, job: Job, world: Communicator) -> None:
        """Select the rank's GPU, or the CPU. Collective.

        Raises:
            UserError: A host has fewer GPUs than ranks.
            WorldError: A GPU is required and not found, or only some ranks have found GPUs.
        """
        raise NotImplementedError

    def check_compile(self, arguments: dict[str, Any]) -> None:
        """Correct arguments of ``model.compile`` for several ranks; raise UserError if one is unsupported."""

    def stream(self, batches: Iterator[tuple[object, ...]]) -> AbstractContextManager[object]:
        """Return a context with at least one batch, in the form that ``fit`` reads fastest."""
        return nullcontext(batches)

    def sync_variables(self, model: keras.Model) -> None:
        """Update a model's variables, if ``fit`` stores their values elsewhere during an epoch."""

    def with_shapes(self, gradients: Sequence[Any], variables: Sequence[keras.Variable]) -> Sequence[Any]:
        """Return the gradients of variables with known shapes, if a graph does not know them."""
        return gradients

    def set_training(self, model: keras.Model) -> None:
        """Set the mode of training again after an evaluation within ``fit``, if the back end has modes."""

    def clear(self, totals: Sequence[keras.Variable]) -> None:
        """Set accumulated gradients to zero, if Keras does not do so exactly."""

    def generators(self) -> dict[str, Any]:
        """Return the state of the random generators of the back end."""
        return {}

    def load_generators(self, states: Mapping[str, Any]) -> None:
        """Load the result of ``generators`` of this back end or another one."""


def back_end() -> BackEnd:
    """Return the back end that Keras uses; raise UserError if it is not supported."""
    return _named(keras.backend.backend())


@cache
def _named(name: str) -> BackEnd:
    if name not in BACK_ENDS:
        raise UserError(
            f"Keras uses the back end {name!r}, which cannot train on several ranks",
            hint=f"set KERAS_BACKEND to {', '.join(BACK_ENDS)}",
        )
    made: BackEnd = load_attribute(BACK_ENDS[name], what=f"Keras' back end {name!r}")()
    return made
