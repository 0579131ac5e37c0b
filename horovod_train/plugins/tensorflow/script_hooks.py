"""Instrumentation of TensorFlow and its Horovod binding for scripts.

A step is the outermost call of a compiled function whose graph contains an all-reduce. In eager mode, a step
ends when a Keras optimizer has updated the weights. Phases within a graph are not measured separately.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from time import monotonic, perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

from horovod_train.scripts.meter import StepMeter, replace_everywhere


class _Calls:
    """Calls of compiled functions: the running ones, and functions that run steps."""

    def __init__(self) -> None:
        self.running: list[Function] = []
        self.bytes_of_step: WeakKeyDictionary[Function, int] = WeakKeyDictionary()
        """Bytes of the all-reduces in a function's newest graph."""
        self.graph: object = None
        """The graph that was traced last."""
        self.optimizer: Any = None

    @property
    def lr(self) -> float | None:
        """Learning rate of the optimizer that was used last."""
        try:
            return None if self.optimizer is None else float(self.optimizer.learning_rate)
        except (TypeError, ValueError, AttributeError):
            return None

    def note_traced(self, size_bytes: int) -> None:
        """Add the size of an all-reduce to the graph that is being traced."""
        graph: Any = tf.compat.v1.get_default_graph()
        while getattr(graph, "outer_graph", None) is not None and graph.outer_graph.building_function:
            graph = graph.outer_graph  # leave the graph of a loop or branch
        function = self.running[0]
        before = self.bytes_of_step.get(function, 0) if graph is self.graph else 0
        self.graph, self.bytes_of_step[function] = graph, before + size_bytes


_calls = _Calls()


def watch_tensorflow(meter: StepMeter) -> None:
    """Instrument calls of compiled functions."""
    plain_call = Function.__call__

    @wraps(plain_call)
    def call(self: Function, *args: object, **kwargs: object) -> object:
        is_outermost, begun_s = not _calls.running, perf_counter()
        _calls.running.append(self)
        try:
            found = plain_call(self, *args, **kwargs)
        finally:
            _calls.running.pop()
        if is_outermost and self in _calls.bytes_of_step and not meter.is_off:
            with meter.watching:
                meter.sent(_calls.bytes_of_step[self])
                if _is_horovods(self):  # in eager mode, Horovod sums gradients in a function of its own
                    meter.add_wait_s(perf_counter() - begun_s)
                else:
                    meter.begin(begun_s, length_of((args, kwargs)))
                    _step(meter)
        return found

    Function.__call__ = call


def watch_optimizers(meter: StepMeter) -> None:
    """Instrument the optimizers of Keras."""
    optimizers: Any = sys.modules["keras.src.optimizers.base_optimizer"].BaseOptimizer
    plain_apply = optimizers.apply

    @wraps(plain_apply)
    def apply(self: object, *args: object, **kwargs: object) -> object:
        found = plain_apply(self, *args, **kwargs)
        _calls.optimizer = self
        if not _calls.running and tf.executing_eagerly() and not meter.is_off:
            with meter.watching:
                _step(meter)
        return found

    optimizers.apply = apply


def watch_horovod_tensorflow(meter: StepMeter) -> None:
    """Instrument all-reduces."""
    for name in ("_allreduce", "_grouped_allreduce"):
        plain = getattr(sys.modules["horovod.tensorflow.mpi_ops"], name)
        replace_everywhere("horovod.tensorflow", name, plain, _counted(plain, meter))


def _counted(plain: Callable[..., object], meter: StepMeter) -> Callable[..., object]:
    @wraps(plain)
    def counted(tensors: object, *args: object, **kwargs: object) -> object:
        is_traced = bool(_calls.running)
        with meter.watching:
            given = tensors if isinstance(tensors, list | tuple) else [tensors]
            size_bytes = sum(map(_size_bytes, given))
            if is_traced:
                _calls.note_traced(size_bytes)
            else:
                meter.sent(size_bytes)
        begun_s = perf_counter()
        meter.waiting_since_s = None if is_traced else monotonic()
        try:
            return plain(tensors, *args, **kwargs)
        finally:
            meter.waiting_since_s = None
            if not is_traced and not meter.is_off:
                with meter.watching:
                    meter.add_wait_s(perf_counter() - begun_s)

    return counted


def _is_horovods(function: Function) -> bool:
    return str(function.python_function.__module__).startswith("horovod.")


def _step(meter: StepMeter) -> None:
    if not meter.num_steps:
        horovod = sys.modules.get("horovod.tensorflow")
        size = horovod.size() if horovod is not None and horovod.is_initialized() else 1
        variables = getattr(_calls.optimizer, "_trainable_variables", ())
        num_parameters = sum(variable.shape.num_elements() or 0 for variable in map(_as_tensor, variables))
        on_gpu = bool(tf.config.list_logical_devices("GPU"))
        meter.is_asynchronous = on_gpu
        meter.begin_training(num_parameters, size, "gpu" if on_gpu else "cpu")
    meter.step(_calls.lr, last_phase="compute")


def _as_tensor(variable: object) -> tf.Tensor:
    return getattr(variable, "value", variable)


def _size_bytes(tensor: tf.Tensor) -> int:
    return int((tensor.shape.num_elements() or 0) * tensor.dtype.size)


def length_of(arguments: object) -> int | None:
    """Return the length of the first array or tensor among the arguments; None: there is none."""
    for each in tf.nest.flatten(arguments):
        shape = getattr(each, "shape", None)
        if shape is not None and len(shape):
            return int(shape[0])
    return None
