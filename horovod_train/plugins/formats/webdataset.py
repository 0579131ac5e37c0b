"""WebDataset: tar archives; consecutive members with one name and several extensions are a sample."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from horovod_train.data.source import ByteRanges, DataError, Rows
from horovod_train.plugins.formats.images import IMAGES, image_array

BLOCK = 512


class WebDataset(ByteRanges):
    """Tar archives. A stored sample has ``__key__``, and the bytes of each member by its extension."""

    def rows(self, file: Path) -> Rows:
        """Return the range of the members of each sample."""
        found: list[tuple[int, int]] = []
        last, extensions = None, set()
        with file.open("rb") as opened:
            for start, stop, member in _members(opened, file.stat().st_size):
                if not _is_data(member):
                    continue
                key, extension = split_name(member.name)
                if key != last:
                    found.append((start, stop - start))
                    last, extensions = key, {extension}
                    continue
                if extension in extensions:
                    raise DataError(
                        f"has {member.name} twice in a sample: are there two samples of this name?"
                    )
                extensions.add(extension)
                found[-1] = (found[-1][0], stop - found[-1][0])
        return np.array(found, np.int64).reshape(-1, 2)

    def parse(self, data: bytes) -> dict[str, Any]:
        """Return the members of a sample."""
        sample: dict[str, Any] = {}
        with tarfile.open(fileobj=BytesIO(data), mode="r:") as archive:
            for member in archive:
                if _is_data(member):
                    sample["__key__"], extension = split_name(member.name)
                    content = archive.extractfile(member)
                    assert content is not None
                    sample[extension] = content.read()
        return sample

    def decode(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Convert members by their extensions; ``__key__`` and unknown extensions stay as they are."""
        return {name: _decoded(name, value) for name, value in sample.items()}


def split_name(name: str) -> tuple[str, str]:
    """Return key and extension of a member; the extension begins at the first dot of the file's name.

    >>> split_name("a.b/c.seg.PNG")
    ('a.b/c', 'seg.png')
    """
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return folder + slash + stem, extension.lower()


def _is_data(member: tarfile.TarInfo) -> bool:
    """Return whether a member is a part of a sample.

    Raises:
        DataError: It is a link, whose content is elsewhere.
    """
    name = member.name.rpartition("/")[2]
    if "." not in name or name.startswith(".") or _META.search(member.name):
        return False
    if member.islnk() or member.issym():
        raise DataError(f"has a link, {member.name}: write the archive with `tar --hard-dereference -h`")
    return member.isreg()


_META = re.compile(r"__[^/]*__($|/)")


def _members(opened: BinaryIO, size_bytes: int) -> Iterator[tuple[int, int, tarfile.TarInfo]]:
    """Yield place of the first header and of the end of each member."""
    start = 0
    try:
        with tarfile.open(fileobj=opened, mode="r:") as archive:
            while (member := archive.next()) is not None:
                stop = archive.offset
                if stop > size_bytes:
                    raise DataError(f"is cut off within {member.name}")
                yield start, stop, member
                start = stop
                archive.members = []  # type: ignore[attr-defined]  # they are not needed any more
    except tarfile.TarError as error:
        raise DataError(f"is not a tar archive: {error}") from error
    if start + BLOCK > size_bytes:
        raise DataError("is cut off: a tar archive ends with two blocks of zeros")
    opened.seek(start)
    while chunk := opened.read(2**20):
        if chunk.strip(b"\0"):  # tarfile takes a damaged header for the end
            raise DataError(f"is damaged at byte {start}, or is several archives in one file")


def _decoded(name: str, value: Any) -> Any:
    extension = name.rpartition(".")[2]
    if extension in IMAGES:
        return image_array(value)
    if extension in {"cls", "cls2", "index", "inx", "id"}:
        return int(value)
    if extension == "npy":
        return np.load(BytesIO(value), allow_pickle=False)
    if extension in {"json", "jsn"}:
        return json.loads(value)
    if extension in {"txt", "text", "transcript"}:
        return value.decode()
    return value
