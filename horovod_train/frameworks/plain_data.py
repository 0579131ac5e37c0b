"""Python values that checkpoints contain: numbers, text, arrays, random generators, and containers of them.

A value is saved as JSON and arrays (``checkpoint/tree.py``). A value that JSON does not have is a list of two
elements in a dictionary with one reserved key: its kind, and its content.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any, Protocol

import numpy as np

from horovod_train.checkpoint.arrays import ArrayBlob
from horovod_train.checkpoint.tree import RESERVED, pack_tree, unpack_tree
from horovod_train.errors import CheckpointError
from horovod_train.frameworks.arrays import from_blob, to_blob

KIND = "__kind__"
SCALARS = (type(None), bool, int, float, str)
SEQUENCES: Mapping[str, Any] = {kind.__name__: kind for kind in (set, frozenset, deque)}
MAPPINGS: Mapping[str, Any] = {kind.__name__: kind for kind in (dict, OrderedDict, Counter, defaultdict)}
CONTAINERS = (list, tuple, *SEQUENCES.values(), *MAPPINGS.values())
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
MAX_ELEMENTS = 1_000_000
"""Largest number of elements of a value, with those of its containers."""
WHOLE_BYTES, SAMPLE_BYTES = 2**16, 2**12
"""An array with more bytes is compared by its version and the bytes at its start and its end."""
WHOLE_LENGTH, SAMPLE_LENGTH = 10_000, 100
"""The same for the elements of a container."""


class Hasher(Protocol):
    """A hash of bytes."""

    def update(self, data: Any, /) -> None:
        """Add bytes."""
        ...


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor of PyTorch, which may not be installed."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_generator(value: object) -> bool:
    """Return whether a value is a generator of random numbers."""
    torch = sys.modules.get("torch")
    return isinstance(value, GENERATORS) or (torch is not None and isinstance(value, torch.Generator))


def is_variable(value: object) -> bool:
    """Return whether a value is a variable of TensorFlow or Keras."""
    return callable(getattr(value, "assign", None)) and callable(getattr(value, "numpy", None))


def is_array_of_jax(value: object) -> bool:
    """Return whether a value is an array of JAX, which may not be installed."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)


def is_plain(value: object, *, by_sample: bool = False) -> bool:
    """Return whether a checkpoint can contain a value.

    A value with too many elements, or that contains itself, is not plain. With ``by_sample``, only some
    elements of a long container are examined.
    """
    left = MAX_ELEMENTS

    def check(each: Any, depth: int) -> bool:
        nonlocal left
        left -= 1
        if left < 0:
            return False
        if isinstance(each, np.ndarray):
            return each.dtype.kind in "biufc"
        if is_tensor(each):
            return not (each.is_meta or each.is_sparse or hasattr(each, "placements"))
        if isinstance(each, SCALARS) or any(kind.has(each) for kind in KINDS):
            return True
        if depth == 0 or type(each) not in CONTAINERS or left < len(each):
            return False
        return all(check(one, depth - 1) for one in (_sampled(each) if by_sample else members(each)))

    return check(value, depth=20)


def members(container: Any) -> Iterator[Any]:
    """Yield the elements of a container; of a dictionary, keys and values."""
    if isinstance(container, Mapping):
        for pair in container.items():
            yield from pair
    else:
        yield from container


# -- comparison


def fingerprint(value: object, *, by_identity: bool) -> str:
    """Return a text that differs if plain values differ; a large array may change without it.

    Args:
        value: The value.
        by_identity: Large arrays are equal only if they are at the same address. False: texts of different
            processes can be compared.
    """
    hasher = blake2b(digest_size=16)
    _update(hasher, value, by_identity=by_identity)
    return hasher.hexdigest()


def _update(hasher: Hasher, value: Any, *, by_identity: bool) -> None:
    hasher.update(f"{type(value).__name__} ".encode())
    if isinstance(value, bytes):
        hasher.update(value)
    elif isinstance(value, np.ndarray):
        _update_array(hasher, value, value.ctypes.data if by_identity else 0)
    elif is_tensor(value):
        _update_tensor(hasher, value, by_identity=by_identity)
    elif is_variable(value):
        _update_array(hasher, np.asarray(value.numpy()), 0)
    elif is_array_of_jax(value):
        hasher.update(f"{value.shape} {value.dtype} {id(value) if by_identity else 0}".encode())
        if value.nbytes <= WHOLE_BYTES:
            hasher.update(np.asarray(value).tobytes())
    elif is_generator(value):
        _update(hasher, _state_of(value), by_identity=False)
    elif isinstance(value, dict | list | tuple | set | frozenset | deque):
        hasher.update(f"{len(value)} ".encode())
        for each in _sampled(value):
            _update(hasher, each, by_identity=by_identity)
    else:
        hasher.update(repr(value).encode())


