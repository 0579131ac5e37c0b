"""Keras optimizers that average gradients over ranks.

Keras 3 calls none of the methods that Horovod's ``DistributedOptimizer`` overrides: with it, each rank trains
its own model, without an error. This module overrides ``_clip_gradients``, which Keras calls once per update
on all back ends, after accumulation and before clipping.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from horovod_train.collectives.base import Communicator
from horovod_train.config.schema import Allreduce
from horovod_train.errors import UserError
from horovod_train.frameworks.exchange import Exchange, name_of_exchange
from horovod_train.frameworks.keras.back_ends.base import back_end

WIRE_DTYPES = {"fp32": "float32", "fp16": "float16"}


def distribute(
    optimizer: keras.Optimizer,
    world: Communicator,
    *,
    bucket_size_mib: float = 8.0,
    wire_dtype: str = "fp32",
) -> keras.Optimizer:
    """Make an optimizer average gradients over ranks, and return it.

    Its class name and module do not change: a model that was compiled with it can be saved, and loaded
    without this package. With the policy ``mixed_float16``, it is wrapped in a loss scale that is equal on
    all ranks.

    Args:
        optimizer: The optimizer; changed in place.
        world: The communicator.
        bucket_size_mib: Approximate size of a bucket of gradients.
        wire_dtype: Data type in which float32 gradients are sent: fp32 or fp16.

    Raises:
        UserError: It is not a Keras optimizer, or distributed already; or ``wire_dtype`` is not supported.
    """
    if not isinstance(optimizer, keras.Optimizer):
        raise UserError(
            f"{optimizer!r} is a {type(optimizer).__name__}, not a Keras optimizer",
            hint="make one, such as keras.optimizers.SGD(0.1)",
        )
    allreduce = Allreduce.model_validate({"bucket_size_mib": bucket_size_mib, "wire_dtype": wire_dtype})
    if allreduce.wire_dtype not in WIRE_DTYPES:
        raise UserError(f"wire_dtype {wire_dtype!r} requires PyTorch", hint="use fp32 or fp16")
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
    """Return the exchange of a distributed optimizer."""
    assert isinstance(optimizer, _Distributed)
    return optimizer._horovod[1]  # noqa: SLF001  (our own attribute)


class _Distributed:
    """Base of the mixins."""

    _horovod: tuple[Communicator, Exchange]


class _AppliesTheMean(_Distributed):
    """Mixin that averages gradients over ranks before they are clipped."""

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        self._name = name_of_exchange(grads)  # Keras removes gradients that are None before it clips
        variables = trainable_variables or self._trainable_variables  # type: ignore[attr-defined]
        shaped = back_end().with_shapes(grads, variables)
        return super().apply(shaped, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Sequence[keras.KerasTensor]) -> Sequence[keras.KerasTensor]:
        return super()._clip_gradients(self._mean_of_ranks(grads))  # type: ignore[misc]

    def _mean_of_ranks(self, grads: Sequence[keras.KerasTensor]) -> list[keras.KerasTensor]:
        world, exchange = self._horovod
        steps = self.gradient_accumulation_steps  # type: ignore[attr-defined]
        if world.size == 1:
            return list(grads)
        if not steps or not back_end().optimizer_sees_micro_steps:
            return exchange.mean(grads, self._name)
        is_last = (self._iterations + 1) % steps == 0  # type: ignore[attr-defined]
        result: list[keras.KerasTensor] = keras.ops.cond(
            is_last, lambda: exchange.mean(grads, self._name), lambda: list(grads)
        )
        return result

    def _backend_reset_gradient_accumulators(self) -> None:
        super()._backend_reset_gradient_accumulators()  # type: ignore[misc]
        totals = self._accumulated_gradients  # type: ignore[attr-defined]
        back_end().clear([total for total in totals if total is not None])

    def __setattr__(self, name: str, value: object) -> None:
        # LossScaleOptimizer sets this attribute to None in the optimizer that it wraps.
        if name == "loss_scale_factor" and value is None and self._horovod[0].size > 1:
            _refuse_foreign_scale()
        super().__setattr__(name, value)


class _AgreesOnOverflow(_Distributed):
    """Mixin that skips a step on all ranks if a gradient of any rank is not finite."""

    def check_finite(self, grads: Sequence[keras.KerasTensor]) -> Sequence[keras.KerasTensor]:
        world, exchange = self._horovod
        mine = super().check_finite(grads)  # type: ignore[misc]
        if world.size == 1:
            return mine
        (num_finite,) = exchange.sum([keras.ops.cast(mine, "float32")], "finite")
        return num_finite == world.size


def _refuse_foreign_scale() -> None:
    raise UserError(
        "a loss scale was put around a distributed optimizer: ranks would skip different steps, and hang",
        hint="distribute(keras.optimizers.LossScaleOptimizer(optimizer), ranks)",
    )
