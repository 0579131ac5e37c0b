"""Index of files: how many samples each has, and where each sample is in its file.

    <key>/index.json    what the index describes, its digest, and the number of samples
    <key>/files.txt     name of each file, a line for each
    <key>/files.npy     for each file: samples, size, digest, tag, and place of its name (``FILES``)
    <key>/rows.npy      rows of all samples (``Source.rows``), one file after the other
    <key>/ends.npy      cumulative sums of the weights of samples, if the job has weights
    <key>/lengths.npy   lengths of samples, if the job has lengths

An index is made once, by the first process that needs it. Others wait for it. Parts that are complete remain
if the process is killed, and are not made again.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import shutil
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from time import time
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from horovod_train.data.cache import MAKING, Cache, LockedFile, lock, name_of, private_folder
from horovod_train.data.order import Numbers
from horovod_train.data.remote import (
    Listed,
    changed,
    digest_of,
    download,
    is_remote,
    list_files,
    local_path,
    tag_of,
)
from horovod_train.data.source import DataError, Opened, Rows, SampleFunction, Source
from horovod_train.errors import HorovodTrainError, UserError, result_of
from horovod_train.system.files import write_atomic

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Columns = dict[str, list[str | float]]
VERSION = 1
FILES = np.dtype([(name, "<i8") for name in ("samples", "size_bytes", "digest", "tag", "name")])
LISTED_AGAIN_S = 600.0
"""Files are listed again if that was done so long ago, to find files that were added or removed."""
FUNCTIONS = ("keep", "weight", "balance", "length")


@dataclass(frozen=True)
class Description:
    """What an index describes.

    Attributes:
        source: The source, with its arguments.
        files: Patterns of files.
        functions: Functions of samples as they are stored: ``keep``, ``weight``, ``balance``, ``length``.
        excluded: Names of files, and for each the numbers of its samples that are left out; empty: all.
    """

    source: Source
    files: Sequence[str]
    functions: Mapping[str, SampleFunction] = field(default_factory=dict)
    excluded: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def has_rows(self) -> bool:
        """Whether files must be read: each may have another number of samples, or functions choose them."""
        return not self.source.is_one_sample or bool(self.functions)

    def choice(self) -> tuple[object, ...]:
        """Return what determines the samples of a file, as plain values."""
        source = type(self.source)
        return (
            f"{source.__module__}.{source.__qualname__}",
            source.version,
            self.source.model_dump(mode="json"),
            sorted((name, code_digest(each)) for name, each in self.functions.items()),
        )

    def key(self) -> str:
        """Return the name of the index: a hash of all that determines it, but the content of files."""
        excluded = sorted((name, list(numbers)) for name, numbers in self.excluded.items())
        return name_of(VERSION, self.choice(), list(self.files), excluded)


PLAIN = (str, bytes, int, float, bool, type(None), tuple, list, dict, set, frozenset)


def code_digest(function: Callable[..., object]) -> str:
    """Return a digest of the code of a function, and of what it refers to in its module.

    It contains defaults, variables of enclosing functions, constants, and functions and classes of the same
    module, also those that they refer to in turn.
    """
    parts = sorted(set(_parts_of(getattr(function, "wrapped", function), set())))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _parts_of(value: object, seen: set[int]) -> Iterator[str]:
    if isinstance(value, PLAIN):
        yield text_of(value)
    elif id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            yield from _parts_of_function(value, seen)
        elif isinstance(value, partial):
            for each in (value.func, value.args, value.keywords):
                yield from _parts_of(each, seen)
        else:
            yield from _parts_of_object(value, seen)


def text_of(value: object) -> str:
    """Return a text of a value that is the same in each process: sets have another order in each."""
    if isinstance(value, dict):
        return str([(text_of(key), text_of(each)) for key, each in value.items()])
    if isinstance(value, tuple | list):
        return str([text_of(each) for each in value])
    if isinstance(value, set | frozenset):
        return str(sorted(text_of(each) for each in value))
    return repr(value) if isinstance(value, PLAIN) else type(value).__qualname__


def _parts_of_object(value: object, seen: set[int]) -> Iterator[str]:
    """Yield the code of a class, or of the class of an object and its attributes."""
    if isinstance(value, types.MethodType):
        yield from _parts_of(value.__func__, seen)
        value = value.__self__
    owner = value if isinstance(value, type) else type(value)
    source, _ = result_of(lambda: inspect.getsource(owner))
    yield f"{owner.__qualname__} {source}"
    if owner is not value:
        for name, each in sorted(getattr(value, "__dict__", {}).items()):
            yield name
            yield from _parts_of(each, seen)


def _parts_of_function(value: types.FunctionType, seen: set[int]) -> Iterator[str]:
    source, _ = result_of(lambda: inspect.getsource(value))
    yield source if source is not None else repr((value.__code__.co_code, value.__code__.co_consts))
    yield text_of((value.__defaults__, value.__kwdefaults__))
    for cell in value.__closure__ or ():
        yield from _parts_of(cell.cell_contents, seen)
    for name in sorted(_names_in(value.__code__) & value.__globals__.keys()):
        named = value.__globals__[name]
        if isinstance(named, PLAIN):
            yield f"{name} = {text_of(named)}"
        elif getattr(named, "__module__", None) == value.__module__:
            yield from _parts_of(named, seen)


def _names_in(code: types.CodeType) -> set[str]:
    inner = (_names_in(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*inner)


@dataclass(frozen=True)
class Summary:
    """The content of ``index.json``.

    Attributes:
        described: Arguments of the source that all files together determine (``Source.described``).
        num_samples: Number of samples.
        digest: Digest of all files, and of how samples are chosen.
    """

    described: dict[str, object]
    num_samples: int
    digest: str


@dataclass
class Index:
    """An index on the disk. Arrays are mapped into memory.

    Attributes:
        folder: The folder of the index.
    """

    folder: Path

    def __reduce__(self) -> tuple[object, ...]:
        return Index, (self.folder,)

    @cached_property
    def summary(self) -> Summary:
        """The content of ``index.json``."""
        return Summary(**json.loads((self.folder / "index.json").read_text()))

    @cached_property
    def sizes(self) -> Numbers:
        """Number of samples of each file, shape [files]."""
        return np.array(self._files["samples"], np.int64)

    @cached_property
    def ends(self) -> Numbers:
        """Number of the sample after the last one of each file, shape [files]."""
        return np.cumsum(self.sizes)

    @cached_property
    def _files(self) -> npt.NDArray[np.void]:
        found: npt.NDArray[np.void] = np.load(self.folder / "files.npy", mmap_mode="r")
        return found

    @cached_property
    def _names(self) -> npt.NDArray[np.uint8]:
        return np.memmap(self.folder / "files.txt", np.uint8, "r")

    @cached_property
    def _rows(self) -> Rows:
        return np.asarray(np.load(self.folder / "rows.npy", mmap_mode="r"))

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return int(self._files["size_bytes"].sum())

    def url(self, file: int) -> str:
        """Return the name of a file."""
        start = int(self._files["name"][file])
        end = len(self._names) if file + 1 == len(self._files) else int(self._files["name"][file + 1])
        return self._names[start : end - 1].tobytes().decode()

    def listed(self, file: int) -> Listed:
        """Return name, size and tag of a file."""
        return Listed(self.url(file), int(self._files["size_bytes"][file]), int(self._files["tag"][file]))

    def file_digest(self, file: int) -> int:
        """Return the digest of a file; 0: there is none."""
        return int(self._files["digest"][file])

    def rows(self, file: int) -> Rows:
        """Return the rows of the samples of a file, mapped into memory."""
        end = int(self.ends[file])
        return self._rows[end - int(self.sizes[file]) : end]

    def has(self, column: str) -> bool:
        """Return whether there is an array with a number for each sample: ``ends``, or ``lengths``."""
        return (self.folder / f"{column}.npy").is_file()

    def weight_ends(self) -> npt.NDArray[np.float64]:
        """Return the cumulative sums of the weights of samples."""
        found: npt.NDArray[np.float64] = np.load(self.folder / "ends.npy", mmap_mode="r")
        return found

    def lengths(self) -> Numbers:
        """Return the lengths of samples."""
        found: Numbers = np.load(self.folder / "lengths.npy", mmap_mode="r")
        return found


@contextmanager
def naming(url: str) -> Iterator[None]:
    """Return a context in which errors of a format name the file."""
    try:
        yield
    except DataError as error:
        if url in error.message:
            raise
        hint = error.hint or "restore the file, or leave it out: `horovod-train data verify` lists such files"
        raise DataError(f"{url}: {error.message}", hint=hint) from error


def local_file(
    listed: Listed, source: Source, cache: Cache, digest: int = 0
) -> tuple[Path, LockedFile | None]:
    """Return a file that ``source.open`` can read: the file itself, or one in the cache.

    Args:
        listed: The file.
        source: Its format.
        cache: The cache of this host.
        digest: Digest of the file in the index; 0: there is none.

    Raises:
        DataError: The file is damaged, or is not the one of the index.
    """
    url = listed.url
    is_packed = source.is_packed(url)
    if not is_remote(url):
        path = local_path(url)
        size_bytes, _ = result_of(lambda: path.stat().st_size)
        if size_bytes is None:
            raise DataError(f"{url}: does not exist any more", hint="restore it")
        if size_bytes != listed.size_bytes or (digest and not is_packed and digest_of(path) != digest):
            raise changed(url)
        if not is_packed:
            return path, None
    name = cached_name(listed, source)

    def get() -> LockedFile:
        make = partial(_make_local, listed, source, digest=digest)
        return cache.get(name, Path(url).name, listed.size_bytes, make)

    locked = get()
    if is_remote(url) and digest and digest_of(locked.path) != digest:  # of another version of the file
        locked.close()
        cache.remove(name)
        locked = get()
        if digest_of(locked.path) != digest:
            locked.close()
            raise changed(url)
    return locked.path, locked


def is_cached(url: str, source: Source) -> bool:
    """Return whether a file is copied or unpacked before it is read."""
    return is_remote(url) or source.is_packed(url)


def cached_name(listed: Listed, source: Source) -> str:
    """Return the name of a file in the cache."""
    version: tuple[object, ...] = ()
    if source.is_packed(listed.url):
        version = type(source).__name__, source.version, source.model_dump(mode="json")
    return name_of(listed.url, listed.size_bytes, listed.tag, version)


def _make_local(listed: Listed, source: Source, to: Path, *, digest: int) -> None:
    """Copy a file if it is remote, and unpack it if necessary."""
    url = listed.url
    is_packed = source.is_packed(url)
    original = to.with_name(f"{MAKING}packed-{Path(url).name}") if is_packed else to
    try:
        if is_remote(url):
            download(url, listed.size_bytes, original)
        else:
            original = local_path(url)
            if digest and digest_of(original) != digest:
                raise changed(url)
        if is_packed:
            with naming(url):
                source.unpack(original, to)
        if is_remote(url) and digest and digest_of(to) != digest:
            raise changed(url)
    finally:
        if is_packed and is_remote(url):
            original.unlink(missing_ok=True)


class IndexMaker:
    """Makes the index of a description, or returns one that exists.

    Args:
        description: What the index describes.
        cache: The cache of this host.
        root: Folder of all indices.
        num_processes: Number of processes that read files.
        report: Called with the number of files that are done, of all files, and of samples so far.
    """

    def __init__(
        self,
        description: Description,
        cache: Cache,
        root: Path,
        *,
        num_processes: int = 1,
        report: Callable[[int, int, int], None] = lambda *_: None,
    ) -> None:
        self.source, self.cache = description.source, cache
        if self.source.is_one_sample:  # a sample is the whole file
            description = replace(description, excluded=dict.fromkeys(description.excluded, ()))
        self._description, self._cache, self._root = description, cache, root
        self._num_processes, self._report = num_processes, report

    def index(self, *, again: bool = False) -> Index:
        """Return the index. One process of all that have the folder makes it, and the others wait.

        Args:
            again: List the files again, and make the index if they have changed.

        Raises:
            UserError: There are no files or no samples, or a function has failed.
            DataError: A file is damaged.
        """
        private_folder(self._root)
        key = self._description.key()
        current = self._root / f"{key}.current"
        with lock(self._root / f"{key}.lock", self._report_wait):
            found, _ = result_of(lambda: (current.read_text(), current.stat().st_mtime))
            former = None
            if found is not None and not again and (self._root / found[0] / "index.json").is_file():
                former = Index(self._root / found[0])
                if time() - found[1] < LISTED_AGAIN_S:
                    return former
            self.cache.remove_leftovers()
            listed = self._listed()
            digest = name_of([(each.url, each.size_bytes, each.tag) for each in listed])[:16]
            folder = self._root / f"{key}-{digest}"
            if again:  # jobs may use the former one
                folder = folder.with_name(f"{folder.name}-{int(time())}")
            if not (folder / "index.json").is_file():
                self._make(folder, listed, former)
            write_atomic(current, folder.name)
        return Index(folder)

    def _report_wait(self) -> None:
        log.warning("waiting for another process, which makes the index of %s", self._description.files[0])

    def problems(self, decode: SampleFunction | None) -> list[tuple[str, int | None, str]]:
        """Read and decode all samples; return file, sample (None: the file), and problem of those that fail.

        Args:
            decode: Function of a stored sample; None: that of the source.

        Raises:
            UserError: There are no files.
        """
        listed = self._listed()
        if decode is None:
            described = self.source.described([each.url for each in listed])
            decode = self.source.model_copy(update=dict(described)).decode
        found: list[tuple[str, int | None, str]] = []
        work = [(self._description, self.cache, each, decode) for each in listed]
        for done, problems in enumerate(_in_processes(problems_of, work, self._num_processes), 1):
            found += problems
            self._report(done, len(listed), 0)
        return sorted(found, key=lambda each: (each[0], each[1] if each[1] is not None else -1))

    def _listed(self) -> list[Listed]:
        description = self._description
        files = [
            _with_companions(each, description.source) for each in list_files(list_patterns(description))
        ]
        excluded = {url for url, numbers in description.excluded.items() if not numbers}
        unknown = description.excluded.keys() - {each.url for each in files}
        if wrong := [url for url in unknown if not is_remote(url) and not local_path(url).exists()]:
            raise UserError(
                f"data.exclude: {min(wrong)} does not exist", hint="correct the line, or remove it"
            )
        if broken := next((each.url for each in files if "\n" in each.url), None):
            raise UserError(f"data.files: the name {broken!r} has a line break", hint="rename the file")
        return [each for each in files if each.url not in excluded]

    def _make(self, folder: Path, listed: Sequence[Listed], former: Index | None) -> None:
        description = self._description
        name = "-".join(folder.name.split("-")[:2])  # without the time of `again`
        parts = folder.with_name(f"{name}.parts")
        for left in self._root.glob(f"{name.partition('-')[0]}-*"):
            if left.suffix in {".parts", ".tmp"} and left != parts:
                shutil.rmtree(left, ignore_errors=True)  # of a process that was killed
        private_folder(parts)
        if former is not None and description.has_rows:
            _take_parts(former, description, listed, parts)
        of_files = self._make_parts(parts, listed) if description.has_rows else [(1, 0)] * len(listed)
        temporary = folder.with_name(f"{folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        described = dict(description.source.described([each.url for each in listed]))
        digest = _write_index(temporary, parts, description, listed, of_files, described)
        summary = Summary(described, sum(samples for samples, _ in of_files), digest)
        if not summary.num_samples:
            raise UserError(
                "data.files: the files have no samples" + (" that are kept" if description.functions else ""),
                hint="correct data.files or data.keep",
            )
        write_atomic(temporary / "index.json", json.dumps(asdict(summary)))
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        shutil.rmtree(parts, ignore_errors=True)

    def _make_parts(self, parts: Path, listed: Sequence[Listed]) -> list[tuple[int, int]]:
        """Make the part of each file that is not there yet; return samples and digest of each."""
        number_samples = 0
        missing = [at for at in range(len(listed)) if not (parts / f"{at}.npz").is_file()]
        self._report(len(listed) - len(missing), len(listed), 0)
        done = len(listed) - len(missing)
        work = [(self._description, self._cache, listed[at], parts / f"{at}.npz") for at in missing]
        for samples in _in_processes(make_part, work, self._num_processes):
            done, number_samples = done + 1, number_samples + samples
            self._report(done, len(listed), number_samples)
        found = []
        for at in range(len(listed)):
            with np.load(parts / f"{at}.npz") as part:
                found.append((len(part["rows"]), int(part["digest"])))
        return found


def _take_parts(former: Index, description: Description, listed: Sequence[Listed], parts: Path) -> None:
    """Write the parts of the files that have not changed since a former index, and log the others."""
    known = {former.listed(file): file for file in range(len(former.sizes))}
    lengths = former.lengths() if former.has("lengths") else None
    others = [each.url for each in listed if each not in known]
    if others:
        names = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        log.warning("%d of %d files are new, or have changed: %s", len(others), len(listed), names)
    if description.functions.keys() & COLUMN_OF["ends"]:
        return  # an index has sums of weights, not the weights of samples
    for number, each in enumerate(listed):
        part = parts / f"{number}.npz"
        if (file := known.get(each)) is None or part.is_file():
            continue
        end = int(former.ends[file])
        own = slice(end - int(former.sizes[file]), end)
        columns = {} if lengths is None else {"length": lengths[own]}
        _write_part(part, rows=former.rows(file), digest=np.int64(former.file_digest(file)), **columns)


def _write_part(part: Path, **arrays: object) -> None:
    temporary = part.with_suffix(".tmp.npz")
    np.savez(temporary, **arrays)  # type: ignore[arg-type]
    temporary.replace(part)


def _with_companions(listed: Listed, source: Source) -> Listed:
    """Return a file, whose tag also changes if one of its companions is written again."""
    found = [] if is_remote(listed.url) else source.companions(local_path(listed.url))
    if not found:
        return listed
    return replace(listed, tag=tag_of((listed.tag, [each.stat().st_mtime_ns for each in found])))


def list_patterns(description: Description) -> list[str]:
    """Return the patterns of a description, with those of folders replaced by the files in them."""
    return [each for pattern in description.files for each in description.source.expand(pattern)]


def make_part(description: Description, cache: Cache, listed: Listed, part: Path) -> int:
    """Write the part of an index that describes one file; return its number of samples.

    Raises:
        DataError: The file is damaged.
        UserError: A function has failed.
    """
    source = description.source
    path, locked = local_file(listed, source, cache)
    try:
        with naming(listed.url):
            rows = source.rows(path)
            numbers = np.arange(len(rows))
            if skipped := description.excluded.get(listed.url):
                if max(skipped) >= len(rows):
                    raise DataError(f"has no sample {max(skipped)}, which data.exclude names")
                numbers = np.setdiff1d(numbers, np.asarray(skipped))
            columns: Columns = {name: [] for name in description.functions if name != "keep"}
            if description.functions:
                numbers = _kept(description, listed, path, rows, numbers, columns)
        digest = digest_of(path if is_remote(listed.url) else local_path(listed.url))
    finally:
        if locked is not None:
            locked.close()
    arrays = {name: np.array(values, _TYPES[name]) for name, values in columns.items()}
    _write_part(part, rows=rows[numbers], digest=np.int64(digest), **arrays)
    return len(numbers)


def problems_of(
    description: Description, cache: Cache, listed: Listed, decode: SampleFunction
) -> list[tuple[str, int | None, str]]:
    """Return the problems of a file, see ``IndexMaker.problems``."""
    found, error = result_of(lambda: _problems_of_samples(description, cache, listed, decode))
    return [(listed.url, None, _one_line(error))] if error is not None else found or []


def _problems_of_samples(
    description: Description, cache: Cache, listed: Listed, decode: SampleFunction
) -> list[tuple[str, int | None, str]]:
    locked = opened = None
    found: list[tuple[str, int | None, str]] = []
    try:
        path, locked = local_file(listed, description.source, cache)
        rows = description.source.rows(path)
        opened = description.source.open(path, rows, listed.url)
        for number in np.setdiff1d(np.arange(len(rows)), description.excluded.get(listed.url, ())).tolist():
            _, problem = result_of(partial(_used, description, opened, number, decode))
            if problem is not None:
                found.append((listed.url, number, _one_line(problem)))
    finally:
        if opened is not None:
            opened.close()
        if locked is not None:
            locked.close()
    return found


def _used(description: Description, opened: Opened, number: int, decode: SampleFunction) -> None:
    """Call all functions of a sample."""
    (sample,) = opened.read([number])
    if _values_of(description, sample) is not None:
        decode(sample)


def _values_of(description: Description, sample: object) -> Mapping[str, str | float] | None:
    """Return the results of the functions of a stored sample; None: it is not kept."""
    functions = dict(description.functions)
    keep = functions.pop("keep", None)
    if keep is not None and not keep(sample):
        return None
    return {name: _value_of(name, function(sample)) for name, function in functions.items()}


def _one_line(error: Exception) -> str:
    text = error.message if isinstance(error, HorovodTrainError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:400]


_TYPES: Mapping[str, type[np.generic]] = {"weight": np.float64, "length": np.int64, "balance": np.str_}
CHUNK = 256
"""Samples that are read at once."""


def _kept(
    description: Description,
    listed: Listed,
    path: Path,
    rows: Rows,
    numbers: npt.NDArray[np.int64],
    columns: Columns,
) -> npt.NDArray[np.int64]:
    """Call the functions of all samples of a file; return the numbers of those that are kept."""
    opened = description.source.open(path, rows, listed.url)
    kept = []
    try:
        for start in range(0, len(numbers), CHUNK):
            chunk = numbers[start : start + CHUNK].tolist()
            for number, sample in zip(chunk, opened.read(chunk), strict=True):
                values, error = result_of(partial(_values_of, description, sample))
                if error is not None:
                    raise DataError(
                        f"{listed.url}: a function of sample {number} has failed: "
                        f"{type(error).__name__}: {error}",
                        hint="correct the function, or leave the sample out: `horovod-train data verify`",
                    ) from error
                if values is not None:
                    kept.append(number)
                    for name, value in values.items():
                        columns[name].append(value)
    finally:
        opened.close()
    return np.array(kept, np.int64)


def _value_of(name: str, value: object) -> str | float:
    if name == "balance":
        return str(value)
    number = float(value)  # type: ignore[arg-type]
    if not np.isfinite(number) or number < 0:
        raise ValueError(f"the {name} of a sample is {value!r}, and must be finite, and at least 0")
    return number


def _in_processes(
    function: Callable[..., Result], work: Sequence[tuple[object, ...]], num_processes: int
) -> Iterator[Result]:
    """Yield the results of calls, in any order."""
    if num_processes == 1 or len(work) < 2:
        yield from (function(*arguments) for arguments in work)
        return
    pool = ProcessPoolExecutor(num_processes, mp_context=get_context("forkserver"))
    try:
        for future in as_completed([pool.submit(function, *arguments) for arguments in work]):
            yield future.result()
    finally:  # also after an error: what was not begun is not done
        pool.shutdown(cancel_futures=True)


def _write_index(
    folder: Path,
    parts: Path,
    description: Description,
    listed: Sequence[Listed],
    of_files: Sequence[tuple[int, int]],
    described: Mapping[str, object],
) -> str:
    """Write the arrays and names of an index; return its digest."""
    names = [f"{each.url}\n".encode() for each in listed]
    (folder / "files.txt").write_bytes(b"".join(names))
    files = np.zeros(len(listed), FILES)
    files["samples"], files["digest"] = zip(*of_files, strict=True)
    files["size_bytes"] = [each.size_bytes for each in listed]
    files["tag"] = [each.tag for each in listed]
    files["name"] = np.cumsum([0, *map(len, names[:-1])])
    np.save(folder / "files.npy", files)
    total = int(files["samples"].sum())
    if description.has_rows:
        _join_parts(folder, parts, len(listed), total, description.functions.keys())
    else:
        np.save(folder / "rows.npy", np.zeros((total, 0), np.int64))
    found = hashlib.sha256(repr(description.choice()).encode())
    num_parts = 2 if description.source.is_one_sample else 1  # the folder of an image is its class
    found.update(repr([Path(each.url).parts[-num_parts:] for each in listed]).encode())
    found.update(repr(sorted(described.items())).encode())
    for name in ("samples", "size_bytes", "digest"):
        found.update(np.ascontiguousarray(files[name]).tobytes())
    for path in (folder / f"{name}.npy" for name in ("rows", "ends", "lengths")):
        if path.is_file():
            with path.open("rb") as opened:
                found.update(hashlib.file_digest(opened, "sha256").digest())
    return found.hexdigest()[:32]


def _join_parts(folder: Path, parts: Path, number: int, total: int, columns: Collection[str]) -> None:
    """Join the arrays of all parts."""
    loaded = (np.load(parts / f"{at}.npz") for at in range(number))
    rows: Rows | None = None
    classes: Counter[str] = Counter()
    start = 0
    out = {name: _array(folder / f"{name}.npy", total) for name in ("lengths", "ends")
           if COLUMN_OF[name] & set(columns)}  # fmt: skip
    for part in loaded:
        with part:
            own = part["rows"]
            if rows is None:
                rows = np.lib.format.open_memmap(folder / "rows.npy", "w+", np.int64, (total, own.shape[1]))
            rows[start : start + len(own)] = own
            if "length" in part:
                out["lengths"][start : start + len(own)] = part["length"]
            if "weight" in part:
                out["ends"][start : start + len(own)] = part["weight"]
            if "balance" in part:
                classes.update(part["balance"].tolist())
            start += len(own)
    if classes:
        start = 0
        for at in range(number):
            with np.load(parts / f"{at}.npz") as part:
                weights = [1.0 / classes[name] for name in part["balance"].tolist()]
                out["ends"][start : start + len(weights)] = weights
                start += len(weights)
    if "ends" in out:
        if total and not out["ends"].any():
            raise UserError("data.sampling.weight: all weights are 0", hint="correct the function")
        np.cumsum(out["ends"], out=out["ends"])


COLUMN_OF: Mapping[str, set[str]] = {"lengths": {"length"}, "ends": {"weight", "balance"}}


def _array(path: Path, length: int) -> npt.NDArray[np.float64]:
    dtype = np.int64 if path.stem == "lengths" else np.float64
    found: npt.NDArray[np.float64] = np.lib.format.open_memmap(path, "w+", dtype, (length,))
    return found