def _update_array(hasher: Hasher, array: Any, identity: int) -> None:
    hasher.update(f"{array.shape} {array.dtype} ".encode())
    if array.nbytes <= WHOLE_BYTES:
        hasher.update(array.tobytes())
        return
    flat, count = array.reshape(-1), max(1, SAMPLE_BYTES // array.itemsize)
    step = max(1, len(flat) // count)
    hasher.update(f"{identity}".encode() + flat[::step].tobytes() + flat[-count:].tobytes())


def _update_tensor(hasher: Hasher, tensor: Any, *, by_identity: bool) -> None:
    """Add a tensor; large tensors, and those on a device, are compared by their version counters."""
    version = 0 if tensor.is_inference() else tensor._version  # noqa: SLF001
    hasher.update(f"{tuple(tensor.shape)} {tensor.dtype} ".encode())
    if tensor.is_cpu and tensor.numel() * tensor.element_size() <= WHOLE_BYTES:
        hasher.update(_bytes_of(tensor).tobytes())
        return
    hasher.update(f"{version} {tensor.data_ptr() if by_identity else 0}".encode())
    if tensor.is_cpu:
        flat, count = tensor.detach().reshape(-1), SAMPLE_BYTES // tensor.element_size()
        hasher.update(_bytes_of(flat[:: max(1, len(flat) // count)]).tobytes())


def _sampled(container: Any) -> Iterator[Any]:
    """Yield the elements of a container, or some of them if it is long. Sets are sorted by their texts."""
    if len(container) <= WHOLE_LENGTH:
        yield from (
            sorted(map(repr, container)) if isinstance(container, set | frozenset) else members(container)
        )
    elif not isinstance(container, set | frozenset):
        elements: Any = container.items() if isinstance(container, Mapping) else container
        for each in (*islice(elements, SAMPLE_LENGTH), *islice(reversed(elements), SAMPLE_LENGTH)):
            yield from each if isinstance(container, Mapping) else (each,)


# -- saving


def encoded(value: Any) -> Any:
    """Return a plain value as nested dictionaries, lists, tuples, scalars and NumPy arrays."""
    for kind in KINDS:
        if kind.has(value):
            return _tagged(kind.name, kind.encode(value))
    if type(value) in (list, tuple):
        return type(value)(encoded(each) for each in value)
    if type(value) in SEQUENCES.values():
        limit = value.maxlen if isinstance(value, deque) else None
        return _tagged(type(value).__name__, [limit, [encoded(each) for each in value]])
    if type(value) is dict and all(isinstance(key, str) and key not in {*RESERVED, KIND} for key in value):
        return {key: encoded(each) for key, each in value.items()}
    if type(value) in MAPPINGS.values():
        return _tagged(type(value).__name__, [[encoded(key), encoded(each)] for key, each in value.items()])
    return value  # a scalar or an array; of another value, ``packed`` raises an error with its place


def packed(value: Any, prefix: str) -> dict[str, ArrayBlob]:
    """Return a plain value as arrays of a checkpoint, whose names begin with a prefix.

    Raises:
        CheckpointError: It contains a value that is not plain.
    """
    tree, arrays = pack_tree(encoded(value), lambda leaf: isinstance(leaf, np.ndarray))
    text = np.frombuffer(json.dumps(tree).encode(), np.uint8)
    blobs = {f"{prefix}{name}": to_blob(array) for name, array in arrays.items()}
    return {f"{prefix}tree": to_blob(text), **blobs}


def unpacked(blobs: Mapping[str, ArrayBlob], prefix: str) -> Any:
    """Return the data that ``decoded`` converts to the value that was packed; None: there is none."""
    own = {name.removeprefix(prefix): blob for name, blob in blobs.items() if name.startswith(prefix)}
    text = own.pop("tree", None)
    arrays = {name: from_blob(blob) for name, blob in own.items()}
    return None if text is None else unpack_tree(json.loads(bytes(text.data)), arrays)


def _tagged(kind: str, content: Any) -> dict[str, Any]:
    return {KIND: [kind, content]}


def decoded(data: Any, old: Any = None) -> Any:
    """Return the value that ``encoded`` has converted.

    Args:
        data: Result of ``encoded``.
        old: The present value. If it is of the same kind and mutable, it is changed in place and returned,
            so that other references to it remain valid.

    Raises:
        CheckpointError: The value has a kind that this version does not know.
    """
    if isinstance(data, dict) and KIND in data:
        kind, content = data[KIND]
        if kind not in DECODERS:
            raise CheckpointError(f"the checkpoint has a value of the unknown kind {kind!r}")
        return DECODERS[kind](content, old)
    if isinstance(data, dict):
        return _filled(dict, {key: decoded(each) for key, each in data.items()}, old)
    if isinstance(data, list):
        return _filled(list, [decoded(each) for each in data], old)
    if isinstance(data, tuple):
        return tuple(decoded(each) for each in data)
    return _filled_array(data, old) if isinstance(data, np.ndarray) else data


def _filled(kind: Any, content: Any, old: Any) -> Any:
    """Return ``old`` with new content if it is of a kind, or else a new object."""
    if type(old) is not kind:
        return kind(content)
    old.clear()
    (old.extend if isinstance(old, list) else old.update)(content)
    return old


def _filled_array(array: Any, old: Any) -> Any:
    if not isinstance(old, np.ndarray) or (old.shape, old.dtype) != (array.shape, array.dtype):
        return array
    if not old.flags.writeable:
        return array
    old[...] = array
    return old


def _mapping(kind: Any) -> Callable[[Any, Any], Any]:
    def decode(content: Any, old: Any) -> Any:
        pairs = {decoded(key): decoded(each) for key, each in content}
        if kind is defaultdict and type(old) is not defaultdict:
            return pairs  # the factory is code, which checkpoints do not contain
        return _filled(kind, pairs, old)

    return decode


def _sequence(kind: Any) -> Callable[[Any, Any], Any]:
    def decode(content: Any, old: Any) -> Any:
        limit, found = content[0], [decoded(each) for each in content[1]]
        if kind is deque:
            made = old if type(old) is deque and old.maxlen == limit else deque(maxlen=limit)
            made.clear()
            made.extend(found)
            return made
        return _filled(set, found, old) if kind is set else frozenset(found)

    return decode


def _encoded_tensor(tensor: Any) -> Any:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [dtype, list(tensor.shape), _bytes_of(tensor), tensor.requires_grad]


def _tensor(content: Any, old: Any) -> Any:
    torch = sys.modules["torch"]
    dtype, shape, data, requires_grad = content
    made = torch.empty(shape, dtype=getattr(torch, dtype))
    if len(data):
        flat = torch.frombuffer(bytearray(np.asarray(data, np.uint8).tobytes()), dtype=torch.uint8)
        made = flat.view(made.dtype).reshape(shape)
    if is_tensor(old) and (old.shape, old.dtype) == (made.shape, made.dtype):
        with torch.no_grad():
            old.copy_(made)
        return old
    return made.to(old.device if is_tensor(old) else made.device).requires_grad_(bool(requires_grad))


def _bytes_of(tensor: Any) -> Any:
    torch = sys.modules["torch"]
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _variable(content: Any, old: Any) -> Any:
    if not is_variable(old):
        return np.asarray(content)
    old.assign(content)
    return old


def _array_of_jax(content: Any, _: Any) -> Any:
    return sys.modules["jax"].numpy.asarray(content)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _generator(content: Any, old: Any) -> Any:
    """Set the state of the present generator: checkpoints contain no code that creates one.

    Raises:
        CheckpointError: The present value is another object.
    """
    state = decoded(content)
    try:
        if isinstance(old, random.Random):
            old.setstate(state)
        elif isinstance(old, np.random.RandomState):
            old.set_state(state)
        elif isinstance(old, np.random.Generator):
            old.bit_generator.state = state
        elif is_generator(old):
            old.set_state(state)
        else:
            raise CheckpointError("the checkpoint has the state of a random generator, and the job has none")
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint has the state of another generator: {error}") from error
    return old


@dataclass(frozen=True)
class Kind:
    """A kind of values that are not containers.

    Attributes:
        name: Name in checkpoints.
        has: Returns whether a value is of this kind.
        encode: Returns the content.
        decode: Returns a value, given content and present value.
    """

    name: str
    has: Callable[[Any], bool]
    encode: Callable[[Any], Any]
    decode: Callable[[Any, Any], Any]


def _is_a(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


KINDS = (
    Kind("numpy", _is_a(np.generic), np.asarray, lambda content, _: np.asarray(content)[()]),
    Kind(
        "bytes",
        _is_a(bytes),
        lambda value: np.frombuffer(value, np.uint8),
        lambda content, _: np.asarray(content, np.uint8).tobytes(),
    ),
    Kind(
        "complex",
        lambda value: type(value) is complex,
        lambda value: [value.real, value.imag],
        lambda content, _: complex(*content),
    ),
    Kind("tensor", is_tensor, _encoded_tensor, _tensor),
    Kind("variable", is_variable, lambda value: np.asarray(value.numpy()), _variable),
    Kind("jax", is_array_of_jax, np.asarray, _array_of_jax),
    Kind("generator", is_generator, lambda value: encoded(_state_of(value)), _generator),
)

DECODERS: Mapping[str, Callable[[Any, Any], Any]] = {
    **{kind.name: kind.decode for kind in KINDS},
    **{name: _mapping(kind) for name, kind in MAPPINGS.items()},
    **{name: _sequence(kind) for name, kind in SEQUENCES.items()},
}
