"""Arrays with a row for each sample: ``.npy``, safetensors, HDF5 and Zarr."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from horovod_train.data.source import DataError, Opened, Rows, Source
from horovod_train.errors import result_of
from horovod_train.plugins.formats.tokens import mapped_array
from horovod_train.system.machine import import_optional

SAFETENSORS_TYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
}
Arrays = tuple[Mapping[str, Any], Callable[[], None]]


class _Arrays:
    def __init__(self, arrays: Arrays, rows: Rows) -> None:
        (self._arrays, self.close), self._rows = arrays, rows[:, 0]

    def read(self, places: Sequence[int]) -> list[Any]:
        """Return a row of each array, by its name."""
        numbers = [int(self._rows[place]) for place in places]
        return [{name: np.asarray(each[row]) for name, each in self._arrays.items()} for row in numbers]


class ArrayRows(Source):
    """Files of arrays of equal length. A sample has a row of each array, by its name."""

    arrays: list[str] = []
    """Names of the arrays; empty: all. The array of an ``.npy`` file is called ``array``."""

    def rows(self, file: Path) -> Rows:
        """Return the number of each row."""
        arrays, close = self._open(file)
        shapes = {name: tuple(each.shape) for name, each in arrays.items()}
        close()
        if len({shape[:1] for shape in shapes.values()}) != 1 or () in shapes.values():
            raise DataError(f"has arrays of shapes {shapes or 'none'}, whose first dimensions must be equal")
        return np.arange(next(iter(shapes.values()))[0], dtype=np.int64)[:, None]

    def open(self, file: Path, rows: Rows, url: str) -> Opened:
        """Open a local file."""
        return _Arrays(self._open(file), rows)

    def _open(self, file: Path) -> Arrays:
        opener = _OPENERS.get(file.suffix)
        if opener is None:
            raise DataError(f"must end in {', '.join(_OPENERS)}")
        arrays, close = opener(file)
        if missing := [name for name in self.arrays if name not in arrays]:
            raise DataError(f"has no array {missing[0]!r}, but {', '.join(arrays)}")
        return {name: arrays[name] for name in self.arrays or arrays}, close


def _npy(file: Path) -> Arrays:
    return {"array": mapped_array(file)}, lambda: None


def _safetensors(file: Path) -> Arrays:
    size_bytes = file.stat().st_size
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(min(length, size_bytes)))
        header.pop("__metadata__", None)
        arrays = {}
        for name, entry in header.items():
            if entry["dtype"] not in SAFETENSORS_TYPES:
                raise DataError(f"has {name} of type {entry['dtype']}, which NumPy does not have")
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            dtype, shape = SAFETENSORS_TYPES[entry["dtype"]], tuple(entry["shape"])
            arrays[name] = (
                np.memmap(file, dtype, "r", start, shape) if stop > start else np.zeros(shape, dtype)
            )
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise DataError(f"is not a safetensors file, or is damaged: {error}") from error
    return arrays, lambda: None


def _hdf5(file: Path) -> Arrays:
    h5py = import_optional("h5py", needed_by=file.name, hint="pip install h5py")
    try:
        opened = h5py.File(file, "r")
    except OSError as error:
        raise DataError(f"is not an HDF5 file, or is damaged: {error}") from error
    return {name: each for name, each in opened.items() if hasattr(each, "shape")}, opened.close


def _zarr(file: Path) -> Arrays:
    zarr = import_optional("zarr", needed_by=file.name, hint="pip install zarr")
    store, error = result_of(lambda: zarr.storage.ZipStore(file, mode="r"))
    opened, error = result_of(lambda: zarr.open(store, mode="r")) if error is None else (None, error)
    if error is not None or store is None or opened is None:
        raise DataError(f"is not a Zarr store in a zip file, or is damaged: {error}") from error
    arrays = {"array": opened} if hasattr(opened, "shape") else dict(opened.arrays())
    return arrays, store.close


_OPENERS: Mapping[str, Callable[[Path], Arrays]] = {
    ".npy": _npy,
    ".safetensors": _safetensors,
    ".h5": _hdf5,
    ".hdf5": _hdf5,
    ".zip": _zarr,
}
