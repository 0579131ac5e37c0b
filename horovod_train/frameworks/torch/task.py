"""The interface of a user's task for PyTorch, and batches from its datasets.

TorchTask     the interface of a task
checked_loss  the loss of a task, if its gradient can be computed
TorchReader   reader of batches from a dataset, in the order and sizes that ``data/shard.py`` defines
Placement     device and memory format of batches
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, default_collate

from horovod_train.config.data import Data
from horovod_train.data.shard import MicroBatch, Order
from horovod_train.errors import UserError
from horovod_train.frameworks.base import Dataset, check_is_one_number
from horovod_train.frameworks.reader import (
    Fetch,
    Requests,
    TaskModule,
    checked_length,
    draws_in_collate,
    exit_with_rank,
    fetches,
    read_samples,
    refusing_draws,
    seed_numpy,
    seeded_generators,
    start_loader_server,
)

REQUIRED = ("model", "loss")
OPTIONAL = ("train_data", "eval_data", "metrics", "param_groups", "after_update", "pipeline_parts")


class TorchTask(Protocol):
    """The required methods of a task.

    A task is a class with these methods. The optional ones are not in the protocol.

        class MyTask:
            def model(self): ...                  a torch.nn.Module
            def train_data(self): ...             a dataset with __len__ and __getitem__
            def loss(self, model, batch): ...     mean loss over the samples, or a sum and a count
            def eval_data(self): ...              optional: data for evaluation
            def metrics(self, model, batch): ...  optional: {name: one value per sample}
            def param_groups(self, model): ...    optional: optimizer groups, each may have an lr_scale
            def after_update(self, model): ...    optional: changes weights after each update
            def pipeline_parts(self, model): ...  optional: modules that form the model, for pipelines
    """

    def model(self) -> torch.nn.Module:
        """Return a new model, on the CPU."""
        ...

    def train_data(self) -> Any:
        """Return the training samples."""
        ...

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the mean loss over a batch, shape []; a tuple of a sum and a count is also supported."""
        ...


def is_sum_and_count(value: object) -> bool:
    """Return whether a loss or metric is a sum and its divisor, such as a number of tokens."""
    return isinstance(value, tuple) and len(value) == 2 and not hasattr(value, "_fields")


def check_count(count: object) -> None:
    """Check the count of a loss that is a sum and a count.

    Raises:
        UserError: The count is not a number, or depends on weights.
    """
    is_number = isinstance(count, bool | int | float) or getattr(count, "shape", None) in ((), (1,))
    if not is_number:
        raise UserError(
            f"the task's loss is a tuple of a loss and a {type(count).__name__}",
            hint="return the mean loss alone, or the sum of losses and the number to divide it by",
        )
    if getattr(count, "requires_grad", False):
        raise UserError(
            "the task's loss is a sum and a count, and the count depends on weights: gradients would not be "
            "those of the quotient",
            hint="detach the count, or return the mean",
        )


def as_numbers(value: Any) -> Any:
    """Return a metric's value as an array on the CPU, or a sum and a count as two numbers."""
    if is_sum_and_count(value):
        return tuple(float(torch.as_tensor(each)) for each in value)
    return torch.as_tensor(value).double().cpu().numpy()


def checked_loss(loss: object) -> torch.Tensor:
    """Return a loss, shape [], if its gradient can be computed.

    Raises:
        UserError: The loss is not a tensor, has several elements, is complex, is detached, or is split over
            ranks.
    """
    if not isinstance(loss, torch.Tensor):
        raise UserError(
            f"the task's loss is a {type(loss).__name__}, not a tensor",
            hint="return the mean loss over the batch, without .item() or float()",
        )
    check_is_one_number(loss.shape)
    if hasattr(loss, "device_mesh"):  # a DTensor
        raise UserError(
            "the task's loss uses weights outside of the model's forward pass, and a rank has only a part of "
            "them",
            hint="let the model's forward return what depends on weights (a penalty, for example), use the "
            "optimizer's weight_decay, or strategy: allreduce or zero",
        )
    if loss.is_complex():
        raise UserError("the task's loss is a complex number", hint="return a real one, such as loss.abs()")
    if not loss.requires_grad:
        raise UserError(
            "the task's loss does not depend on anything that is trained",
            hint="was it detached (detach(), item(), torch.no_grad()), or are all the layers that it uses "
            "frozen?",
        )
    return loss.reshape(())


