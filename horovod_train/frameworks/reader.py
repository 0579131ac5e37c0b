"""Batches as NumPy arrays, in the order and sizes of the shard rule.

    sample_seeds                seed of each sample
    rng_state, load_rng_state   state of the generators of Python and NumPy and of a framework
    fetches, Fetch              the requests to a dataset, one for each micro-batch
    start_loader_server         fork server of loader processes
    NumpyReader                 reader of a map-style dataset into NumPy arrays
    Shards                      this rank's batches of arrays that every rank stores completely, for users'
                                own training loops

PyTorch's reader uses fetches, seeds and loader processes of this module, too.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import select
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, is_dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import numpy.typing as npt

from horovod_train.checkpoint.arrays import ArrayBlob, pack_tree, unpack_tree
from horovod_train.collectives.base import Communicator
from horovod_train.config.data import Data
from horovod_train.data.order import GOLDEN, hashes
from horovod_train.data.shard import MicroBatch, Order, StepsOfEpoch, epoch_order, num_steps, timed
from horovod_train.errors import UserError
from horovod_train.frameworks.base import Dataset, load_task_class
from horovod_train.frameworks.plain_data import from_blob, to_blob
from horovod_train.health.comparisons import check_same_data
from horovod_train.horovod.mpi import number_of
from horovod_train.system.processes import PREEMPTION_SIGNALS
from horovod_train.system.stacks import dump_on_signal


def mix(seed: int, rank: int, epoch: int) -> int:
    """Return a 64-bit seed: a hash of the three numbers."""
    return int(np.random.SeedSequence([seed, rank, epoch]).generate_state(1, np.uint64)[0])


def sample_seeds(seed: int, epoch: int, numbers: Iterable[int]) -> npt.NDArray[np.uint64]:
    """Return a 64-bit seed for each sample: a hash of seed, epoch and its number, shape [samples]."""
    return hashes(np.fromiter(numbers, np.uint64), mix(seed, 0, epoch))


def rng_state(own: Mapping[str, object]) -> tuple[object, dict[str, ArrayBlob]]:
    """Return the state of Python's, NumPy's and the framework's generators (``own``: data and arrays)."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), position, has_gauss, gauss),
        "own": dict(own),
    }
    plain, arrays = pack_tree(state, lambda leaf: isinstance(leaf, np.ndarray))
    return plain, {key: to_blob(array) for key, array in arrays.items()}


def load_rng_state(tree: object, arrays: Mapping[str, ArrayBlob]) -> dict[str, Any]:
    """Load the state of Python's and NumPy's generators; return that of the framework's generators."""
    state = unpack_tree(tree, {key: from_blob(blob) for key, blob in arrays.items()})
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    own: dict[str, Any] = state["own"]
    return own


MAX_TEMP_BYTES = 70
"""The path of a socket may have 107 bytes, and Python appends the names of a folder and a file to TMPDIR."""


@dataclass(frozen=True)
class Fetch:
    """Request to a dataset.

    Attributes:
        indices: Indices of samples.
        seed: Seed of their augmentation.
        seeds: Seed of each sample's augmentation; empty: ``seed`` is that of all samples.
    """

    indices: tuple[int, ...]
    seed: int
    seeds: tuple[int, ...] = ()

    def parts(self) -> Iterator[Fetch]:
        """Yield a fetch for each sample that has its own seed, or this fetch."""
        if not self.seeds:
            yield self
        for index, seed in zip(self.indices, self.seeds, strict=bool(self.seeds)):
            yield Fetch((index,), seed)


