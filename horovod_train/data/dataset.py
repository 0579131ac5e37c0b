"""Datasets of files, for all frameworks.

    FileDataset     the samples of files, by their number
    Concatenation   several of them, for mixtures
    training_files, evaluation_files
                    the data of a job

A dataset carries paths only: loader processes open files, and file systems, themselves.
"""

from __future__ import annotations

import logging
import os
import re
import resource
import threading
import traceback
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from time import monotonic
from typing import ClassVar, TypeVar

import numpy as np

from horovod_train.config.data import Data, Files
from horovod_train.data.cache import Cache, LockedFile, default_folder
from horovod_train.data.index import (
    FUNCTIONS,
    Description,
    Index,
    IndexMaker,
    cached_name,
    is_cached,
    local_file,
    naming,
)
from horovod_train.data.order import (
    MAX_PERMUTATION,
    DataOrder,
    Draws,
    Endless,
    Mixture,
    Numbers,
    Passes,
    SimilarLengths,
    without_replacement,
)
from horovod_train.data.remote import is_remote
from horovod_train.data.source import DataError, Opened, SampleFunction, Source
from horovod_train.errors import HorovodTrainError, UserError, result_of
from horovod_train.registry import SOURCES, load_function

log = logging.getLogger(__name__)

MAX_OPEN_FILES = max(8, min(128, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 16))
"""Open files of a dataset in a process."""
NUM_PREFETCHED = 4
"""Files that are copied before they are needed."""
MAX_LOOKAHEAD = 512
"""Batches that are examined for such files, from the current one."""
REPORT_INTERVAL_S = 10.0
Report = Callable[[int, int, int], None]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Function:
    """A function of a user, which another process imports by its location."""

    location: str | Callable[..., object]

    @cached_property
    def wrapped(self) -> Callable[..., object]:
        """The function."""
        return self.location if callable(self.location) else load_function(self.location)

    def __call__(self, *arguments: object) -> object:
        return self.wrapped(*arguments)

    def __reduce__(self) -> tuple[object, ...]:
        return Function, (self.location,)


def function_of(location: str | Callable[..., object] | None) -> Function | None:
    """Return a function of a user; None: there is none."""
    return None if location is None else Function(location)


@dataclass
class _Open:
    """An open file, its name in the job, and the lock of the cache on it."""

    url: str
    opened: Opened
    locked: LockedFile | None

    def close(self) -> None:
        self.opened.close()
        if self.locked is not None:
            self.locked.close()


