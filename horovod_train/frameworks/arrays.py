"""NumPy arrays in checkpoints, and collectives for arrays that are not gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from horovod_train.checkpoint.arrays import ArrayBlob, ReplicaState
from horovod_train.collectives.base import Communicator, allgather_json
from horovod_train.errors import CheckpointError, UserError
from horovod_train.system.optional import import_optional

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
