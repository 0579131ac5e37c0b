"""Nested state as JSON and arrays. Unlike pickle, reading it cannot execute code.

Optimizer states are nested dictionaries with tensors as leaves. JSON supports neither tensors nor tuples nor
integer keys, so each of these is stored as an object with one reserved key:

    {"__array__": "state.0.exp_avg"}     a tensor, stored under that name
    {"__tuple__": [...]}                 a tuple
    {"__map__": [[key, value], ...]}     a dictionary with non-string or reserved keys
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod_train.errors import CheckpointError

ARRAY, TUPLE, MAP = "__array__", "__tuple__", "__map__"
RESERVED = {ARRAY, TUPLE, MAP}


def pack_tree(tree: object, is_array: Callable[[Any], bool]) -> tuple[object, dict[str, Any]]:
    """Split a tree into plain JSON and its arrays by name.

    >>> pack_tree({0: (1, [2.5, None])}, lambda leaf: False)
    ({'__map__': [[0, {'__tuple__': [1, [2.5, None]]}]]}, {})

    Raises:
        CheckpointError: The tree contains an object that is neither JSON data, a tuple nor an array.
    """
    arrays: dict[str, Any] = {}

    def pack(node: object, path: str) -> object:
        if is_array(node):
            arrays[path] = node
            return {ARRAY: path}
        if isinstance(node, dict):
            if all(isinstance(key, str) for key in node) and not RESERVED & node.keys():
                return {key: pack(value, _join(path, key)) for key, value in node.items()}
            return {MAP: [[pack(key, path), pack(v, _join(path, key))] for key, v in node.items()]}
        if isinstance(node, tuple):
            return {TUPLE: [pack(value, _join(path, at)) for at, value in enumerate(node)]}
        if isinstance(node, list):
            return [pack(value, _join(path, at)) for at, value in enumerate(node)]
        if node is None or isinstance(node, bool | int | float | str):
            return node
        raise CheckpointError(
            f"cannot save {path or 'the state'}: a {type(node).__name__} is neither data nor an array"
        )

    return pack(tree, ""), arrays


def unpack_tree(plain: object, arrays: Mapping[str, object]) -> Any:
    """Return the tree that ``pack_tree`` has split.

    Raises:
        CheckpointError: An array is missing, or the tree has an invalid structure.
    """
    try:
        return _unpack(plain, arrays)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the state has an invalid structure: {error}") from error


def _unpack(plain: object, arrays: Mapping[str, object]) -> object:
    if isinstance(plain, list):
        return [_unpack(value, arrays) for value in plain]
    if not isinstance(plain, dict):
        return plain
    if ARRAY in plain:
        if plain[ARRAY] not in arrays:
            raise CheckpointError(f"the array {plain[ARRAY]!r} is missing")
        return arrays[plain[ARRAY]]
    if TUPLE in plain:
        return tuple(_unpack(value, arrays) for value in plain[TUPLE])
    if MAP in plain:
        return {_unpack(key, arrays): _unpack(value, arrays) for key, value in plain[MAP]}
    return {key: _unpack(value, arrays) for key, value in plain.items()}


def merge_trees(trees: Sequence[Any]) -> Any:
    """Merge the packed trees of all ranks of a sharded state.

    Dictionaries are merged by key. Lists of strings become one list with each string once. Other lists must
    have equal lengths and are merged element by element. All other values must be equal.

    >>> merge_trees([{"a": 1, "names": ["x", "y"]}, {"b": [2], "names": ["y", "z"]}])
    {'a': 1, 'names': ['x', 'y', 'z'], 'b': [2]}

    Raises:
        CheckpointError: Trees contradict each other.
    """
    first = trees[0]
    if all(tree == first for tree in trees):
        return first
    if all(isinstance(tree, dict) for tree in trees):
        keys = dict.fromkeys(key for tree in trees for key in tree)
        return {key: merge_trees([tree[key] for tree in trees if key in tree]) for key in keys}
    if all(isinstance(tree, list) for tree in trees):
        if all(isinstance(value, str) for tree in trees for value in tree):
            return list(dict.fromkeys(value for tree in trees for value in tree))
        if len({len(tree) for tree in trees}) == 1:
            return [merge_trees(values) for values in zip(*trees, strict=True)]
    raise CheckpointError(f"ranks have different states of the optimizer: {trees[0]} and others")


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