class Samples(ABC):
    """Samples of files, by their numbers."""

    is_mixture: ClassVar[bool] = False
    """Passes over the parts end within epochs."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def __getitems__(self, numbers: Sequence[int]) -> list[object]:
        """Return some samples."""

    def __getitem__(self, number: int, /) -> object:
        """Return a sample."""
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return self.__getitems__([number % len(self)])[0]

    @property
    @abstractmethod
    def has_cached_files(self) -> bool:
        """Whether files are copied or unpacked before they are read."""

    @abstractmethod
    def cached_files(self, numbers: Numbers) -> Iterator[tuple[FileDataset, int]]:
        """Yield the files of some samples that are copied or unpacked before they are read."""

    def prefetcher(self, upcoming: Iterable[Numbers]) -> Prefetcher | None:
        """Start a thread that copies files before the samples of the next batches are read; None: no need."""
        return Prefetcher(self, upcoming) if self.has_cached_files else None

    def waiting_for(self, numbers: Numbers) -> str:
        """Return the file among those of some samples that is being copied, and how fast; empty: none."""
        for dataset, file in self.cached_files(numbers):
            listed = dataset.index.listed(file)
            name = cached_name(listed, dataset.source)
            if (found := dataset.cache.progress(name)) is not None:
                size_bytes, elapsed_s = found
                return (
                    f"{listed.url} ({size_bytes / 2**20:.1f} of {listed.size_bytes / 2**20:.1f} MiB, "
                    f"{size_bytes / 2**20 / max(elapsed_s, 1e-3):.2g} MiB/s)"
                )
        return ""


class FileDataset(Samples):
    """The samples of files.

    Args:
        index: Index of the files.
        source: Their format.
        cache: Cache of this host.
        decode: Function of a stored sample; None: that of the source.
        collate: Function of a list of samples, which returns a batch; None: arrays are stacked.
        replacement: Draw by weights with replacement.
    """

    def __init__(
        self,
        index: Index,
        source: Source,
        cache: Cache,
        *,
        decode: SampleFunction | None = None,
        collate: Callable[[list[object]], object] | None = None,
        replacement: bool = True,
    ) -> None:
        self.index, self.source, self.cache = index, source, cache
        self._decode = decode
        if collate is not None:
            self.collate = collate
        self._replacement = replacement
        self._open_files: OrderedDict[int, _Open] = OrderedDict()

    def __getstate__(self) -> Mapping[str, object]:
        return {**vars(self), "_open_files": OrderedDict()}

    def __len__(self) -> int:
        return self.index.summary.num_samples

    def __getitems__(self, numbers: Sequence[int]) -> list[object]:
        """Return some samples; those of one file are read together.

        Raises:
            DataError: A file is damaged, or has changed since its index was made.
        """
        files, places = self.places_of(np.asarray(numbers, np.int64))
        of_file: dict[int, list[int]] = {}
        for at, file in enumerate(files.tolist()):
            of_file.setdefault(file, []).append(at)
        places_in_files = places.tolist()
        found: list[object] = [None] * len(places_in_files)
        for file, mine in of_file.items():
            samples = self._read(file, [places_in_files[at] for at in mine])
            for at, sample in zip(mine, samples, strict=True):
                found[at] = sample
        return found

    def _read(self, file: int, places: Sequence[int]) -> list[object]:
        """Return the samples at some places of a file."""
        found = self._file(file)
        with naming(found.url):
            stored = _explained(partial(found.opened.read, places), places)
            decode = self._decode or self.source.decode
            decoded: list[object] = []
            _, error = result_of(partial(_decode_all, stored, decode, decoded))
            if error is not None:
                raise _explanation(error, [places[len(decoded)]]) from error
            return decoded

    def places_of(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the file of each sample, and its place in the file."""
        files = np.searchsorted(self.index.ends, numbers, "right")
        return files, numbers - self.index.ends[files] + self.index.sizes[files]

    def _file(self, file: int) -> _Open:
        found = self._open_files.get(file)
        if found is None:
            url = self.index.url(file)
            with naming(url):
                path, locked = self._local(file)
                opened = self.source.open(path, self.index.rows(file), url)
            found = self._open_files[file] = _Open(url, opened, locked)
            while len(self._open_files) > MAX_OPEN_FILES:
                self._open_files.popitem(last=False)[1].close()
        self._open_files.move_to_end(file)
        return found

    def close(self) -> None:
        """Close all files; they are opened again when they are needed."""
        while self._open_files:
            self._open_files.popitem()[1].close()
        self.index = Index(self.index.folder)  # without memory maps

    def digest(self) -> str:
        """Return a digest of the files, and of how their samples are chosen."""
        return self.index.summary.digest

    def file_lines(self) -> Iterator[str]:
        """Yield name, size, samples and digest of each file."""
        index = self.index
        for file, samples in enumerate(index.sizes.tolist()):
            listed = index.listed(file)
            yield (
                f"{Path(listed.url).name} ({listed.size_bytes:,} bytes, {samples:,} samples, "
                f"digest {index.file_digest(file):016x})"
            )

    def endless(self, order: DataOrder) -> Endless:
        """Return the samples of all epochs.

        Raises:
            UserError: The data has too many samples for drawing without replacement.
        """
        length = len(self)
        whole: Endless = Passes.over(order, self.index.sizes)
        if self.index.has("ends"):
            ends = self.index.weight_ends()
            if self._replacement:
                whole = Draws(ends, order.seed)
            elif order.num_samples > (drawn := np.count_nonzero(np.diff(ends, prepend=0.0))):
                raise UserError(
                    f"data.sampling.replacement: an epoch has {order.num_samples:,} samples, and only "
                    f"{drawn:,} can be drawn once",
                    hint=f"set data.samples_per_epoch to at most {drawn}, or draw with replacement",
                )
            elif length > MAX_PERMUTATION:
                raise UserError(
                    f"data.sampling.replacement: {length:,} samples cannot be drawn without replacement, at "
                    f"most {MAX_PERMUTATION:,}",
                    hint="draw with replacement",
                )
            else:
                make = without_replacement(np.diff(ends, prepend=0.0), order.seed, order.num_samples)
                whole = Passes(order.num_samples, make)
        if self.index.has("lengths"):
            window = order.num_samples if self.index.has("ends") else length
            whole = SimilarLengths(whole, self.index.lengths(), order.row_size, order.seed, window)
        return whole

    def cached_files(self, numbers: Numbers) -> Iterator[tuple[FileDataset, int]]:
        """Yield the files of some samples that are copied or unpacked before they are read."""
        files, _ = self.places_of(numbers)
        for file in dict.fromkeys(files.tolist()):
            if is_cached(self.index.url(file), self.source):
                yield self, file

    def fetch(self, file: int) -> None:
        """Copy or unpack a file into the cache."""
        locked = self._local(file)[1]
        if locked is not None:
            locked.close()

    def _local(self, file: int) -> tuple[Path, LockedFile | None]:
        return local_file(self.index.listed(file), self.source, self.cache, self.index.file_digest(file))

    @property
    def has_cached_files(self) -> bool:
        """Whether files are copied or unpacked before they are read; all are, or none."""
        return is_cached(self.index.url(0), self.source)