def fetches(
    seed: int, epoch: int, order: Order, micro_batches: Iterable[MicroBatch], *, by_sample: bool = False
) -> Iterator[Fetch]:
    """Yield the fetch of each micro-batch; ``by_sample``: with a seed for each sample.

    The seed of random augmentation depends on the epoch and on the position of the samples, not on the rank
    or on the number of resumes. An interrupted epoch therefore continues with the same augmentation. A sample
    that an epoch has twice is seeded by its position.
    """
    for batch in micro_batches:
        indices = order[batch.start : batch.stop].tolist()
        numbers = range(batch.start, batch.stop) if getattr(order, "repeats", False) else indices
        seeds = sample_seeds(seed, epoch, numbers).tolist() if by_sample else []
        yield Fetch(
            tuple(indices),
            (seed * 1_000_003 + epoch * GOLDEN + batch.start) % 2**63,
            tuple(each % 2**63 for each in seeds),
        )


class Requests:
    """The fetches that a reader requests, in order.

    Files are copied before they are needed, if the dataset has such files.

    Args:
        dataset: The dataset.
        fetches: The fetches.
        order: Order of the epoch.
        micro_batches: The micro-batches of the fetches.
    """

    def __init__(
        self, dataset: Any, fetches: Iterable[Fetch], order: Order, micro_batches: Iterable[MicroBatch]
    ) -> None:
        self._dataset, self._fetches = dataset, fetches
        self._order, self._micro_batches = order, micro_batches
        self._pending: deque[Fetch] = deque()

    def __iter__(self) -> Iterator[Fetch]:
        prefetcher = None
        # An iterator can be read only once.
        if hasattr(self._dataset, "prefetcher") and not isinstance(self._micro_batches, Iterator):
            upcoming = (self._order[each.start : each.stop] for each in self._micro_batches)
            prefetcher = self._dataset.prefetcher(upcoming)
        try:
            for fetch in self._fetches:
                if prefetcher is not None:
                    prefetcher.advance()
                self._pending.append(fetch)
                yield fetch
        finally:
            if prefetcher is not None:
                prefetcher.close()

    def timed(self, batches: Iterator[object]) -> Iterator[object]:
        """Yield the batches of the fetches, and record each wait in ``WAITING``."""
        for batch in timed(batches, self._waiting_for):
            self._pending.popleft()
            yield batch

    def _waiting_for(self) -> str:
        if not self._pending or not hasattr(self._dataset, "waiting_for"):
            return ""
        found: str = self._dataset.waiting_for(np.array(self._pending[0].indices, np.int64))
        return found


def checked_length(dataset: Dataset) -> int:
    """Return the number of samples of a dataset.

    Raises:
        UserError: It has no length, no samples, or no access to samples by their number.
    """
    try:
        length = len(dataset)
    except TypeError as error:
        raise UserError(
            f"a {type(dataset).__name__} has no __len__, which is required to split the samples over ranks",
            hint="give it __len__ and __getitem__",
        ) from error
    if length == 0:
        raise UserError("the dataset has no samples")
    # Iterable datasets of PyTorch inherit a method that raises NotImplementedError.
    method = getattr(type(dataset), "__getitem__", None)
    name = f"{getattr(method, '__module__', '')}.{getattr(method, '__qualname__', '')}"
    is_abstract = name == "torch.utils.data.dataset.Dataset.__getitem__"
    if (method is None or is_abstract) and not hasattr(dataset, "__getitems__"):
        raise UserError(
            f"a {type(dataset).__name__} has no __getitem__: samples that can only be iterated over cannot "
            "be split over ranks so that each is read once",
            hint="give it __getitem__(index), for example by reading an index of the files first",
        )
    return length


@dataclass(frozen=True)
class TaskModule:
    """Location of the task; unpickling it in another process imports the task's module."""

    location: str | None

    def __reduce__(self) -> tuple[object, ...]:
        return _import_task, (self.location,)


def _import_task(location: str | None) -> TaskModule:
    if location is not None:
        load_task_class(location)
    return TaskModule(location)


