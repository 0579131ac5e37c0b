"""Python callbacks that change the buffers of compiled JAX code in place, on a CPU.

JAX's callbacks copy each argument and each result twice. XLA's C interface for custom calls
(``xla/ffi/api/c_api.h`` of jaxlib, version 0.x) passes addresses instead. This module declares its structures
for ctypes.
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

from horovod_train.frameworks.plain_data import Array

TARGET = "horovod_train_in_place"
METADATA = 1  # extension by which XLA requests the version of a handler
INTERNAL = 13  # error code
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
    """XLA_FFI_Args and XLA_FFI_Rets, which have equal layouts."""

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
    """Return arrays after a function changed them in place, in compiled code on a CPU.

    Calls run in program order, like those of ``io_callback(ordered=True)``.

    Args:
        function: Receives writable arrays of the same shapes and types. Its exceptions end the program.
        arrays: At least one array; of floating-point types.
    """
    _register()
    shapes = shapes_of(arrays)
    call = jax.ffi.ffi_call(
        TARGET,
        shapes,
        has_side_effect=True,
        input_output_aliases={place + 1: place for place in range(len(shapes))},
    )
    # XLA does not order custom calls: data dependencies put this one between two ordered callbacks.
    ticket = io_callback(partial(_announce, function), jax.ShapeDtypeStruct((), np.int32), ordered=True)
    changed = call(ticket, *arrays)
    io_callback(_conclude, None, changed[0].ravel()[:1], ordered=True)
    return list(changed)


_announced: dict[int, Callable[[list[Array]], None]] = {}
_tickets = count()


def _announce(function: Callable[[list[Array]], None]) -> Array:
    """Register the function of the next call; the returned ticket is an argument of that call."""
    ticket = next(_tickets) % 2**31
    _announced[ticket] = function
    return np.array(ticket, np.int32)


def _conclude(_: object) -> None:
    """Do nothing: this callback orders what follows after the call whose result it reads."""


@cache
def _register() -> None:
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(_handle), platform="cpu")


@CFUNCTYPE(c_void_p, POINTER(CallFrame))
def _handle(pointer: Any) -> int | None:
    """Handle a custom call of XLA; return a pointer to an error of XLA, or None."""
    frame = pointer.contents
    if frame.extension and frame.extension.contents.kind == METADATA:
        # The fields that are used are equal in all versions 0.x.
        metadata = Metadata.from_address(frame.extension.contents.metadata)
        used = frame.api.contents.version
        metadata.version.major, metadata.version.minor = 0, used.minor
        return None
    try:
        ticket, *given = (frame.arguments.buffers[i].contents for i in range(frame.arguments.count))
        results = [frame.results.buffers[i].contents for i in range(frame.results.count)]
        for source, target in zip(given, results, strict=True):
            if source.data != target.data:
                ctypes.memmove(target.data, source.data, _view(target).nbytes)
        _announced.pop(c_int32.from_address(ticket.data).value)([_view(result) for result in results])
    except BaseException as error:  # noqa: BLE001  (an exception cannot cross ctypes)
        text = f"{type(error).__name__}: {error}".encode()
        arguments = ErrorArguments(ctypes.sizeof(ErrorArguments), None, text, INTERNAL)
        code: int = frame.api.contents.create_error(arguments)
        return code
    return None


def _view(buffer: Buffer) -> Array:
    """Return an array that shares memory with a buffer."""
    shape = tuple(buffer.dims[: buffer.rank])
    dtype = np.dtype(DTYPES[buffer.dtype])
    if 0 in shape:
        return np.empty(shape, dtype)  # the address may be null
    memory = (ctypes.c_char * (int(np.prod(shape)) * dtype.itemsize)).from_address(buffer.data)
    return np.frombuffer(memoryview(memory).cast("B"), dtype).reshape(shape)