def _decode_all(stored: Sequence[object], decode: SampleFunction, decoded: list[object]) -> None:
    """Append each decoded sample. After an exception, their number tells which sample has failed."""
    for sample in stored:
        decoded.append(decode(sample))  # noqa: PERF401


def _explained(call: Callable[[], Result], places: Sequence[int]) -> Result:
    """Return the result of a call, which is about samples at some places of a file.

    Raises:
        DataError: It raises another exception than one of this package.
    """
    found, error = result_of(call)
    if error is None:
        return found  # type: ignore[return-value]
    raise _explanation(error, places) from error


def _explanation(error: Exception, places: Sequence[int]) -> HorovodTrainError:
    """Return the error to raise for an exception, which is about samples at some places of a file."""
    if isinstance(error, HorovodTrainError):
        return error
    last = traceback.extract_tb(error.__traceback__)[-1]
    return DataError(
        f"sample {', '.join(map(str, places))}: {type(error).__name__}: {error} "
        f"(line {last.lineno} of {last.filename})",
        hint="correct data.decode, or leave the sample out: `horovod-train data verify` lists such samples",
    )


class Concatenation(Samples):
    """The samples of several datasets, one dataset after the other, and their mixture.

    Args:
        parts: The datasets.
        proportions: Part of the samples that each has, relative to the others.
    """

    is_mixture: ClassVar[bool] = True

    def __init__(self, parts: Sequence[FileDataset], proportions: Sequence[float]) -> None:
        self.parts = list(parts)
        if any(part.index.summary.described != parts[0].index.summary.described for part in parts):
            raise UserError(
                "data.mixture: the files of the parts have other classes",
                hint="set source_args.classes in each part to the names of all classes",
            )
        self._proportions = [each / sum(proportions) for each in proportions]
        self._ends = np.cumsum([len(part) for part in parts])
        if hasattr(parts[0], "collate"):
            self.collate = parts[0].collate

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitems__(self, numbers: Sequence[int]) -> list[object]:
        """Return some samples."""
        wanted = np.asarray(numbers, np.int64)
        of = np.searchsorted(self._ends, wanted, "right")
        found: list[object] = [None] * len(wanted)
        for number, part in enumerate(self.parts):
            mine = np.flatnonzero(of == number)
            samples = part.__getitems__(self._inside(wanted[mine], number).tolist())
            for at, sample in zip(mine.tolist(), samples, strict=True):
                found[at] = sample
        return found

    def close(self) -> None:
        """Close all files."""
        for part in self.parts:
            part.close()

    def _inside(self, numbers: Numbers, part: int) -> Numbers:
        return numbers - int(self._ends[part]) + len(self.parts[part])

    def digest(self) -> str:
        """Return a digest of the files of all parts, and of the proportions."""
        return " ".join([*(part.digest()[:12] for part in self.parts), repr(self._proportions)])

    def file_lines(self) -> Iterator[str]:
        """Yield name, size, samples and digest of each file."""
        return (line for part in self.parts for line in part.file_lines())

    def endless(self, order: DataOrder) -> Endless:
        """Return the samples of all epochs."""
        orders = [
            DataOrder(
                len(part),
                (order.seed + number) % 2**32,
                order.shuffle,
                order.kind,
                row_size=max(1, round(order.row_size * proportion)),
            )
            for number, (part, proportion) in enumerate(zip(self.parts, self._proportions, strict=True))
        ]
        whole = [part.endless(own) for part, own in zip(self.parts, orders, strict=True)]
        return Mixture(whole, (self._ends - [len(part) for part in self.parts]).tolist(), self._proportions)

    def cached_files(self, numbers: Numbers) -> Iterator[tuple[FileDataset, int]]:
        """Yield the files of some samples that are copied or unpacked before they are read."""
        of = np.searchsorted(self._ends, numbers, "right")
        for number, part in enumerate(self.parts):
            yield from part.cached_files(self._inside(numbers[of == number], number))

    @property
    def has_cached_files(self) -> bool:
        """Whether files of a part are copied or unpacked before they are read."""
        return any(part.has_cached_files for part in self.parts)


