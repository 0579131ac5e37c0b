"""Python values that checkpoints contain: numbers, text, arrays, random generators, and containers of them.

    to_blob, from_blob, check_fits          NumPy arrays in checkpoints
    sum_over_ranks, mean_over_ranks, ...    collectives for arrays that are not gradients
    is_plain                                whether a checkpoint can contain a value
    packed, unpacked                        a plain value as arrays of a checkpoint
    encoded, decoded                        a plain value as JSON and arrays
    fingerprint                             text by which values are compared over time and between ranks

A value is saved as JSON and arrays (``checkpoint/arrays.py``). A value that JSON does not have is a
dictionary with one reserved key, whose value is a list of its kind and its content. Types are compared
exactly: a class that is derived from one may have state of its own, and methods that a check must not call.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from horovod_train.checkpoint.arrays import RESERVED, ArrayBlob, ReplicaState, pack_tree, unpack_tree
from horovod_train.collectives.base import Communicator, allgather_json
from horovod_train.errors import CheckpointError, UserError
from horovod_train.system.machine import import_optional

Array = npt.NDArray[Any]


def to_blob(array: Array) -> ArrayBlob:
    """Return an array as bytes, which may share memory with the array."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return ArrayBlob(array.dtype.name, tuple(array.shape), flat.data)


def from_blob(blob: ArrayBlob) -> Array:
    """Return a new array with the elements of a blob."""
    return np.frombuffer(bytearray(blob.data), numpy_dtype(blob.dtype)).reshape(blob.shape)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of a name, including dtypes that ``ml_dtypes`` adds, such as bfloat16."""
    try:
        return np.dtype(name)
    except TypeError:
        ml_dtypes = import_optional("ml_dtypes", needed_by=f"the type {name}", hint="pip install ml-dtypes")
        return np.dtype(getattr(ml_dtypes, name))


def sum_over_ranks(world: Communicator, array: Array) -> Array:
    """Return the sum of an array over ranks, computed in double precision."""
    total = world.allreduce_sum(array.astype(np.float64).ravel().tolist())
    return np.array(total).astype(array.dtype).reshape(array.shape)


def mean_over_ranks(world: Communicator, array: Array) -> Array:
    """Return the mean of an array over ranks, computed in double precision."""
    return sum_over_ranks(world, array.astype(np.float64) / world.size).astype(array.dtype)


def from_rank_0(world: Communicator, array: Array) -> Array:
    """Return rank 0's array; all ranks pass arrays of the same shape and dtype."""
    mine = bytes(to_blob(array).data) if world.rank == 0 else b""
    return from_blob(ArrayBlob(array.dtype.name, tuple(array.shape), world.allgather(mine)[0]))


def check_same_layout(world: Communicator, arrays: Mapping[str, Array]) -> None:
    """Raise UserError unless all ranks have arrays of the same names, shapes and dtypes. Collective."""
    mine = [[name, list(array.shape), array.dtype.name] for name, array in arrays.items()]
    layouts = allgather_json(world, mine)
    for rank, layout in enumerate(layouts):
        if layout != layouts[0]:
            known = [entry for entry in layouts[0] if entry not in layout]
            raise UserError(
                f"rank {rank} and rank 0 have different models: "
                f"{[entry for entry in layout if entry not in layouts[0]][:2]} and {known[:2]}",
                hint="a model must not depend on the rank or on its part of the data",
            )


def check_same_optimizer(state: ReplicaState, optimizer: object) -> None:
    """Raise CheckpointError unless a checkpoint was trained with an optimizer of the same class."""
    trained_with = state.optimizer_tree["class"]
    if trained_with != type(optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint belongs to another optimizer ({trained_with})",
            hint="train under another name, or set checkpoint.resume: never",
        )


def check_fits(shapes: Mapping[str, tuple[int, ...]], blobs: Mapping[str, ArrayBlob], what: str) -> None:
    """Check that the arrays of a checkpoint have the expected names and shapes.

    Raises:
        CheckpointError: Names or shapes differ; the message contains ``what``: model or optimizer.
    """
    saved = {name: tuple(blob.shape) for name, blob in blobs.items()}
    different = sorted(name for name in shapes.keys() | saved.keys() if shapes.get(name) != saved.get(name))
    if different:
        raise CheckpointError(
            f"the checkpoint belongs to another {what}: {different[0]} has shape "
            f"{saved.get(different[0], 'none')} in the checkpoint and {shapes.get(different[0], 'none')} "
            f"in the job, and {len(different) - 1} others differ",
            hint="train under another name, or set checkpoint.resume: never",
        )


