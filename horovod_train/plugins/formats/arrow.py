"""Tables: Parquet, Arrow IPC (Feather), and datasets that ``datasets.save_to_disk`` has written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from horovod_train.data.source import DataError, Opened, Rows, Source
from horovod_train.errors import UserError
from horovod_train.plugins.formats.images import image_array, is_image
from horovod_train.system.machine import import_optional


def pyarrow(module: str = "pyarrow") -> Any:
    """Import pyarrow, or a module of it."""
    return import_optional(module, needed_by="tables", hint="pip install pyarrow")


class _Table:
    def __init__(self, file: Path, rows: Rows, columns: Sequence[str]) -> None:
        table = open_table(file)
        self._table = table.select(list(columns)) if columns else table
        self._rows = rows[:, 0]
        ends = np.cumsum([len(batch) for batch in self._table.to_batches()])
        self._ends, self._batches = ends, self._table.to_batches()

    def read(self, places: Sequence[int]) -> list[Any]:
        """Return rows as mappings; lists of numbers are arrays."""
        rows = self._rows[places]
        numbers = np.searchsorted(self._ends, rows, "right")
        found: list[Any] = [None] * len(rows)
        for number in dict.fromkeys(numbers.tolist()):
            mine = np.flatnonzero(numbers == number)
            batch = self._batches[number]
            inside = rows[mine] - (int(self._ends[number]) - len(batch))
            columns = [_values(batch.column(at), inside) for at in range(batch.num_columns)]
            names = batch.schema.names
            for at, values in zip(mine.tolist(), zip(*columns, strict=True), strict=True):
                found[at] = dict(zip(names, values, strict=True))
        return found

    def close(self) -> None:
        """Let the memory map be closed."""
        del self._table, self._batches


def _values(column: Any, rows: Any) -> list[Any]:
    """Return the values of some rows; lists of numbers without nulls are arrays."""
    types = pyarrow("pyarrow.types")
    kind = getattr(column.type, "value_type", None)
    if kind is not None and (types.is_floating(kind) or types.is_integer(kind)):
        return [_array(column[row]) for row in rows.tolist()]
    found: list[Any] = column.take(pyarrow().array(rows)).to_pylist()
    return found


def _array(scalar: Any) -> Any:
    """Return the array of a list of numbers; if there are nulls, a list, or None."""
    values = getattr(scalar, "values", None)
    if values is None or values.null_count:
        return scalar.as_py()
    return values.to_numpy(zero_copy_only=False)


END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""A stream that is cut between two batches is read without an error."""


def open_table(file: Path) -> Any:
    """Return the table of an Arrow file or stream, mapped into memory.

    Raises:
        DataError: It is neither.
    """
    arrow = pyarrow()
    ipc = pyarrow("pyarrow.ipc")
    try:
        mapped = arrow.memory_map(str(file))
        with file.open("rb") as opened:
            is_file = opened.read(6) == b"ARROW1"
            opened.seek(max(0, file.stat().st_size - len(END_OF_STREAM)))
            if not is_file and opened.read() != END_OF_STREAM:
                raise DataError("is not an Arrow file, or is a stream that is cut off")
        return ipc.open_file(mapped).read_all() if is_file else ipc.open_stream(mapped).read_all()
    except (arrow.ArrowInvalid, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise DataError(f"is not an Arrow file, or is damaged: {error}") from error


class Arrow(Source):
    """Arrow IPC files and streams. A stored sample has the value of each column."""

    columns: list[str] = []
    """Columns that are read; empty: all."""

    def rows(self, file: Path) -> Rows:
        """Return the number of each row."""
        table = open_table(file)
        if missing := [name for name in self.columns if name not in table.schema.names]:
            raise DataError(f"has no column {missing[0]!r}, but {', '.join(table.schema.names)}")
        return np.arange(len(table), dtype=np.int64)[:, None]

    def open(self, file: Path, rows: Rows, url: str) -> Opened:
        """Open a local file."""
        return _Table(file, rows, self.columns)


def _without_dictionary(field: Any) -> Any:
    is_dictionary = pyarrow("pyarrow.types").is_dictionary(field.type)
    return field.with_type(field.type.value_type) if is_dictionary else field


class Parquet(Arrow):
    """Parquet files, which are unpacked to Arrow files. A stored sample has the value of each column."""

    def is_packed(self, name: str) -> bool:
        """All files are."""
        return True

    def unpack(self, file: Path, to: Path) -> None:
        """Convert one row group after the other."""
        arrow, ipc, parquet = pyarrow(), pyarrow("pyarrow.ipc"), pyarrow("pyarrow.parquet")
        try:
            with parquet.ParquetFile(file) as opened:
                if missing := [name for name in self.columns if name not in opened.schema_arrow.names]:
                    raise DataError(f"has no column {missing[0]!r}")
                schema = opened.schema_arrow
                if self.columns:
                    schema = arrow.schema([schema.field(name) for name in self.columns])
                # Dictionaries may differ between row groups, and cannot in an Arrow file.
                schema = arrow.schema([_without_dictionary(field) for field in schema])
                with arrow.OSFile(str(to), "wb") as sink, ipc.new_file(sink, schema) as writer:
                    for batch in opened.iter_batches(columns=self.columns or None):
                        writer.write_table(arrow.Table.from_batches([batch]).cast(schema))
        except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError) as error:
            raise DataError(f"is not a Parquet file, or is damaged: {error}") from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise DataError(f"is damaged: {error}") from error


class SavedDataset(Arrow):
    """Folders that ``datasets.Dataset.save_to_disk`` has written. Images are decoded."""

    def expand(self, file: str) -> list[str]:
        """Return the Arrow files of a folder, in their order."""
        folder = Path(file)
        state = folder / "state.json"
        if not state.is_file():
            splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
            raise UserError(
                f"{file}: has no state.json, so it is not a folder that save_to_disk has written",
                hint=f"name one of its splits: {', '.join(splits)}" if splits else "write it again",
            )
        found = json.loads(state.read_text())
        if found.get("_indices_files"):
            raise UserError(f"{file}: has an order of its own", hint="call flatten_indices() before saving")
        return [str(folder / each["filename"]) for each in found["_data_files"]]

    def decode(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Convert images to arrays."""
        return {
            name: image_array(value["bytes"])
            if isinstance(value, dict) and value.keys() == {"bytes", "path"} and is_image(value["bytes"])
            else value
            for name, value in sample.items()
        }
