"""TensorFlow and Horovod's binding for it, watched while a script uses them.

A step is the outermost call of a function in whose graph something is given to all-reduce; where nothing is
compiled, it ends when a Keras optimizer has updated the weights. Inside of a graph, phases are not separated.
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
    """Functions that are being called, and those that make steps."""

    def __init__(self) -> None:
        self.running: list[Function] = []
        self.bytes_of_step: WeakKeyDictionary[Function, int] = WeakKeyDictionary()
        """Bytes that a call of a function gives to all-reduce, by its newest graph."""
        self.graph: object = None
        """The graph that is being made, or was last."""
        self.optimizer: Any = None

    @property
    def lr(self) -> float | None:
        """The learning rate of the optimizer that was seen last."""
        try:
            return None if self.optimizer is None else float(self.optimizer.learning_rate)
        except (TypeError, ValueError, AttributeError):
            return None

    def note_traced(self, size_bytes: int) -> None:
        """Note that each call of the graph that is being made will give so much to all-reduce."""
        graph: Any = tf.compat.v1.get_default_graph()
        while getattr(graph, "outer_graph", None) is not None and graph.outer_graph.building_function:
            graph = graph.outer_graph  # of a loop or a branch within it
        function = self.running[0]
        before = self.bytes_of_step.get(function, 0) if graph is self.graph else 0
        self.graph, self.bytes_of_step[function] = graph, before + size_bytes


_calls = _Calls()


def watch_tensorflow(meter: StepMeter) -> None:
    """Watch the functions that a script has compiled."""
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
                if _is_horovods(self):  # where nothing is compiled, it sums gradients in its own function
                    meter.add_wait_s(perf_counter() - begun_s)
                else:
                    meter.begin(begun_s, length_of((args, kwargs)))
                    _step(meter)
        return found

    Function.__call__ = call


def watch_optimizers(meter: StepMeter) -> None:
    """Watch the optimizers of Keras."""
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
    """Watch what is given to all-reduce."""
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
        meter.hides_phases = on_gpu
        meter.begin_training(num_parameters, size, "gpu" if on_gpu else "cpu")
    meter.step(_calls.lr, last_phase="compute")


def _as_tensor(variable: object) -> tf.Tensor:
    return getattr(variable, "value", variable)


def _size_bytes(tensor: tf.Tensor) -> int:
    return int((tensor.shape.num_elements() or 0) * tensor.dtype.size)


def length_of(arguments: object) -> int | None:
    """Return the length of the first array or tensor among arguments; None: there is none."""
    for each in tf.nest.flatten(arguments):
        shape = getattr(each, "shape", None)
        if shape is not None and len(shape):
            return int(shape[0])
    return None
