"""Gradients averaged over ranks, for TensorFlow training loops; in ``tf.function`` or eagerly.

Example::

    ranks = init()
    broadcast(ranks, model.variables)
    with tf.GradientTape() as tape:
        loss = ...
    gradients = DistributedGradientTape(tape, ranks).gradient(loss, variables)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, TypeVar

import tensorflow as tf

from horovod_train.collectives.base import Communicator
from horovod_train.frameworks import variables as state
from horovod_train.frameworks.exchange import name_of_exchange
from horovod_train.frameworks.join import join
from horovod_train.frameworks.tensorflow.collectives import TensorflowCommunicator
from horovod_train.frameworks.tensorflow.exchange import Exchange

if TYPE_CHECKING:
    import keras

Sources = TypeVar("Sources")
"""A nested structure of variables."""


def init() -> Communicator:
    """Initialize Horovod, and return the communicator; of one rank, if this process was started alone.

    Raises:
        EngineError: The process is one of several ranks, and Horovod is missing or cannot start.
    """
    return join(TensorflowCommunicator)


class DistributedGradientTape:
    """A gradient tape that averages gradients over ranks.

    Args:
        tape: The tape that recorded the loss.
        world: The communicator.
        bucket_size_mib: Approximate size of a bucket of gradients.
        wire_dtype: Data type in which float32 gradients are sent: fp32 or fp16.
    """

    def __init__(
        self,
        tape: tf.GradientTape,
        world: Communicator,
        *,
        bucket_size_mib: float = 8.0,
        wire_dtype: Literal["fp32", "fp16"] = "fp32",
    ) -> None:
        self._tape = tape
        wire = {"fp32": tf.float32, "fp16": tf.float16}[wire_dtype]
        self._exchange = Exchange(world, int(bucket_size_mib * 2**20), wire)

    def gradient(
        self, target: tf.Tensor, sources: Sources, output_gradients: tf.Tensor | None = None
    ) -> Sources:
        """Return the mean gradient over ranks; None for a source on which the target does not depend.

        Collective: the target must depend on the same sources on all ranks; otherwise, ranks are reported
        as missing from the exchange.

        Args:
            target: A loss.
            sources: A nested structure of TensorFlow or Keras variables.
            output_gradients: As in ``tf.GradientTape.gradient``.
        """
        values = tf.nest.map_structure(lambda v: getattr(v, "value", v) if _is_keras(v) else v, sources)
        found = self._tape.gradient(target, values, output_gradients)
        flat = tf.nest.flatten(found)
        used = [gradient for gradient in flat if gradient is not None]
        means = iter(self._exchange.mean(used, name_of_exchange(flat)))
        return tf.nest.pack_sequence_as(found, [None if g is None else next(means) for g in flat])


def broadcast(world: Communicator, variables: Iterable[tf.Variable | keras.Variable]) -> None:
    """Assign rank 0's values to variables. Call this before the first step.

    Raises:
        UserError: Ranks have different variables.
    """
    state.broadcast(world, {str(number): variable for number, variable in enumerate(variables)})


def _is_keras(variable: object) -> bool:
    return type(variable).__module__.startswith("keras.")
