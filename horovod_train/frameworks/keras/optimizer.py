"""An optimizer that applies the mean gradient of all ranks.

Keras 3 calls none of the methods that Horovod's own wrapper overrides: under it every rank trains by
itself, and nothing says so. Here one hook is used that runs once per update on every back end, after
accumulation and before clipping.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras

from horovod_train.collectives.base import Communicator
from horovod_train.config.schema import Allreduce
from horovod_train.errors import UserError
from horovod_train.frameworks.keras.back_ends.base import Exchange, back_end

WIRE_DTYPES = {"fp32": "float32", "fp16": "float16"}


def distribute(
    optimizer: keras.Optimizer,
    world: Communicator,
    *,
    bucket_size_mib: float = 8.0,
    wire_dtype: str = "fp32",
) -> keras.Optimizer:
    """Make an optimizer apply the mean gradient of all ranks, and return it.

    It stays of the class it was for Keras: a model compiled with it is saved and loaded as usual, also
    where this package is not installed. Under the policy ``mixed_float16`` a loss scale is put around
    it that all ranks agree on.

    Args:
        optimizer: Changed in place.
        world: From ``init()``.
        bucket_size_mib: Gradients travel in pieces of about this size.
        wire_dtype: Type of 32-bit gradients on the way: fp32 or fp16.

    Raises:
        UserError: It is distributed already, or no Keras optimizer.
    """
    if not isinstance(optimizer, keras.Optimizer):
        raise UserError(
            f"{optimizer!r} is a {type(optimizer).__name__}, not a Keras optimizer",
            hint="make one, such as keras.optimizers.SGD(0.1)",
        )
    allreduce = Allreduce.model_validate({"bucket_size_mib": bucket_size_mib, "wire_dtype": wire_dtype})
    size_bytes = int(allreduce.bucket_size_mib * 2**20)
    exchange = back_end().exchange(world, size_bytes, WIRE_DTYPES[allreduce.wire_dtype])
    scale_class = keras.optimizers.LossScaleOptimizer
    if keras.config.dtype_policy().name == "mixed_float16" and not isinstance(optimizer, scale_class):
        optimizer = scale_class(optimizer)
    if isinstance(optimizer, scale_class):
        _become(optimizer.inner_optimizer, _AppliesTheMean, world, exchange)
        _become(optimizer, _AgreesOnOverflow, world, exchange)
    else:
        _become(optimizer, _AppliesTheMean, world, exchange)
    return optimizer


def _become(optimizer: keras.Optimizer, mixin: type, world: Communicator, exchange: Exchange) -> None:
    base = type(optimizer)
    if issubclass(base, _Distributed):
        raise UserError("the optimizer is distributed already", hint="call distribute() once")
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    optimizer.__class__ = type(base.__name__, (mixin, base), names)
    optimizer._horovod = (world, exchange)  # noqa: SLF001  (our own attribute)


def exchange_of(optimizer: keras.Optimizer) -> Exchange:
    """Return what sums the gradients of a distributed optimizer."""
    assert isinstance(optimizer, _Distributed)
    return optimizer._horovod[1]  # noqa: SLF001  (our own attribute)


class _Distributed:
    """What is mixed into an optimizer's class."""

    _horovod: tuple[Communicator, Exchange]


class _AppliesTheMean(_Distributed):
    """Replaces gradients by their mean over ranks, before they are clipped."""

    def _clip_gradients(self, grads: Sequence[keras.KerasTensor]) -> Sequence[keras.KerasTensor]:
        return super()._clip_gradients(self._mean_of_ranks(grads))  # type: ignore[misc]

    def _mean_of_ranks(self, grads: Sequence[keras.KerasTensor]) -> list[keras.KerasTensor]:
        world, exchange = self._horovod
        steps = self.gradient_accumulation_steps  # type: ignore[attr-defined]
        if world.size == 1:
            return list(grads)
        if not steps or not back_end().optimizer_sees_micro_steps:
            return exchange.mean(grads)
        is_last = (self._iterations + 1) % steps == 0  # type: ignore[attr-defined]
        result: list[keras.KerasTensor] = keras.ops.cond(
            is_last, lambda: exchange.mean(grads), lambda: list(grads)
        )
        return result

    def _backend_reset_gradient_accumulators(self) -> None:
        super()._backend_reset_gradient_accumulators()  # type: ignore[misc]
        totals = self._accumulated_gradients  # type: ignore[attr-defined]
        back_end().clear([total for total in totals if total is not None])

    def __setattr__(self, name: str, value: object) -> None:
        # What LossScaleOptimizer does first of all to the optimizer inside of it.
        if name == "loss_scale_factor" and value is None and self._horovod[0].size > 1:
            _refuse_foreign_scale()
        super().__setattr__(name, value)


class _AgreesOnOverflow(_Distributed):
    """Skips a step on all ranks when a gradient of any of them is not finite."""

    def check_finite(self, grads: Sequence[keras.KerasTensor]) -> Sequence[keras.KerasTensor]:
        world, exchange = self._horovod
        mine = super().check_finite(grads)  # type: ignore[misc]
        if world.size == 1:
            return mine
        (num_finite,) = exchange.sum([keras.ops.cast(mine, "float32")], "finite")
        return num_finite == world.size


def _refuse_foreign_scale() -> None:
    raise UserError(
        "a loss scale was put around a distributed optimizer: ranks would overflow apart and wait for "
        "each other for ever",
        hint="distribute(keras.optimizers.LossScaleOptimizer(optimizer), ranks)",
    )