class _SeededFetches:
    """Dataset of the loader processes, which returns the samples of a fetch."""

    def __init__(self, task: TaskModule, dataset: Dataset) -> None:
        self._task = task
        self._dataset = dataset

    def __reduce__(self) -> tuple[object, ...]:
        # Unpickled in this order: the task's module is imported before its classes are needed.
        return _SeededFetches, (self._task, self._dataset)

    def __getitems__(self, fetch: Fetch) -> list[object]:
        in_loader = torch.utils.data.get_worker_info() is not None
        saved = None if in_loader else torch.get_rng_state()
        # Not torch.manual_seed, which also seeds the generators of all GPUs.
        torch.default_generator.manual_seed(fetch.seed)
        samples: list[object] = []
        with seeded_generators(fetch.seed):
            try:
                for part in fetch.parts():
                    if fetch.seeds:
                        torch.default_generator.manual_seed(part.seed)
                        seed_numpy(part.seed)
                    samples += read_samples(self._dataset, part.indices)
            finally:
                if saved is not None:
                    torch.set_rng_state(saved)
        return samples


def _leave_with(rank_pid: int, _worker_id: int) -> None:
    exit_with_rank(rank_pid)


class _CheckedCollate:
    """A ``collate`` that may not draw random numbers, because they would depend on the micro-batch."""

    def __init__(self, collate: Callable[[list[object]], object]) -> None:
        self._collate = collate

    def __call__(self, samples: list[object]) -> object:
        before = torch.get_rng_state()
        with refusing_draws():
            batch = self._collate(samples)
        if not torch.equal(before, torch.get_rng_state()):
            raise draws_in_collate()
        return batch


class _Schedule:
    """The fetches of one epoch; set before each epoch, so that loader processes are reused."""

    def __init__(self) -> None:
        self.fetches: Iterable[Fetch] = ()

    def __iter__(self) -> Iterator[Fetch]:
        return iter(self.fetches)


