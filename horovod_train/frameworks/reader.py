"""Batches as NumPy arrays, in the order and sizes that the shard rule says.

PyTorch's reader uses the parts without NumPy in their names (fetches, seeds, loader processes), too.
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
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from multiprocessing import forkserver, resource_tracker
from threading import Thread
from typing import Any

import numpy as np

from horovod_train.config.schema import Data
from horovod_train.data.shard import MicroBatch, Order
from horovod_train.data.waiting import timed
from horovod_train.errors import UserError
from horovod_train.frameworks.base import Dataset
from horovod_train.frameworks.task import load_task_class
from horovod_train.system.signals import PREEMPTION_SIGNALS

MAX_TEMP_BYTES = 70
"""A socket's path may have 107 bytes, and Python adds the names of a folder and of a file to TMPDIR."""
_SEED_MULTIPLIER = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads (seed, epoch, place)


@dataclass(frozen=True)
class Fetch:
    """A request to a dataset: indices of samples, and the seed of their augmentation."""

    indices: tuple[int, ...]
    seed: int


def fetches(seed: int, epoch: int, order: Order, micro_batches: Iterable[MicroBatch]) -> Iterator[Fetch]:
    """Yield the fetch of each micro-batch.

    Random augmentation is seeded by what is read, not by who reads it or how often the job was
    resumed, so an interrupted epoch continues as if nothing had happened.
    """
    for batch in micro_batches:
        yield Fetch(
            tuple(order[batch.start : batch.stop].tolist()),
            (seed * 1_000_003 + epoch * _SEED_MULTIPLIER + batch.start) % 2**63,
        )


def checked_length(dataset: Dataset) -> int:
    """Return the number of samples.

    Raises:
        UserError: The dataset has no length or no samples.
    """
    try:
        length = len(dataset)
    except TypeError as error:
        raise UserError(
            f"a dataset needs a length to be shared exactly: {type(dataset).__name__} has none",
            hint="give it __len__ and __getitem__",
        ) from error
    if length == 0:
        raise UserError("the dataset has no samples")
    return length


@dataclass(frozen=True)
class TaskModule:
    """Where the task came from; rebuilt in another process, it imports the task's module first."""

    location: str | None

    def __reduce__(self) -> tuple[object, ...]:
        return _import_task, (self.location,)


def _import_task(location: str | None) -> TaskModule:
    if location is not None:
        load_task_class(location)
    return TaskModule(location)


