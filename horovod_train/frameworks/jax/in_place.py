"""Let Python change the arrays of compiled JAX code where they lie, on a CPU: no byte is copied.

JAX's own callbacks copy each argument twice on its way in and each result twice on its way out. XLA's
C interface for custom calls (``xla/ffi/api/c_api.h`` of jaxlib, version 0.x) hands out addresses
instead. The structures of it that are needed are mirrored here for ctypes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_int32, c_int64, c_size_t, c_void_p
from functools import cache, partial
from itertools import count
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from horovod_train.frameworks.arrays import Array

TARGET = "horovod_train_in_place"
METADATA = 1  # the extension by which XLA asks a handler for its version
INTERNAL = 13  # an error code
DTYPES = {10: np.float16, 11: np.float32, 12: np.float64}


class Extension(Structure):
    """XLA_FFI_Extension_Base, and XLA_FFI_Metadata_Extension if ``kind`` is METADATA."""

    _fields_ = [("size", c_size_t), ("kind", c_int), ("next", c_void_p), ("metadata", c_void_p)]


class Version(Structure):
    """XLA_FFI_Api_Version."""

    _fields_ = [("size", c_size_t), ("extension", c_void_p), ("major", c_int), ("minor", c_int)]


class Metadata(Structure):
    """The beginning of XLA_FFI_Metadata."""

    _fields_ = [("size", c_size_t), ("version", Version)]


class ErrorArguments(Structure):
    """XLA_FFI_Error_Create_Args."""

    _fields_ = [("size", c_size_t), ("extension", c_void_p), ("message", c_char_p), ("code", c_int)]


class Api(Structure):
    """The beginning of XLA_FFI_Api."""

    _fields_ = [
        ("size", c_size_t),
        ("extension", c_void_p),
        ("version", Version),
        ("internal", c_void_p),
        ("create_error", CFUNCTYPE(c_void_p, POINTER(ErrorArguments))),
    ]


class Buffer(Structure):
    """XLA_FFI_Buffer."""

    _fields_ = [
        ("size", c_size_t),
        ("extension", c_void_p),
        ("dtype", c_int),
        ("data", c_void_p),
        ("rank", c_int64),
        ("dims", POINTER(c_int64)),
    ]


class Buffers(Structure):
    """XLA_FFI_Args and XLA_FFI_Rets, which look alike."""

    _fields_ = [
        ("size", c_size_t),
        ("extension", c_void_p),
        ("count", c_int64),
        ("kinds", c_void_p),
        ("buffers", POINTER(POINTER(Buffer))),
    ]


class CallFrame(Structure):
    """The beginning of XLA_FFI_CallFrame."""

    _fields_ = [
        ("size", c_size_t),
        ("extension", POINTER(Extension)),
        ("api", POINTER(Api)),
        ("context", c_void_p),
        ("stage", c_int),
        ("arguments", Buffers),
        ("results", Buffers),
    ]


def shapes_of(arrays: Sequence[jax.Array]) -> list[jax.ShapeDtypeStruct]:
    """Return shapes and types of arrays."""
    return [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]


def in_place(function: Callable[[list[Array]], None], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Return arrays as a function leaves them, for compiled code on a CPU.

    Calls are made in the order of the program, like those of ``io_callback(ordered=True)``.

    Args:
        function: Gets the arrays to change, of the same shapes and types. What it raises ends the
            program with its text.
        arrays: Of floating-point types, at least one.
    """
    _register()
    shapes = shapes_of(arrays)
    call = jax.ffi.ffi_call(
        TARGET,
        shapes,
        has_side_effect=True,
        input_output_aliases={place + 1: place for place in range(len(shapes))},
    )
    # Custom calls are not ordered: this one runs between two callbacks, which are.
    ticket = io_callback(partial(_announce, function), jax.ShapeDtypeStruct((), np.int32), ordered=True)
    changed = call(ticket, *arrays)
    io_callback(_conclude, None, changed[0].ravel()[:1], ordered=True)
    return list(changed)


_announced: dict[int, Callable[[list[Array]], None]] = {}
_tickets = count()


def _announce(function: Callable[[list[Array]], None]) -> Array:
    """Say which function the next call is for; the ticket travels to it through the program."""
    ticket = next(_tickets) % 2**31
    _announced[ticket] = function
    return np.array(ticket, np.int32)


def _conclude(_: object) -> None:
    """Do nothing: what comes after this callback comes after the call whose result it reads."""


@cache
def _register() -> None:
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(_handle), platform="cpu")


@CFUNCTYPE(c_void_p, POINTER(CallFrame))
def _handle(pointer: Any) -> int | None:
    """Be called by XLA; return an error of XLA's or None."""
    frame = pointer.contents
    if frame.extension and frame.extension.contents.kind == METADATA:
        # All versions 0.x begin alike, and no more than the beginning is used.
        metadata = Metadata.from_address(frame.extension.contents.metadata)
        spoken = frame.api.contents.version
        metadata.version.major, metadata.version.minor = 0, spoken.minor
        return None
    try:
        ticket, *given = (frame.arguments.buffers[i].contents for i in range(frame.arguments.count))
        results = [frame.results.buffers[i].contents for i in range(frame.results.count)]
        for source, target in zip(given, results, strict=True):
            if source.data != target.data:
                ctypes.memmove(target.data, source.data, _view(target).nbytes)
        _announced.pop(c_int32.from_address(ticket.data).value)([_view(result) for result in results])
    except BaseException as error:  # noqa: BLE001  (nothing else would pass it on)
        text = f"{type(error).__name__}: {error}".encode()
        arguments = ErrorArguments(ctypes.sizeof(ErrorArguments), None, text, INTERNAL)
        code: int = frame.api.contents.create_error(arguments)
        return code
    return None


def _view(buffer: Buffer) -> Array:
    """Return a buffer's memory as an array."""
    shape = tuple(buffer.dims[: buffer.rank])
    dtype = np.dtype(DTYPES[buffer.dtype])
    if 0 in shape:
        return np.empty(shape, dtype)  # there may be no memory then
    memory = (ctypes.c_char * (int(np.prod(shape)) * dtype.itemsize)).from_address(buffer.data)
    return np.frombuffer(memoryview(memory).cast("B"), dtype).reshape(shape)