class TorchReader:
    """Reader of a map-style dataset.

    Args:
        dataset: Has ``__len__`` and ``__getitem__``; ``__getitems__`` and ``collate`` are used if defined.
        data: The job's ``data`` section.
        seed: Seed of augmentation.
        placed: Device and memory format of batches.
        task: Location of the task, whose module loader processes import; None: they import none.
        collate: Joins samples into a batch, if the dataset has no ``collate``.
        by_sample: Seed augmentation for each sample, as with ``data.augmentation: sample``.

    Attributes:
        dataset: The dataset of this process; loader processes have copies.

    Raises:
        UserError: The dataset has no length or no samples, or cannot be sent to loader processes.
    """

    def __init__(
        self,
        dataset: Dataset,
        data: Data,
        seed: int,
        placed: Placement,
        task: str | None = None,
        collate: Callable[[list[object]], object] = default_collate,
        *,
        by_sample: bool = False,
    ) -> None:
        by_sample = self._by_sample = by_sample or data.augmentation == "sample"
        self._length = checked_length(dataset)
        self.dataset = dataset
        self._seed = seed
        self._placed = placed
        self._schedule = _Schedule()
        self._pins = data.pin_memory and placed.device.type == "cuda"
        workers = data.num_workers
        if workers:
            start_loader_server(__name__)
        self._loader: DataLoader[Any] = DataLoader(
            _SeededFetches(TaskModule(task), dataset),  # type: ignore[arg-type]
            batch_sampler=self._schedule,  # type: ignore[arg-type]
            collate_fn=_CheckedCollate(getattr(dataset, "collate", collate))
            if by_sample
            else getattr(dataset, "collate", collate),
            num_workers=workers,
            prefetch_factor=data.prefetch_batches if workers else None,
            persistent_workers=workers > 0,
            # Never fork a rank: see start_loader_server.
            multiprocessing_context="forkserver" if workers else None,
            worker_init_fn=partial(_leave_with, os.getpid()) if workers else None,
            # Without loader processes, ``Placement.put`` pins batches: it excludes tensors on a GPU.
            pin_memory=self._pins and workers > 0,
            # Seeds of loader processes must not be drawn from the generator that dropout uses.
            generator=torch.Generator(),
        )

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._length

    def first(self, num_samples: int = 1) -> object:
        """Return a batch of the first samples, at most ``num_samples``, on the replica's device."""
        return self.batches_of(range(min(num_samples, len(self))), [slice(None)])[0]

    def batches_of(self, numbers: Sequence[int], parts: Sequence[slice]) -> list[object]:
        """Return a batch of each part of some samples, which are read once, on the replica's device."""
        samples = self._loader.dataset.__getitems__(Fetch(tuple(numbers), self._seed))  # type: ignore[attr-defined]
        return [self._placed.put(self._loader.collate_fn(samples[part])) for part in parts]

    def read(self, epoch: int, order: Order, micro_batches: Iterable[MicroBatch]) -> Iterator[object]:
        """Yield the collated batch of each micro-batch, on the replica's device."""
        wanted = fetches(self._seed, epoch, order, micro_batches, by_sample=self._by_sample)
        requests = Requests(self.dataset, wanted, order, micro_batches)
        return requests.timed(self._read(requests))

    def _read(self, wanted: Iterable[Fetch]) -> Iterator[object]:
        self._schedule.fetches = wanted
        try:
            batches = iter(self._loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UserError(
                f"the dataset cannot be sent to loader processes: {error}",
                hint="define its class and functions at the top of a module, or set data.num_workers: 0",
            ) from error
        pins = self._pins and not self._loader.num_workers
        for batch in self._arriving(batches):
            yield self._placed.put(batch, pin=pins)

    def _arriving(self, batches: Iterator[object]) -> Iterator[object]:
        try:
            yield from batches
        except RuntimeError as error:
            if "pin" in str(error) and "cuda" in str(error).lower():
                raise UserError(
                    "loader processes give out data that is on a GPU already, which cannot be pinned",
                    hint="set data.pin_memory: false, or data.num_workers: 0",
                ) from error
            raise


@dataclass(frozen=True)
class Placement:
    """Device of the tensors of a batch, and memory format of those with four dimensions (images)."""

    device: torch.device
    memory_format: torch.memory_format = torch.preserve_format

    def put(self, batch: Any, *, pin: bool = False) -> Any:
        """Return a batch with all its tensors on the device.

        Lists, tuples, mappings and data classes are converted recursively. The method ``to`` of other
        objects is called, if they have one; all other values are returned unchanged.

        Args:
            batch: The collated batch.
            pin: Copy CPU tensors from page-locked memory, so that the copy is asynchronous.
        """
        if isinstance(batch, torch.Tensor):
            source = batch.pin_memory() if pin and batch.device.type == "cpu" else batch
            wanted = self.memory_format if batch.dim() == 4 else torch.preserve_format
            return source.to(self.device, non_blocking=True, memory_format=wanted)
        moves_itself = not isinstance(batch, dict | list | tuple | type)
        if moves_itself and callable(move := getattr(batch, "to", None)):
            return move(self.device)
        return _mapped(batch, partial(self.put, pin=pin))


def _same_class(batch: Any) -> Any:
    """Return a copy of a mapping, which may be a dict whose ``__getattr__`` is its ``__getitem__``."""
    try:
        return copy(batch)
    except (AttributeError, KeyError, TypeError):
        made = dict.__new__(type(batch))
        vars(made).update(vars(batch))
        return made


def _mapped(batch: Any, put: Callable[[Any], Any]) -> Any:
    """Return a container with ``put`` applied to each member; other objects are returned unchanged."""
    if type(batch) is dict:
        return {key: put(value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        members = map(put, batch)
        return type(batch)(*members) if hasattr(batch, "_fields") else type(batch)(members)
    if isinstance(batch, list):
        same = copy(batch)  # retains its class and attributes
        same[:] = map(put, batch)
        return same
    if isinstance(batch, MutableMapping):  # such as a UserDict, or a class derived from dict
        moved = _same_class(batch)
        moved.update({key: put(value) for key, value in batch.items()})
        return moved
    if is_dataclass(batch) and not isinstance(batch, type):
        other: Any = copy(batch)
        for field in fields(batch):
            object.__setattr__(other, field.name, put(getattr(batch, field.name)))
        return other
    return batch