@dataclass
class Prefetcher:
    """Thread that copies remote files before the samples in them are read.

    Attributes:
        dataset: The dataset.
        upcoming: Numbers of the samples of each batch, from the next one.
    """

    dataset: Samples
    upcoming: Iterable[Numbers]
    _ahead: deque[int] = field(default_factory=deque)
    _position: int = 0
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self._condition = threading.Condition()
        threading.Thread(target=self._run, daemon=True, name="prefetch").start()

    def advance(self) -> None:
        """Note that another batch was requested."""
        with self._condition:
            self._position += 1
            self._condition.notify()

    def close(self) -> None:
        """End the thread after the current file."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()

    def _run(self) -> None:
        seen: OrderedDict[tuple[int, int], None] = OrderedDict()
        for number, numbers in enumerate(self.upcoming):
            if not self._wait_for(partial(self._is_near, number)):
                return
            for dataset, file in self.dataset.cached_files(numbers):
                key = id(dataset), file
                if key in seen:
                    seen.move_to_end(key)
                    continue
                seen[key] = None
                while len(seen) > MAX_OPEN_FILES:
                    seen.popitem(last=False)
                if not self._wait_for(partial(self._has_room, number)):
                    return
                result_of(partial(dataset.fetch, file))  # who needs the file reports an error
                self._ahead.append(number)

    def _wait_for(self, is_due: Callable[[], bool]) -> bool:
        """Wait until a condition holds; False: the thread must end."""
        with self._condition:
            self._condition.wait_for(lambda: self._is_closed or is_due())
            return not self._is_closed

    def _is_near(self, number: int) -> bool:
        return number <= self._position + MAX_LOOKAHEAD

    def _has_room(self, number: int) -> bool:
        """Return whether a file of a batch is needed now, or few files are ahead of what is read."""
        while self._ahead and self._ahead[0] <= self._position:
            self._ahead.popleft()
        return number <= self._position or len(self._ahead) < NUM_PREFETCHED


def open_files(
    source: str,
    files: str | Sequence[str],
    *,
    decode: SampleFunction | None = None,
    keep: SampleFunction | None = None,
    collate: Callable[[list[object]], object] | None = None,
    exclude: str | None = None,
    index_dir: str = "runs/.index",
    cache_dir: str | None = None,
    cache_size_gib: float = 100.0,
    **source_args: object,
) -> FileDataset:
    """Return the dataset of some files, as ``data.source`` of a job does; all ranks must call it.

    Args:
        source: Format of the files: a name, ``module:Class`` or ``file.py:Class``.
        files: Files, with braces and ``*``; relative paths begin at the current folder.
        decode: Function of a stored sample, which returns that of the task; None: one of the source.
        keep: Function of a stored sample, whether to use it; None: all are used.
        collate: Function of a list of samples, which returns a batch; None: arrays are stacked.
        exclude: File with the names of files and samples that are left out.
        index_dir: Folder of the indices of files.
        cache_dir: Cache of this host; None: a temporary folder of this user.
        cache_size_gib: Size above which the cache removes files.
        source_args: Arguments of the source.

    Raises:
        UserError: Files are missing or damaged, or a function has failed.
    """
    patterns = [files] if isinstance(files, str) else list(files)
    maker = IndexMaker(
        Description(
            source_of(source, source_args),
            [expanded(each) for each in patterns],
            {} if keep is None else {"keep": Function(keep)},
            {} if exclude is None else read_excluded(Path(expanded(exclude))),
        ),
        cache_of(cache_dir, cache_size_gib),
        Path(expanded(index_dir)),
        report=_Report(patterns[0]),
    )
    index = maker.index()
    made = maker.source.model_copy(update=index.summary.described)
    return FileDataset(
        index,
        made,
        maker.cache,
        decode=function_of(decode),
        collate=function_of(collate),
    )


def source_of(name: str, args: Mapping[str, object]) -> Source:
    """Return a source with its arguments.

    Raises:
        UserError: There is no such source, or the arguments do not fit it.
    """
    made: Source = SOURCES.make(
        name, lambda factory: factory.model_validate(args), args_field="data.source_args"
    )
    return made


def cache_of(folder: str | None, size_gib: float) -> Cache:
    """Return the cache in a folder; None: the default one."""
    return Cache(default_folder() if folder is None else Path(expanded(folder)), size_gib * 2**30)


def training_files(data: Data, run_dir: str) -> FileDataset | Concatenation | None:
    """Return the training data of a job; None: the task returns it.

    Args:
        data: The job's section.
        run_dir: Folder of all runs.

    Raises:
        UserError: Files are missing or damaged, or a function has failed.
    """
    if data.source is not None:
        return file_dataset(data, data, run_dir)
    if not data.mixture:
        return None
    parts = [file_dataset(part, data, run_dir) for part in data.mixture]
    return Concatenation(parts, [part.proportion for part in data.mixture])


def evaluation_files(data: Data, run_dir: str) -> FileDataset | None:
    """Return the evaluation data of a job; None: the task returns it, if there is any.

    Args:
        data: The job's section.
        run_dir: Folder of all runs.

    Raises:
        UserError: Files are missing or damaged, or a function has failed.
    """
    if data.eval is None:
        return None
    of = first_files(data)
    like = None if of.source is None else file_dataset(of, data, run_dir)
    return file_dataset(with_defaults(data.eval, of), data, run_dir, like=like, is_sampled=False)


def first_files(data: Data) -> Files:
    """Return the files of the training data, of a mixture the first part."""
    return data.mixture[0] if data.mixture else data


def with_defaults(files: Files, of: Files) -> Files:
    """Return the fields of the evaluation data, with those of the training data that it does not give."""
    update: dict[str, object] = {}
    if files.source is None:
        update["source"] = of.source
    if files.source in (None, of.source):
        update["source_args"] = {**of.source_args, **files.source_args}
        update["decode"] = files.decode or of.decode
    update["exclude"] = files.exclude or of.exclude
    return files.model_copy(update=update)


def file_dataset(
    files: Files,
    data: Data,
    run_dir: str,
    *,
    like: FileDataset | None = None,
    is_sampled: bool = True,
) -> FileDataset:
    """Return the dataset of some files, whose index is made if there is none.

    Args:
        files: The files.
        data: The job's section.
        run_dir: Folder of all runs.
        like: The training data, which determines such things as the names of classes; None: these files do.
        is_sampled: ``data.sampling`` applies to it.
    """
    maker = index_maker(files, data, run_dir, is_sampled=is_sampled)
    index = maker.index()
    described = (like.index if like is not None else index).summary.described
    source = maker.source if not described else maker.source.model_copy(update=described)
    return FileDataset(
        index,
        source,
        maker.cache,
        decode=function_of(files.decode),
        collate=function_of(data.collate),
        replacement=data.sampling is None or data.sampling.replacement,
    )


def index_maker(
    files: Files,
    data: Data,
    run_dir: str,
    *,
    is_sampled: bool = True,
    num_processes: int = 1,
    report: Report | None = None,
) -> IndexMaker:
    """Return the maker of an index of some files of a job; ``report`` None: it logs its progress."""
    assert files.source is not None
    sampling = data.sampling if is_sampled else None
    locations = {"keep": files.keep}
    if sampling is not None:
        locations |= {name: getattr(sampling, name) for name in FUNCTIONS if name != "keep"}
    functions = {name: Function(each) for name, each in locations.items() if each is not None}
    root = Path(run_dir) / ".index" if data.index_dir is None else Path(expanded(data.index_dir))
    excluded = {} if files.exclude is None else read_excluded(Path(expanded(files.exclude)))
    return IndexMaker(
        Description(
            source_of(files.source, files.source_args),
            [expanded(each) for each in files.files],
            functions,
            excluded,
        ),
        cache_of(data.cache.dir, data.cache.size_gib),
        root,
        num_processes=num_processes,
        report=report or _Report(files.files[0]),
    )


def expanded(path: str) -> str:
    """Replace ``~`` and environment variables, such as ``$SCRATCH``, in a path.

    Raises:
        UserError: A variable is not set on this rank.
    """
    found = os.path.expandvars(Path(path).expanduser() if path.startswith("~") else path)
    if missing := _VARIABLE.search(str(found)):
        raise UserError(
            f"{path}: the environment variable {missing[0]} is not set",
            hint="set it with launch.env, or write the path",
        )
    return str(found)


_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")


@dataclass
class _Report:
    """Logs how much of an index is made."""

    name: str
    _next_s: float = 0.0

    def __call__(self, done: int, total: int, num_samples: int) -> None:
        now_s = monotonic()
        if self._next_s and now_s < self._next_s and done < total:
            return
        is_first, self._next_s = not self._next_s, now_s + REPORT_INTERVAL_S
        if is_first:
            self._next_s = now_s + 1.0  # nothing is said about what takes less
            return
        log.warning("index of %s: %d of %d files, %d samples", self.name, done, total, num_samples)


def lines_of(excluded: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the lines of a file for ``data.exclude``, see ``read_excluded``."""
    of_files = ([f"{url}\t{number}" for number in numbers] or [url] for url, numbers in excluded.items())
    return [line for lines in of_files for line in lines]


def read_excluded(path: Path) -> dict[str, list[int]]:
    """Return what a file of ``data.exclude`` leaves out: files, and for each its samples; empty: all.

    A line has the name of a file, and, after a tab, the number of a sample. Relative names begin at the
    folder of ``path``. Comments begin with ``#``.

    Raises:
        UserError: The file cannot be read, or a line is not valid.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.exclude: {path}: {error}", hint="correct data.exclude") from error
    found: dict[str, list[int]] = {}
    whole = set()
    for number, line in enumerate(lines, 1):
        text = line.rstrip()
        if not text or text.startswith("#"):
            continue
        url, tab, sample = text.partition("\t")
        if tab and not sample.strip().isdecimal():
            raise UserError(
                f"data.exclude: {path}: line {number}: {sample!r} is not the number of a sample",
                hint="write FILE, or FILE, a tab, and a number",
            )
        if not is_remote(url):
            url = str(path.absolute().parent / url)
        found.setdefault(url, [])
        if tab:
            found[url].append(int(sample))
        else:
            whole.add(url)
    return {url: [] if url in whole else sorted(set(numbers)) for url, numbers in found.items()}
