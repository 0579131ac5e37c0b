"""Batches from a dataset, in the order and sizes that the shard rule says."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import select
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from horovod_train.config.schema import Data
from horovod_train.data.shard import MicroBatch
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.task import load_task_class

_SEED_MULTIPLIER = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads (seed, epoch, place)


@dataclass(frozen=True)
class _Fetch:
    """What a loader process is asked for: which samples, and the seed of their augmentation."""

    indices: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class _TaskModule:
    """Where the task came from; rebuilt in another process, it imports the task's module first."""

    location: str | None

    def __reduce__(self) -> tuple[Any, ...]:
        return _import_task, (self.location,)


def _import_task(location: str | None) -> _TaskModule:
    if location is not None:
        load_task_class(location)
    return _TaskModule(location)


class _SeededFetches:
    """The dataset as loader processes see it: a fetch in, samples out.

    Random augmentation is seeded by what is read, not by who reads it or how often the job was
    resumed, so an interrupted epoch goes on as if nothing had happened.
    """

    def __init__(self, task: _TaskModule, dataset: Any) -> None:
        self._task = task
        self._dataset = dataset
        self._many: Callable[[Sequence[int]], list[Any]] | None = getattr(dataset, "__getitems__", None)

    def __reduce__(self) -> tuple[Any, ...]:
        # Arguments are rebuilt in this order: the task's module is there before its classes are wanted.
        return _SeededFetches, (self._task, self._dataset)

    def __getitems__(self, fetch: _Fetch) -> list[Any]:
        in_this_process = torch.utils.data.get_worker_info() is None
        saved = (random.getstate(), np.random.get_state(), torch.get_rng_state()) if in_this_process else None
        random.seed(fetch.seed)
        np.random.seed(fetch.seed % 2**32)
        # Not torch.manual_seed: that would seed every GPU's generator, too.
        torch.default_generator.manual_seed(fetch.seed)
        try:
            if self._many is not None:
                return self._many(list(fetch.indices))
            return [self._dataset[index] for index in fetch.indices]
        finally:
            if saved is not None:
                random.setstate(saved[0])
                np.random.set_state(saved[1])
                torch.set_rng_state(saved[2])


def _leave_with(rank_pid: int, _worker_id: int) -> None:
    """In a loader process: end when the rank does, also when it is killed.

    Its parent is the server, which lives as long as its children do: they would keep each other, and
    the output of the rank, for ever.
    """

    def wait() -> None:
        try:
            handle = os.pidfd_open(rank_pid)
        except ProcessLookupError:
            os._exit(1)
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        poller.poll()
        os._exit(1)

    Thread(target=wait, daemon=True).start()


class _Schedule:
    """The fetches of one epoch; set anew before each, so that loader processes live on."""

    def __init__(self) -> None:
        self.fetches: Iterable[_Fetch] = ()

    def __iter__(self) -> Iterator[_Fetch]:
        return iter(self.fetches)


class TorchReader:
    """Reads a map-style dataset.

    Args:
        dataset: Anything with ``__len__`` and ``__getitem__``; ``__getitems__`` is used when it is
            there. A ``collate`` method, when it has one, joins samples into a batch.
        data: The job's ``data`` section.
        seed: Seed of augmentation.
        device: Where batches are wanted.
        task: Where the task came from, which loader processes have to import; None: nowhere.

    Raises:
        UserError: The dataset has no length or no samples, or cannot be sent to loader processes.
    """

    def __init__(
        self, dataset: Any, data: Data, seed: int, device: torch.device, task: str | None = None
    ) -> None:
        try:
            self._length = len(dataset)
        except TypeError as error:
            raise UserError(
                f"a dataset needs a length to be shared exactly: {type(dataset).__name__} has none",
                hint="give it __len__ and __getitem__",
            ) from error
        if self._length == 0:
            raise UserError("the dataset has no samples")
        self._seed = seed
        self._device = device
        self._schedule = _Schedule()
        workers = data.num_workers
        self._loader: DataLoader[Any] = DataLoader(
            _SeededFetches(_TaskModule(task), dataset),  # type: ignore[arg-type]
            batch_sampler=self._schedule,  # type: ignore[arg-type]
            collate_fn=getattr(dataset, "collate", default_collate),
            num_workers=workers,
            prefetch_factor=data.prefetch_batches if workers else None,
            persistent_workers=workers > 0,
            # Never fork a rank: Horovod's and MPI's threads may hold a lock at that moment, which the
            # child then waits for for ever. Seen about once in 50 starts.
            multiprocessing_context="forkserver" if workers else None,
            worker_init_fn=partial(_leave_with, os.getpid()) if workers else None,
            pin_memory=data.pin_memory and device.type == "cuda",
            # Seeds of loader processes must not be drawn from the generator that dropout uses.
            generator=torch.Generator(),
        )

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._length

    def read(self, epoch: int, order: Any, micro_batches: Iterable[MicroBatch]) -> Iterator[Any]:
        """Yield the collated batch of each micro-batch, on the replica's device."""
        self._schedule.fetches = (
            _Fetch(
                tuple(order[batch.start : batch.stop].tolist()),
                (self._seed * 1_000_003 + epoch * _SEED_MULTIPLIER + batch.start) % 2**63,
            )
            for batch in micro_batches
        )
        try:
            batches = iter(self._loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UserError(
                f"the dataset cannot be sent to loader processes: {error}",
                hint="define its class and functions at the top of a module, or set data.num_workers: 0",
            ) from error
        for batch in batches:
            yield to_device(batch, self._device)


def start_loader_server() -> None:
    """Start the process from which loader processes are forked; it imports what they need.

    Called before Horovod starts, so that the two start at the same time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["horovod_train.frameworks.torch.reader"])
    forkserver.ensure_running()


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with all its tensors on a device; lists, tuples and mappings are followed."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