def unique_names(names: Sequence[str]) -> list[str]:
    """Return names, with a number appended to each repeated name.

    >>> unique_names(["w", "b", "w"])
    ['w', 'b', 'w.1']
    """
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        count = seen.get(name, 0)
        seen[name] = count + 1
        unique.append(f"{name}.{count}" if count else name)
    return unique


KIND = "__kind__"
SEQUENCES: Mapping[str, Any] = {kind.__name__: kind for kind in (set, frozenset, deque)}
MAPPINGS: Mapping[str, Any] = {kind.__name__: kind for kind in (dict, OrderedDict, Counter, defaultdict)}
CONTAINERS = (list, tuple, *SEQUENCES.values(), *MAPPINGS.values())
DTYPES = frozenset(
    [
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    ]
)
MAX_ELEMENTS = 1_000_000
"""Largest number of elements of a value, with those of its containers."""
MAX_DEPTH = 20
MAX_BITS = 1024
MAX_TEXT = 24
"""Longest text that is taken for state, such as the name of a phase: others are paths or tokens."""
WHOLE_LENGTH, SAMPLE_LENGTH = 10_000, 100
"""Of a longer container, only the first and last elements are examined."""


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor of PyTorch, or of a class derived from it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_plain_tensor(value: Any) -> bool:
    """Return whether a tensor of PyTorch is state: a dense tensor that is not a part of a computation."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor or value.requires_grad:
        return False
    if value.layout != torch.strided or value.is_meta or value.is_nested or value.is_quantized:
        return False
    return not (value.is_conj() or value.is_neg() or value.is_inference())


def is_generator(value: object) -> bool:
    """Return whether a value is a generator of random numbers."""
    torch = sys.modules.get("torch")
    kinds = (random.Random, np.random.Generator, np.random.RandomState)
    return type(value) in kinds or (torch is not None and type(value) is torch.Generator)


def is_variable(value: object) -> bool:
    """Return whether a value is a variable of TensorFlow or Keras."""
    package = type(value).__module__.partition(".")[0]
    return package in {"tensorflow", "keras"} and hasattr(type(value), "assign")


def is_array_of_jax(value: object) -> bool:
    """Return whether a value is an array of JAX, and not one that a traced function computes."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)


def is_plain(value: object, *, by_sample: bool = False, any_text: bool = True) -> bool:
    """Return whether a checkpoint can contain a value.

    Args:
        value: The value; one with too many elements, or that contains itself, is not plain.
        by_sample: Examine only some elements of a long container.
        any_text: Accept any text; False: only short words.
    """
    left = MAX_ELEMENTS

    def check(each: Any, depth: int) -> bool:
        nonlocal left
        left -= 1
        if left < 0 or depth == 0:
            return False
        if type(each) not in CONTAINERS and not _is_named_tuple(each):
            return _is_leaf(each, any_text=any_text)
        keys = islice(each, WHOLE_LENGTH) if isinstance(each, dict) else ()
        inner = each.values() if isinstance(each, dict) else each
        return all(type(key) is str or check(key, depth - 1) for key in keys) and all(
            check(one, depth - 1) for one in (sampled(inner) if by_sample else inner)
        )

    return check(value, MAX_DEPTH)


def _is_leaf(value: Any, *, any_text: bool) -> bool:
    if type(value) is str:
        return any_text or (len(value) <= MAX_TEXT and "/" not in value)
    if type(value) is int:
        return value.bit_length() <= MAX_BITS
    if type(value) is np.ndarray:
        return value.dtype.name in DTYPES
    return type(value) in (type(None), bool, float) or any(kind.has(value) for kind in KINDS)


def sampled(container: Any) -> Iterator[Any]:
    """Yield the elements of a container or a view; if it is long, the first and last ones, of a set none."""
    if len(container) <= WHOLE_LENGTH:
        yield from container
    elif not isinstance(container, set | frozenset):
        yield from islice(container, SAMPLE_LENGTH)
        yield from islice(reversed(container), SAMPLE_LENGTH)


