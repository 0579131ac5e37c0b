"""Cache of a host: copies of remote files, and unpacked files.

    <name>/lock                locked while the file is made or removed, and, shared, while it is in use
    <name>/<CRC-32>-<label>    the file
    <name>/.making-<label>     a file that is being made

Only files and ``flock`` are used, which the kernel releases with the process: nothing remains in shared
memory after a kill, and a file in use is never removed. Ranks, their loader processes, and other jobs of the
user share the folder.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep, time

from horovod_train.errors import UserError

log = logging.getLogger(__name__)

PATIENCE_S = 2.0
REMOVED = ".removed-"
MAKING = ".making-"
FULL = {errno.ENOSPC, errno.EDQUOT}
_CONTENT = re.compile(r"[0-9a-f]{8}-")


def default_folder() -> Path:
    """Return the folder of this user on this node."""
    base = os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir()
    return Path(base) / f"horovod_train-{os.getuid()}"


def name_of(*parts: object) -> str:
    """Return the name of a file in a cache: a hash of what determines its content."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@dataclass
class LockedFile:
    """A file of the cache that is not removed until ``close``."""

    path: Path
    handle: int

    def close(self) -> None:
        """Allow the cache to remove the file."""
        os.close(self.handle)


class Cache:
    """The cache in a folder.

    Args:
        folder: The folder, which is created.
        max_bytes: Size above which files are removed that are not in use.

    Raises:
        UserError: The folder belongs to another user.
    """

    def __init__(self, folder: Path, max_bytes: float) -> None:
        self.folder = folder / "files"
        self._max_bytes = max_bytes
        self._verified: set[str] = set()
        self._is_warned = False

    def __reduce__(self) -> tuple[object, ...]:
        return Cache, (self.folder.parent, self._max_bytes)

    def get(self, name: str, label: str, size_bytes: int, make: Callable[[Path], None]) -> LockedFile:
        """Return a file, which ``make`` writes if it is not there.

        Args:
            name: Name of its folder (``name_of``).
            label: End of its name, with the suffix by which formats are recognized.
            size_bytes: Its approximate size.
            make: Writes the file; may raise exceptions.

        Raises:
            UserError: The disk is full, or the folder belongs to another user.
        """
        place = self.folder / name
        while True:
            private_folder(place)
            handle = _lock_of(place / "lock", fcntl.LOCK_SH)
            if handle is None:
                continue  # it was removed
            found = _content(place)
            if found is not None and self._is_intact(found):
                os.utime(place)
                return LockedFile(found, handle)
            os.close(handle)
            if found is not None:
                log.warning("%s: is damaged, and is made again", found)
                if not _remove(place):
                    raise UserError(f"{found}: is damaged, and in use", hint="end the jobs that use it")
                continue
            handle = _lock_of(place / "lock", fcntl.LOCK_EX)
            if handle is None:
                continue
            try:
                if _content(place) is None:
                    self._make(place, label, size_bytes, make)
            finally:
                os.close(handle)

    def _make(self, place: Path, label: str, size_bytes: int, make: Callable[[Path], None]) -> None:
        temporary = place / f"{MAKING}{label}"
        self.make_room(size_bytes, sparing=place)
        try:
            try:
                make(temporary)
            except OSError as error:
                temporary.unlink(missing_ok=True)
                if error.errno not in FULL or not self.make_room(self._max_bytes, sparing=place):
                    raise
                make(temporary)
            temporary.chmod(0o400)
            made = place / f"{checksum(temporary):08x}-{label}"
            temporary.rename(made)
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise UserError(
                f"{self.folder}: no space is left for {size_bytes / 2**20:.0f} MiB",
                hint="set data.cache.dir to another folder, or data.cache.size_gib lower",
            ) from error
        finally:
            temporary.unlink(missing_ok=True)
        self._verified.add(str(made))

    def _is_intact(self, file: Path) -> bool:
        """Compare a file with its checksum, once in each process."""
        if str(file) not in self._verified:
            if f"{checksum(file):08x}" != file.name[:8]:
                return False
            self._verified.add(str(file))
        return True

    def remove(self, name: str) -> bool:
        """Remove a file; False: it is in use."""
        return _remove(self.folder / name)

    def progress(self, name: str) -> tuple[int, float] | None:
        """Return the bytes of a file that is being made, and the seconds since it was begun; None: none."""
        with suppress(FileNotFoundError):
            for each in (self.folder / name).glob(f"{MAKING}*"):
                return each.stat().st_size, time() - each.parent.stat().st_mtime
        return None

    def make_room(self, size_bytes: float, sparing: Path | None = None) -> int:
        """Remove files that were not used for the longest time, unless in use; return how many were removed.

        Args:
            size_bytes: Bytes that are to be added.
            sparing: Folder of a file that is not removed.
        """
        with suppress(FileNotFoundError), lock(self.folder / "lock"):
            return self._remove_oldest(size_bytes, sparing)
        return 0

    def _remove_oldest(self, size_bytes: float, sparing: Path | None) -> int:
        places = []
        total = size_bytes
        for place in self.folder.iterdir():
            if place.is_dir() and not place.name.startswith(REMOVED):
                with suppress(FileNotFoundError):
                    size = sum(each.stat().st_size for each in place.iterdir())
                    places.append((place.stat().st_mtime, place, size))
                    total += size
        number = 0
        for _, place, size in sorted(places):
            if total <= self._max_bytes:
                break
            if place != sparing and _remove(place):
                number, total = number + 1, total - size
        if total > self._max_bytes and not self._is_warned:
            self._is_warned = True
            log.warning(
                "the cache %s has files in use that are larger than data.cache.size_gib: %.1f GiB",
                self.folder,
                total / 2**30,
            )
        return number

    def remove_leftovers(self) -> None:
        """Remove what killed processes have left behind."""
        with suppress(FileNotFoundError):
            for place in self.folder.iterdir():
                if place.name.startswith(REMOVED):
                    shutil.rmtree(place, ignore_errors=True)
                elif place.is_dir() and _content(place) is None:
                    _remove(place)


