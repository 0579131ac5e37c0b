"""Files on this host and on object stores, which fsspec reads: names, sizes, and copies."""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from horovod_train.data.cache import FULL
from horovod_train.data.source import CHUNK_BYTES, DataError
from horovod_train.errors import UserError, result_of
from horovod_train.system.machine import import_optional

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Entry = dict[str, object]
"""What a store says of a file."""

NUM_TRIES = 6
MAX_DELAY_S = 20.0
SAMPLED_BYTES = 2**20
"""Files up to this size are digested completely, larger ones at some places."""
MAX_FILES = 2**24
_RANGE = re.compile(r"^(\d+)\.\.(\d+)$")
_REMOTE = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class Listed:
    """A file.

    Attributes:
        url: Path or URL.
        size_bytes: Its size.
        tag: A number that differs if the file was written again: a hash of its ETag, or of its time.
    """

    url: str
    size_bytes: int
    tag: int = 0


def is_remote(url: str) -> bool:
    """Return whether fsspec reads a file, and a copy is needed for access to its samples."""
    return bool(_REMOTE.match(url)) and not url.startswith("file://")


def local_path(url: str) -> Path:
    """Return the path of a file that is not remote."""
    return Path(url.removeprefix("file://")).expanduser()


def expand_braces(text: str) -> list[str]:
    """Return the names that a text with braces stands for.

    >>> expand_braces("a-{08..10}.{tar,tgz}")
    ['a-08.tar', 'a-08.tgz', 'a-09.tar', 'a-09.tgz', 'a-10.tar', 'a-10.tgz']
    """
    parts = re.split(r"\{([^{}]*)\}", text)
    choices = [_choices(part) if at % 2 else [part] for at, part in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*choices)]


def _choices(text: str) -> list[str]:
    if match := _RANGE.match(text):
        first, last = match.groups()
        if not 0 <= int(last) - int(first) < MAX_FILES:
            raise UserError(f"data.files: {{{text}}} stands for no files, or for more than {MAX_FILES:,}")
        width = len(first) if first.startswith("0") else 0
        return [str(number).zfill(width) for number in range(int(first), int(last) + 1)]
    return text.split(",")


def list_files(patterns: Iterable[str]) -> list[Listed]:
    """Return the files that patterns stand for, in their order; those of a ``*`` are sorted.

    Raises:
        UserError: A file does not exist, is named twice, or cannot be listed; nothing fits a ``*``.
    """
    found: list[Listed] = []
    for pattern in patterns:
        names = expand_braces(pattern)
        found += _remote_files(names) if is_remote(pattern) else _local_files(names)
    seen: set[str] = set()
    for each in found:
        if each.url in seen:
            raise UserError(
                f"data.files: {each.url} is named twice", hint="its samples would be used twice: name it once"
            )
        seen.add(each.url)
    return found


def _local_files(names: Iterable[str]) -> Iterator[Listed]:
    for name in names:
        path = local_path(name)
        paths = [path]
        if glob.has_magic(str(path)) and not path.exists():
            found = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207
            paths = [Path(each) for each in found if not Path(each).is_dir()]
            if not paths:
                raise nothing_fits(name)
        for each in paths:
            try:
                status = each.stat()
            except OSError as error:
                raise UserError(
                    f"data.files: {each}: {error.strerror}",
                    hint="every host needs the file at this path; correct data.files",
                ) from error
            if each.is_dir():
                raise UserError(f"data.files: {each}: is a folder", hint=f"name the files in it: {each}/*")
            yield Listed(str(each), status.st_size, tag_of(status.st_mtime_ns))


def nothing_fits(name: str) -> UserError:
    """Return the error of a pattern without files."""
    return UserError(f"data.files: no file fits {name}", hint="correct the pattern")


def _remote_files(names: list[str]) -> Iterator[Listed]:
    """List the folder of each file once, because a request for each file takes long."""
    scheme = names[0].partition("://")[0]
    folders: dict[str, dict[str, Entry]] = {}
    filesystem = filesystem_of(names[0])

    def listing(folder: str) -> dict[str, Entry]:
        if folder not in folders:
            entries = retried(folder, partial(filesystem.ls, folder, detail=True))
            folders[folder] = {entry["name"].rpartition("/")[2]: entry for entry in entries}
        return folders[folder]

    for name in names:
        if glob.has_magic(name):
            matches = retried(name, partial(filesystem.glob, name, detail=True))
            files = [path for path in sorted(matches) if matches[path]["type"] == "file"]
            if not files:
                raise nothing_fits(name)
            for path in files:
                url = path if "://" in path else f"{scheme}://{path.lstrip('/')}"
                yield _listed(url, matches[path])
            continue
        folder, _, file = name.rpartition("/")
        if scheme.startswith("http"):  # folders of web servers cannot be listed
            entry = retried(name, partial(filesystem.info, name))
        elif (entry := listing(folder).get(file)) is None:
            raise UserError(f"data.files: {name}: does not exist", hint="correct data.files")
        yield _listed(name, entry)