def _is_named_tuple(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(type(value), "_fields")


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
    if type(value) is dict and all(type(key) is str and key not in {*RESERVED, KIND} for key in value):
        return {key: encoded(each) for key, each in value.items()}
    if type(value) in MAPPINGS.values():
        return _tagged(type(value).__name__, [[encoded(key), encoded(each)] for key, each in value.items()])
    return value  # a scalar or an array; of another value, ``packed`` raises an error with its place


def _tagged(kind: str, content: Any) -> dict[str, Any]:
    return {KIND: [kind, content]}


def decoded(data: Any, old: Any = None) -> Any:
    """Return the value that ``encoded`` has converted.

    Args:
        data: Result of ``encoded``.
        old: The present value. If it is mutable and of the same kind, it is changed in place and returned, as
            are its elements, so that other references to them remain valid.

    Raises:
        CheckpointError: The value has a kind that this version does not know, or does not fit ``old``.
    """
    if isinstance(data, dict) and KIND in data:
        kind, content = data[KIND]
        if kind not in DECODERS:
            raise CheckpointError(f"the checkpoint has a value of the unknown kind {kind!r}")
        return DECODERS[kind](content, old)
    if isinstance(data, dict):
        return _filled_mapping(dict, data.items(), old)
    if isinstance(data, list | tuple):
        return _filled_sequence(data, old)
    return _filled_array(data, old) if isinstance(data, np.ndarray) else data


def _filled_sequence(data: list[Any] | tuple[Any, ...], old: object) -> object:
    before = old if type(old) is type(data) and len(old) == len(data) else [None] * len(data)
    found = type(data)(decoded(each, one) for each, one in zip(data, before, strict=True))
    if type(old) is not list or isinstance(found, tuple):
        return found
    old[:] = found
    return old


def _filled_array(data: Any, old: Any) -> Any:
    is_alike = type(old) is np.ndarray and (old.shape, old.dtype) == (data.shape, data.dtype)
    if not is_alike or not old.flags.writeable:
        return data
    old[...] = data
    return old


def _filled_mapping(kind: Any, pairs: Any, old: Any) -> Any:
    before = old if type(old) is kind else {}
    found = {key: decoded(each, before.get(key)) for key, each in pairs}
    if type(old) is not kind:
        # The factory of a defaultdict is code, which checkpoints do not contain.
        return found if kind is defaultdict else kind(found)
    old.clear()
    old.update(found)
    return old


def _mapping(kind: Any) -> Callable[[Any, Any], Any]:
    return lambda content, old: _filled_mapping(kind, [(decoded(key), each) for key, each in content], old)


def _sequence(kind: Any) -> Callable[[Any, Any], Any]:
    def decode(content: Any, old: Any) -> Any:
        limit, found = content[0], [decoded(each) for each in content[1]]
        if kind is frozenset or type(old) is not kind or (kind is deque and old.maxlen != limit):
            return deque(found, limit) if kind is deque else kind(found)
        old.clear()
        (old.extend if kind is deque else old.update)(found)
        return old

    return decode


def _encoded_tensor(tensor: Any) -> Any:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [dtype, list(tensor.shape), bytes_of(tensor), tensor.device.type]


def _tensor(content: Any, old: Any) -> Any:
    torch = sys.modules["torch"]
    dtype, shape, data, device = content
    made = torch.empty(shape, dtype=getattr(torch, dtype))
    if len(data):
        flat = torch.frombuffer(bytearray(np.asarray(data, np.uint8).tobytes()), dtype=torch.uint8)
        made = flat.view(made.dtype).reshape(shape)
    is_alike = is_plain_tensor(old) and (old.shape, old.dtype) == (made.shape, made.dtype)
    if is_alike and all(stride or length < 2 for stride, length in zip(old.stride(), old.shape, strict=True)):
        return old.copy_(made)
    return made.to(device) if device == "cpu" or torch.cuda.is_available() else made


def bytes_of(tensor: Any) -> Any:
    """Return the elements of a tensor as bytes, shape [bytes]."""
    torch = sys.modules["torch"]
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _variable(content: Any, old: Any) -> Any:
    if not is_variable(old):
        return np.asarray(content)
    old.assign(content)
    return old


def state_of(generator: Any) -> object:
    """Return the state of a generator of random numbers."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _generator(content: Any, old: Any) -> Any:
    """Set the state of the present generator, or of a new one if there is none of this kind."""
    name, data = content
    state = decoded(data)
    made = old if type(old).__name__ == name and is_generator(old) else _new_generator(name, state)
    if isinstance(made, random.Random):
        made.setstate(state)
    elif isinstance(made, np.random.RandomState):
        made.set_state(state)
    elif isinstance(made, np.random.Generator):
        made.bit_generator.state = state
    else:
        made.set_state(state)
    return made


def _new_generator(name: str, state: Any) -> Any:
    if name == "Random":
        return random.Random()
    if name == "RandomState":
        return np.random.RandomState()
    if isinstance(state, dict):
        return np.random.Generator(getattr(np.random, str(state["bit_generator"]))())
    return sys.modules["torch"].Generator()


def _member(content: Any, old: Any) -> Any:
    """Return the member of the present value's enumeration."""
    if not isinstance(old, Enum):
        raise CheckpointError(
            f"the checkpoint has the member {content!r} of an enumeration, and the job has none"
        )
    return type(old)[content]


def _named_tuple(content: Any, old: Any) -> Any:
    if not _is_named_tuple(old) or len(old) != len(content):
        raise CheckpointError("the checkpoint has a named tuple, and the job has none of this length")
    return type(old)(*(decoded(each, one) for each, one in zip(content, old, strict=True)))


@dataclass(frozen=True)
class Kind:
    """A kind of values that JSON does not have.

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


KINDS = (
    Kind("enum", lambda value: isinstance(value, Enum), lambda value: value.name, _member),
    Kind(
        "numpy",
        lambda value: isinstance(value, np.generic) and value.dtype.name in DTYPES,
        np.asarray,
        lambda content, _: np.asarray(content)[()],
    ),
    Kind(
        "bytes",
        lambda value: type(value) is bytes,
        lambda value: np.frombuffer(value, np.uint8),
        lambda content, _: np.asarray(content, np.uint8).tobytes(),
    ),
    Kind(
        "complex",
        lambda value: type(value) is complex,
        lambda value: [value.real, value.imag],
        lambda content, _: complex(*content),
    ),
    Kind("tensor", is_plain_tensor, _encoded_tensor, _tensor),
    Kind("variable", is_variable, lambda value: np.asarray(value.numpy()), _variable),
    Kind("jax", is_array_of_jax, np.asarray, lambda content, _: sys.modules["jax"].numpy.asarray(content)),
    Kind(
        "generator", is_generator, lambda value: [type(value).__name__, encoded(state_of(value))], _generator
    ),
    Kind("namedtuple", _is_named_tuple, lambda value: [encoded(each) for each in value], _named_tuple),
)

DECODERS: Mapping[str, Callable[[Any, Any], Any]] = {
    **{kind.name: kind.decode for kind in KINDS},
    **{name: _mapping(kind) for name, kind in MAPPINGS.items()},
    **{name: _sequence(kind) for name, kind in SEQUENCES.items()},
}


WHOLE_BYTES, SAMPLE_BYTES = 2**16, 2**12
"""An array with more bytes is compared by its version and some of its elements."""
HASHED_ELEMENTS = 50_000
"""Largest number of elements of a value that are compared, with those of its containers."""


def fingerprint(value: object, *, by_identity: bool) -> str:
    """Return a text that differs if plain values differ; a large value may change without it.

    Args:
        value: The value.
        by_identity: Large arrays are equal only if they are at the same address. False: texts of different
            processes can be compared.
    """
    hasher = blake2b(digest_size=16)
    left = HASHED_ELEMENTS

    def update(each: object) -> None:
        nonlocal left
        left -= 1
        hasher.update(f"{type(each).__name__} ".encode())
        if left < 0:
            return
        if isinstance(each, dict):
            hasher.update(f"{len(each)} ".encode())
            for pair in sampled(each.items()):
                update(pair[0])
                update(pair[1])
        elif isinstance(each, list | tuple | deque | set | frozenset):
            hasher.update(f"{len(each)} ".encode())
            is_set = isinstance(each, set | frozenset)
            for one in sorted(map(repr, sampled(each))) if is_set else sampled(each):
                update(one)
        elif is_generator(each):
            update(state_of(each))
        else:
            hasher.update(_leaf(each, by_identity=by_identity))

    update(value)
    return hasher.hexdigest()


def _leaf(value: Any, *, by_identity: bool) -> bytes:
    """Return the content of a value that is not a container, or a part of it if it is large."""
    if is_tensor(value):
        head = f"{tuple(value.shape)} {value.dtype} "
        if value.is_cpu and value.numel() * value.element_size() <= WHOLE_BYTES:
            return head.encode() + bytes_of(value).tobytes()
        place = f"{value._version} {value.data_ptr() if by_identity else 0}"  # noqa: SLF001
        return f"{head}{place}".encode() + (_sample_of(value.detach().numpy()) if value.is_cpu else b"")
    if is_variable(value) or is_array_of_jax(value):
        value = np.asarray(value.numpy() if is_variable(value) else value)
    if isinstance(value, np.ndarray):
        head = f"{value.shape} {value.dtype} "
        if value.nbytes <= WHOLE_BYTES:
            return head.encode() + value.tobytes()
        return f"{head}{value.ctypes.data if by_identity else 0}".encode() + _sample_of(value)
    return repr(value).encode(errors="surrogateescape")


def _sample_of(array: Any) -> bytes:
    """Return some elements of an array, without copying it: it may be a mapped file."""
    count = max(1, SAMPLE_BYTES // array.itemsize)
    places = np.linspace(0, array.size - 1, min(count, array.size), dtype=np.int64)
    return bytes(array.flat[places].tobytes())
