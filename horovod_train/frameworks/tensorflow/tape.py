"""For users of TensorFlow with their own training loop.

Make the tape's gradients the mean over ranks, inside of ``tf.function`` or not:

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
from horovod_train.frameworks.arrays import check_same_layout, from_rank_0
from horovod_train.frameworks.join import join
from horovod_train.frameworks.tensorflow.collectives import TensorflowCommunicator
from horovod_train.frameworks.tensorflow.exchange import Exchange

if TYPE_CHECKING:
    import keras

Sources = TypeVar("Sources")
"""Variables in any nest."""


def init() -> Communicator:
    """Join the ranks this process was started with; a world of one when there are none.

    Raises:
        EngineError: Started as one of several ranks, and Horovod is missing or cannot start.
    """
    return join(TensorflowCommunicator)


class DistributedGradientTape:
    """A tape whose gradients are the mean over ranks; inside of ``tf.function`` or not.

    Args:
        tape: What has recorded the loss.
        world: The ranks.
        bucket_size_mib: Gradients travel in pieces of about this size.
        wire_dtype: Type of 32-bit gradients on the way: fp32 or fp16.
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
        wire = tf.float16 if wire_dtype == "fp16" else tf.float32
        self._exchange = Exchange(world, int(bucket_size_mib * 2**20), wire)

    def gradient(
        self, target: tf.Tensor, sources: Sources, output_gradients: tf.Tensor | None = None
    ) -> Sources:
        """Return the mean over ranks of the gradient; None where no rank's target depends on a source.

        Args:
            target: A loss.
            sources: Variables, TensorFlow's or Keras's, in any nest.
            output_gradients: As in ``tf.GradientTape.gradient``.
        """
        values = tf.nest.map_structure(lambda v: getattr(v, "value", v) if _is_keras(v) else v, sources)
        found = self._tape.gradient(target, values, output_gradients)
        flat = tf.nest.flatten(found)
        used = [gradient for gradient in flat if gradient is not None]
        means = iter(self._exchange.mean(used))
        return tf.nest.pack_sequence_as(found, [None if g is None else next(means) for g in flat])


def broadcast(world: Communicator, variables: Iterable[tf.Variable | keras.Variable]) -> None:
    """Give variables rank 0's values: call it before the first step.

    Raises:
        UserError: Ranks hold different variables.
    """
    if world.size == 1:
        return
    by_name = {str(number): variable for number, variable in enumerate(variables)}
    check_same_layout(world, state.arrays_of(by_name))
    for variable in by_name.values():
        variable.assign(from_rank_0(world, variable.numpy()))


def _is_keras(variable: object) -> bool:
    return type(variable).__module__.startswith("keras.")