def start_loader_server(preload: str) -> None:
    """Start the fork server of loader processes, unless it runs; it imports the module ``preload`` for them.

    Readers call this function. Jobs also call it before Horovod starts, so that both start concurrently.
    Ranks are never forked: if a thread of Horovod or MPI holds a lock during the fork, the child may deadlock
    on it. This was observed about once in 50 starts.

    Raises:
        UserError: The path of the folder for temporary files is too long for sockets.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > MAX_TEMP_BYTES:
        raise UserError(
            f"TMPDIR has {len(os.fsencode(folder))} bytes, and at most {MAX_TEMP_BYTES} are "
            f"allowed, because loader processes create sockets in it: {folder}",
            hint="set TMPDIR to a shorter one, such as launch.env: {TMPDIR: /tmp}, or data.num_workers: 0",
        )
    multiprocessing.get_context("forkserver").set_forkserver_preload([preload])
    # Kubernetes and Slurm send SIGTERM to all processes; a rank needs its loaders until its step ends.
    resource_tracker.ensure_running()  # before blocking: its start unblocks SIGTERM in this thread
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTION_SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def exit_with_rank(rank_pid: int) -> None:
    """Start threads that exit this loader process when its rank ends or sends SIGTERM.

    The parent of a loader is the fork server, which runs as long as its children: without these threads, both
    would never exit, and would keep the rank's output open. A rank that exits sends SIGTERM to its loaders
    and waits for them. SIGTERM from other processes is ignored; it is blocked, see ``start_loader_server``.
    """
    folder = os.environ.get("HOROVOD_TRAIN_RUN")
    if folder is not None:
        dump_on_signal(Path(folder), number_of(os.environ, "rank", alone=0))

    def listen() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank_pid:
            pass
        os._exit(1)

    def wait() -> None:
        try:
            handle = os.pidfd_open(rank_pid)
        except ProcessLookupError:
            os._exit(1)
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        poller.poll()
        os._exit(1)

    for look in (listen, wait):
        Thread(target=look, daemon=True).start()


class NumpyReader:
    """Reader of a map-style dataset into NumPy arrays.

    Args:
        dataset: The dataset; see ``Dataset`` for optional methods.
        data: The job's ``data`` section.
        seed: Seed of augmentation, for Python's and NumPy's generators.
        task: Location of the task, which loader processes import; None: they import no task.
        by_sample: Seed augmentation for each sample, as with ``data.augmentation: sample``.

    Raises:
        UserError: The dataset has no length or no samples, or cannot be sent to loader processes.
    """

    def __init__(
        self, dataset: Dataset, data: Data, seed: int, task: str | None = None, *, by_sample: bool = False
    ) -> None:
        self._by_sample = by_sample or data.augmentation == "sample"
        self._length = checked_length(dataset)
        self._dataset = dataset
        self._data = data
        self._seed = seed
        self._pool = self._make_pool(task) if data.num_workers else None

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._length

    @property
    def dataset(self) -> Dataset:
        """The dataset of this process; loader processes have copies."""
        return self._dataset

    def read(self, epoch: int, order: Order, micro_batches: Iterable[MicroBatch]) -> Iterator[object]:
        """Yield the collated batch of each micro-batch."""
        wanted = fetches(self._seed, epoch, order, micro_batches, by_sample=self._by_sample)
        requests = Requests(self._dataset, wanted, order, micro_batches)
        return requests.timed(self._read(requests))

    def _read(self, wanted: Iterable[Fetch]) -> Iterator[object]:
        if self._pool is None:
            for fetch in wanted:
                with seeded_generators(fetch.seed):  # restored before the step runs
                    batch = read_batch(self._dataset, fetch)
                yield batch
            return
        waiting: deque[Future[object]] = deque()
        for fetch in wanted:
            waiting.append(self._pool.submit(_read_in_loader, fetch))
            if len(waiting) > self._data.num_workers * self._data.prefetch_batches:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def first(self) -> Any:
        """Return a batch with only the first sample, for building a model."""
        with seeded_generators(self._seed):
            return read_batch(self._dataset, Fetch((0,), self._seed))

    def batches_of(self, numbers: Sequence[int], parts: Sequence[slice]) -> list[object]:
        """Return a batch of each part of some samples, which are read once."""
        with seeded_generators(self._seed):
            samples = read_samples(self._dataset, numbers)
            return [collate_of(self._dataset)(samples[part]) for part in parts]

    def _make_pool(self, task: str | None) -> ProcessPoolExecutor:
        try:
            pickle.dumps(self._dataset)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UserError(
                f"the dataset cannot be sent to loader processes: {error}",
                hint="define its class and functions at the top of a module, or set data.num_workers: 0",
            ) from error
        start_loader_server(__name__)
        return ProcessPoolExecutor(
            self._data.num_workers,
            mp_context=multiprocessing.get_context("forkserver"),
            initializer=_open_loader,
            # The task's module must be imported before the dataset, which uses its classes, is unpickled.
            initargs=(os.getpid(), TaskModule(task), self._dataset),
        )


_dataset_of_loader: Dataset | None = None


def _open_loader(rank_pid: int, _task: TaskModule, dataset: Dataset) -> None:
    global _dataset_of_loader  # noqa: PLW0603  (a process of a pool has no other storage)
    exit_with_rank(rank_pid)
    _dataset_of_loader = dataset


def _read_in_loader(fetch: Fetch) -> object:
    assert _dataset_of_loader is not None
    return read_batch(_dataset_of_loader, fetch)


def read_batch(dataset: Dataset, fetch: Fetch) -> Any:
    """Read the samples of a fetch, and join them into a batch."""
    samples: list[object] = []
    for part in fetch.parts():
        seed_numpy(part.seed)
        samples += read_samples(dataset, part.indices)
    with refusing_draws() if fetch.seeds else nullcontext():
        return collate_of(dataset)(samples)


def collate_of(dataset: Dataset) -> Callable[[list[object]], object]:
    """Return the function that joins samples of a dataset into a batch."""
    collate: Callable[[list[object]], object] = getattr(dataset, "collate", stack_samples)
    return collate


@contextmanager
def refusing_draws() -> Iterator[None]:
    """Return a context of ``collate``, which may not draw from the generators of Python and NumPy.

    Raises:
        UserError: It has drawn.
    """

    def states() -> tuple[object, ...]:
        _, keys, position, *_ = np.random.get_state(legacy=True)
        return random.getstate(), np.asarray(keys).tobytes(), position

    before = states()
    yield
    if states() != before:
        raise draws_in_collate()


def draws_in_collate() -> UserError:
    """Return the error of a ``collate`` that draws random numbers."""
    return UserError(
        "collate draws random numbers, which depend on the micro-batch: they cannot be those of a sample",
        hint="draw them in __getitem__ or in the loss, or set data.augmentation: batch and "
        "train.randomness: rank",
    )


def read_samples(dataset: Dataset, indices: Sequence[int]) -> list[object]:
    """Return samples of a dataset."""
    many: Callable[[Sequence[int]], list[object]] | None = getattr(dataset, "__getitems__", None)
    return many(list(indices)) if many is not None else [dataset[index] for index in indices]


def seed_numpy(seed: int) -> None:
    """Seed the generators of Python and NumPy."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def stack_samples(samples: Sequence[Any]) -> Any:
    """Stack numbers and arrays of samples along a first dimension, within tuples, lists and mappings."""
    first = samples[0]
    if isinstance(first, dict):
        return {key: stack_samples([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple | list):
        joined = [stack_samples(column) for column in zip(*samples, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    if isinstance(first, bytes):  # NumPy would remove zeros from their ends
        return list(samples)
    return np.stack([np.asarray(sample) for sample in samples])


@contextmanager
def seeded_generators(seed: int) -> Iterator[None]:
    """Return a context that seeds Python's and NumPy's generators, and restores their state at its end."""
    saved = random.getstate(), np.random.get_state()
    seed_numpy(seed)
    try:
        yield
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])


def batch_length(batch: Any) -> int:
    """Return the number of samples of a batch: the length of the first array that it contains.

    Mappings, sequences and data classes are searched. For a list or tuple without arrays, return its length.

    Raises:
        UserError: The batch contains no array, and is not a list or tuple.

    >>> batch_length({"id": ["a", "b", "c"], "x": np.zeros((3, 2))}), batch_length([None, {"x": np.zeros(2)}])
    (3, 2)
    """
    length = _length_of_array(batch)
    if length is None and isinstance(batch, list | tuple):
        length = len(batch)
    if length is None:
        raise UserError(
            f"the number of samples of a batch cannot be determined: it is a {type(batch).__name__} "
            "without arrays",
            hint="let collate return tensors or arrays whose first dimension is the batch",
        )
    return length


def _length_of_array(value: Any) -> int | None:
    if isinstance(value, str | bytes | type(None)):
        return None
    if hasattr(value, "shape"):
        return int(value.shape[0]) if len(value.shape) else None
    children: Iterable[Any] = ()
    if isinstance(value, Mapping):
        children = value.values()
    elif isinstance(value, list | tuple):
        children = value
    elif is_dataclass(value):
        children = vars(value).values()
    lengths = (_length_of_array(child) for child in children)
    return next((length for length in lengths if length is not None), None)


class Shards:
    """Batches of arrays, split over ranks; each sample is read once per epoch.

    All ranks perform the same number of steps. In the last step of an epoch, ranks may have fewer samples, or
    none: weights then correct the mean over ranks to the mean over samples.

    Args:
        world: The communicator.
        arrays: Arrays with one row per sample, equal on all ranks.
        batch_size: Samples per rank and step.
        shuffle: Use a new order in each epoch; False: the order of the arrays.
        seed: Seed of the order.

    Raises:
        UserError: Arrays have different lengths, or no rows.
    """

    def __init__(
        self, world: Communicator, *arrays: Any, batch_size: int, shuffle: bool = True, seed: int = 0
    ) -> None:
        lengths = {len(array) for array in arrays}
        if len(lengths) != 1 or 0 in lengths:
            raise UserError(
                f"arrays have {sorted(lengths) or 'no'} rows", hint="give arrays of one length, at least 1"
            )
        (self.num_samples,) = lengths
        self._arrays = arrays
        self._world = world
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._is_checked = False
        self._order: tuple[int, Order] | None = None  # of the epoch that was read last

    def __len__(self) -> int:
        """Return the number of steps in an epoch, equal on all ranks."""
        return num_steps(self.num_samples, 0, self._batch_size * self._world.size)

    def epoch(self, number: int) -> Iterator[tuple[float, tuple[Any, ...]]]:
        """Yield this rank's (weight, batch) for each step of epoch ``number``; the first epoch is 0.

        Multiply the mean loss of the batch by the weight: the mean over ranks is then the mean over all
        samples of the step. The weight is 1 in full steps. A rank without samples receives one sample with
        weight 0.
        """
        for index in range(len(self)):
            yield self.batch(number, index)

    def batch(self, number: int, index: int) -> tuple[float, tuple[Any, ...]]:
        """Return weight and batch of one step of an epoch, as ``epoch`` yields them.

        All ranks must make the first call, in which they compare their arrays.

        Raises:
            UserError: Arrays differ between ranks.
        """
        if self._order is None or self._order[0] != number:
            self._order = number, epoch_order(self.num_samples, self._seed, number, shuffle=self._shuffle)
        if not self._is_checked:
            self._is_checked = True
            check_same_data(
                self._world,
                "the arrays",
                self.num_samples,
                lambda numbers: [np.asarray(array)[numbers] for array in self._arrays],
            )
        order = self._order[1]
        step = StepsOfEpoch(
            num_samples=self.num_samples,
            cursor=0,
            batch_size_per_rank=self._batch_size,
            accumulation_steps=1,
            rank=self._world.rank,
            size=self._world.size,
        )[index]
        weight, rows = 0.0, order[:1]
        if step.micro_batches:
            (mine,) = step.micro_batches
            weight, rows = mine.share * self._world.size, order[mine.start : mine.stop]
        return weight, tuple(np.asarray(array)[rows] for array in self._arrays)