def start_loader_server(preload: str) -> None:
    """Start the process from which loader processes are forked, unless it runs; it imports what they need.

    Readers call it. Jobs do before Horovod starts, so that the two start at the same time. A rank itself
    is never forked: Horovod's and MPI's threads may hold a lock at that moment, which the child then
    waits for for ever. Seen about once in 50 starts.

    Args:
        preload: Module that loader processes need.

    Raises:
        UserError: The folder for temporary files has too long a name for their sockets.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > MAX_TEMP_BYTES:
        raise UserError(
            f"TMPDIR has {len(os.fsencode(folder))} characters, and sockets of loader processes lie there, "
            f"which may have {MAX_TEMP_BYTES}: {folder}",
            hint="set TMPDIR to a shorter one, such as launch.env: {TMPDIR: /tmp}, or data.num_workers: 0",
        )
    multiprocessing.get_context("forkserver").set_forkserver_preload([preload])
    # Kubernetes and Slurm send SIGTERM to all processes; a rank needs its loaders to the end of its step.
    resource_tracker.ensure_running()  # first: when it starts, it unblocks SIGTERM in this thread
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTION_SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_with(rank_pid: int) -> None:
    """In a loader process: end when the rank does, also when it is killed, or when it says so.

    Its parent is the server, which lives as long as its children do: they would keep each other, and
    the output of the rank, for ever. SIGTERM is blocked here, see ``start_loader_server``; a rank that
    ends sends it to the loaders it still has, and waits for them.
    """

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
    """Reads a map-style dataset into NumPy arrays.

    Args:
        dataset: Anything with ``__len__`` and ``__getitem__``; ``__getitems__`` is used when it is
            there. A ``collate`` method, when it has one, joins samples into a batch.
        data: The job's ``data`` section.
        seed: Seed of augmentation: of Python's and NumPy's generators.
        task: Where the task came from, which loader processes have to import; None: nowhere.

    Raises:
        UserError: The dataset has no length or no samples, or cannot be sent to loader processes.
    """

    def __init__(self, dataset: Dataset, data: Data, seed: int, task: str | None = None) -> None:
        self._length = checked_length(dataset)
        self._dataset = dataset
        self._data = data
        self._seed = seed
        self._pool = self._make_pool(task) if data.num_workers else None

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._length

    def read(self, epoch: int, order: Order, micro_batches: Iterable[MicroBatch]) -> Iterator[object]:
        """Yield the collated batch of each micro-batch."""
        return timed(self._read(epoch, order, micro_batches))

    def _read(self, epoch: int, order: Order, micro_batches: Iterable[MicroBatch]) -> Iterator[object]:
        wanted = fetches(self._seed, epoch, order, micro_batches)
        if self._pool is None:
            for fetch in wanted:
                with own_seeds(fetch.seed):  # not while the step that is yielded to runs
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
        """Return a batch of the first sample alone: enough to build a model with."""
        with own_seeds(self._seed):
            return read_batch(self._dataset, Fetch((0,), self._seed))

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
            # In this order: the task's module is there before its classes are wanted.
            initargs=(os.getpid(), TaskModule(task), self._dataset),
        )


_dataset_of_loader: Dataset | None = None


def _open_loader(rank_pid: int, _task: TaskModule, dataset: Dataset) -> None:
    global _dataset_of_loader  # noqa: PLW0603  (a process of the pool has no other place for it)
    leave_with(rank_pid)
    _dataset_of_loader = dataset


def _read_in_loader(fetch: Fetch) -> object:
    assert _dataset_of_loader is not None
    random.seed(fetch.seed)
    np.random.seed(fetch.seed % 2**32)
    return read_batch(_dataset_of_loader, fetch)


def read_batch(dataset: Dataset, fetch: Fetch) -> Any:
    """Return the samples of a fetch, joined into a batch."""
    many: Callable[[Sequence[int]], list[object]] | None = getattr(dataset, "__getitems__", None)
    indices = list(fetch.indices)
    samples = many(indices) if many is not None else [dataset[index] for index in indices]
    collate: Callable[[list[object]], object] = getattr(dataset, "collate", stack_samples)
    return collate(samples)


def stack_samples(samples: Sequence[Any]) -> Any:
    """Join samples: each number or array gets a first dimension; tuples, lists and mappings are kept."""
    first = samples[0]
    if isinstance(first, dict):
        return {key: stack_samples([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple | list):
        joined = [stack_samples(column) for column in zip(*samples, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    return np.stack([np.asarray(sample) for sample in samples])


@contextmanager
def own_seeds(seed: int) -> Iterator[None]:
    """Let Python's and NumPy's generators start from a seed, and continue as before afterwards."""
    saved = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])


def batch_length(batch: Any) -> int:
    """Return the number of samples of a batch that no sampler knows: the length of the first array in it.

    Mappings, sequences and data classes are followed; a list without arrays is as long as it is.

    Raises:
        UserError: No array in it.

    >>> batch_length({"id": ["a", "b", "c"], "x": np.zeros((3, 2))}), batch_length([None, {"x": np.zeros(2)}])
    (3, 2)
    """
    length = _length_of_array(batch)
    if length is None and isinstance(batch, list | tuple):
        length = len(batch)
    if length is None:
        raise UserError(
            f"the number of samples of a batch is not known: a {type(batch).__name__} without arrays",
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