def checksum(file: Path) -> int:
    """Return the CRC-32 of a file."""
    found = 0
    with file.open("rb") as opened:
        while chunk := opened.read(2**20):
            found = zlib.crc32(chunk, found)
    return found


def private_folder(folder: Path) -> None:
    """Create a folder that only this user can read.

    Raises:
        UserError: It belongs to another user.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        if folder.stat().st_uid != os.getuid():
            raise UserError(
                f"{folder} belongs to another user", hint="set data.cache.dir to a folder of yours"
            )


def _content(place: Path) -> Path | None:
    with suppress(FileNotFoundError, NotADirectoryError):
        return next((each for each in place.iterdir() if _CONTENT.match(each.name)), None)
    return None


def _lock_of(path: Path, kind: int) -> int | None:
    """Open and lock a file; None: it was removed while this process waited."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, kind)
        if os.fstat(handle).st_nlink:
            return handle
    except BlockingIOError:
        pass
    os.close(handle)
    return None


def _remove(place: Path) -> bool:
    """Remove a file with its folder; False: it is in use."""
    handle = _lock_of(place / "lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
    if handle is None:
        return False
    try:
        # Another process may make the file again while this one is being removed.
        removed = place.with_name(f"{REMOVED}{os.urandom(8).hex()}")
        place.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
    finally:
        os.close(handle)
    return True


def _try_lock(handle: int) -> bool:
    """Lock a file if no other process has locked it; return whether this one has it now."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def lock(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Return a context in which no other process has locked a file, which is created.

    Args:
        path: The file.
        on_wait: Called once if another process has locked it for longer than ``PATIENCE_S``.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        until_s = monotonic() + PATIENCE_S
        while not _try_lock(handle) and monotonic() < until_s:
            sleep(0.02)
        if not _try_lock(handle):
            on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
