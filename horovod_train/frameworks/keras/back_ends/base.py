"""What a back end of Keras is to this package, and the table of those there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    "tensorflow": "horovod_train.frameworks.keras.back_ends.tensorflow:TensorflowBackEnd",
    "torch": "horovod_train.frameworks.keras.back_ends.torch:TorchBackEnd",
    "jax": "horovod_train.frameworks.keras.back_ends.jax:JaxBackEnd",
}


class BackEnd:
    """One of them; a class for each overrides what is different there.

    Attributes:
        reads_inside_step: A step reads its batch itself, so reading cannot be timed.
        optimizer_sees_micro_steps: The optimizer receives the gradients of each micro-batch.
    """

    reads_inside_step = False
    optimizer_sees_micro_steps = False

    def communicator_class(self) -> type[HorovodCommunicator]:
        """Return the binding that ranks communicate through."""
        raise NotImplementedError

    def exchange(self, world: Communicator, bucket_size_bytes: int, wire_dtype: str) -> Exchange:
        """Return what sums tensors; 32-bit ones travel as ``wire_dtype``, float32 or float16."""
        raise NotImplementedError

    def limit_threads(self, num_threads: int) -> None:
        """Compute with so many threads."""
        raise NotImplementedError

    def be_deterministic(self) -> None:
        """Refuse operations whose result can differ."""
        raise NotImplementedError

    def choose_device(self, job: Job, world: Communicator) -> None:
        """Take the rank's own GPU, or the CPU.

        Raises:
            UserError: A GPU is required, and this rank has none.
        """
        raise NotImplementedError

    def check_compile(self, arguments: dict[str, Any]) -> None:
        """Look at, and correct, what a model of several ranks is compiled with.

        Raises:
            UserError: It is not supported.
        """

    def stream(self, batches: Iterator[tuple[object, ...]]) -> object:
        """Return at least one batch in the form that is read best."""
        return batches

    def take_back_state(self, model: keras.Model) -> None:
        """Let a model's variables have their values, where ``fit`` holds them itself during an epoch."""

    def clear(self, totals: Sequence[keras.Variable]) -> None:
        """Make accumulated gradients zero, where Keras leaves something behind."""

    def generators(self) -> dict[str, Any]:
        """Return the state of random generators that are neither the model's nor Python's."""
        return {}

    def load_generators(self, states: Mapping[str, Any]) -> None:
        """Take over what ``generators`` returned, of this back end or another."""


def back_end() -> BackEnd:
    """Return the back end that Keras uses.

    Raises:
        UserError: It cannot train on several ranks.
    """
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