def _listed(url: str, entry: Entry) -> Listed:
    size_bytes = entry.get("size")
    if not isinstance(size_bytes, int):
        raise UserError(f"data.files: {url}: the server does not say how large it is", hint="copy the file")
    names = (
        *("ETag", "etag", "LastModified", "mtime", "updated", "last_modified", "created"),
        *("modificationTime", "modify", "blob_id"),
    )
    return Listed(url, size_bytes, tag_of(next((entry[name] for name in names if entry.get(name)), "")))


def tag_of(what: object) -> int:
    """Return a 63-bit hash of what changes if a file is written again."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest()) >> 1


def filesystem_of(url: str) -> Any:
    """Return the file system of a URL, which fsspec creates once for each process."""
    fsspec = import_optional("fsspec", needed_by=url, hint="pip install fsspec")
    try:
        return fsspec.core.url_to_fs(url)[0]
    except ImportError as error:
        raise UserError(f"{url}: {error}", hint="pip install s3fs for s3://, gcsfs for gs://") from error
    except ValueError as error:
        raise UserError(f"{url}: {error}", hint="correct data.files") from error


PERMANENT = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)


def retried(what: str, call: Callable[[], Result]) -> Result:
    """Return the result of a call to a server, which is repeated after errors that may pass.

    Raises:
        UserError: The file does not exist, or may not be read.
        DataError: The server cannot be reached, or reports errors.
    """
    for number in range(NUM_TRIES):
        found, last = result_of(call)
        if last is None:
            return found  # type: ignore[return-value]
        if isinstance(last, UserError) or (isinstance(last, OSError) and last.errno in FULL):
            raise last
        if (
            isinstance(last, PERMANENT) or "credentials" in type(last).__name__.lower()
        ):  # of botocore, google.auth
            reason = str(last) or type(last).__name__
            raise UserError(f"{what}: {reason}", hint="correct data.files, or the credentials") from last
        if number == NUM_TRIES - 1:
            break
        delay_s = min(MAX_DELAY_S, 0.25 * 2**number) * random.uniform(0.5, 1.5)
        log.warning("%s: %s: %s; trying again", what, type(last).__name__, last)
        time.sleep(delay_s)
    raise DataError(
        f"{what}: {NUM_TRIES} attempts have failed, the last one with {type(last).__name__}: {last}",
        hint="the store cannot be reached, or is overloaded",
    )


def download(url: str, size_bytes: int, to: Path) -> None:
    """Copy a remote file to a local one.

    Raises:
        UserError: The file does not exist, or may not be read.
        DataError: It cannot be read, or has another size than when it was listed.
    """

    def copy() -> None:
        received = 0
        with filesystem_of(url).open(url, "rb", cache_type="none") as source, to.open("wb") as target:
            while chunk := source.read(CHUNK_BYTES):
                target.write(chunk)
                received += len(chunk)
        if received != size_bytes:
            raise DataError(f"{received} of {size_bytes} bytes arrived")

    def checked() -> None:
        try:
            copy()
        except DataError as error:
            filesystem = filesystem_of(url)
            filesystem.invalidate_cache()
            if int(filesystem.info(url)["size"]) != size_bytes:
                raise changed(url) from error
            raise ConnectionError(error.message) from error

    retried(url, checked)


def changed(url: str) -> DataError:
    """Return the error of a file that is not the one of the index."""
    return DataError(
        f"{url}: has changed since the index of the files was made",
        hint="restore it, or make the index again: `horovod-train data index JOB --again`",
    )


def digest_of(file: Path) -> int:
    """Return a 63-bit digest of size and content: the whole content of small files, parts of large ones."""
    size_bytes = file.stat().st_size
    found = hashlib.blake2b(str(size_bytes).encode(), digest_size=8)
    with file.open("rb") as opened:
        if size_bytes <= SAMPLED_BYTES:
            found.update(opened.read())
        else:
            part, num_parts = 2**14, SAMPLED_BYTES // 2**14
            for number in range(num_parts):
                found.update(os.pread(opened.fileno(), part, number * (size_bytes - part) // (num_parts - 1)))
    return int.from_bytes(found.digest()) >> 1
