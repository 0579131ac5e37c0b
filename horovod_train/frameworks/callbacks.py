"""Callbacks of a task in the training loop of Keras, Lightning or Transformers.

Their state is saved in each checkpoint and loaded when the job resumes. State that cannot be saved is
reported before training starts.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from horovod_train.checkpoint.arrays import ArrayBlob
from horovod_train.collectives.base import Communicator
from horovod_train.config.support import framework_support, frameworks_with_support
from horovod_train.errors import UserError
from horovod_train.frameworks.plain_data import decoded, fingerprint, is_plain, packed, unpacked

log = logging.getLogger(__name__)
OWN_STATE = "@callbacks/"
"""Prefix of the names of their arrays in the state that is specific to a rank."""
SET_BY_KERAS = {"params"}
LIBRARIES = {"logging"}.union(*(support.modules for _, support in frameworks_with_support()))
"""Packages whose objects are not state of the callback that refers to them."""


def attributes_of(callback: object) -> dict[str, Any]:
    """Return the attributes of a callback that are data: numbers, text, arrays, and containers of them."""
    return {
        name: value for name, value in vars(callback).items() if name not in SET_BY_KERAS and is_plain(value)
    }


def unsaved_attributes(callback: object) -> dict[str, str]:
    """Return the type of each attribute that may be state and that ``attributes_of`` omits, by name."""
    return {
        name: type(value).__name__
        for name, value in vars(callback).items()
        if not (is_plain(value) or callable(value) or _is_of_a_framework(value))
    }


def report_unsaved(callbacks: Iterable[object], world: Communicator) -> None:
    """Log the attributes of callbacks that are not saved, on rank 0."""
    found = [
        f"{type(callback).__name__}.{name} (a {kind})"
        for callback in callbacks
        for name, kind in unsaved_attributes(callback).items()
    ]
    if found and world.rank == 0:
        log.warning("state of callbacks that is not saved, and is reset on resume: %s", ", ".join(found))


def named(callbacks: Iterable[object]) -> Iterator[tuple[str, Any]]:
    """Yield each callback with a name that is the same in the next run: its class and a number per class.

    For callbacks of Lightning, ``state_key`` replaces the class, such as the class and the monitored metric.
    """
    counts: Counter[str] = Counter()
    for callback in callbacks:
        name = str(getattr(callback, "state_key", type(callback).__qualname__))
        counts[name] += 1
        yield f"{name} {counts[name]}", callback


class CallbackState:
    """State of callbacks in checkpoints.

    Attributes:
        take: Returns the state by callback, as nested containers of numbers, text and arrays. The framework
            sets it when its callbacks have been created.
    """

    def __init__(self, world: Communicator) -> None:
        self.take: Callable[[], dict[str, Any]] = dict
        self._world = world
        self._loaded: dict[str, Any] = {}

    def rank_state(self) -> dict[str, ArrayBlob]:
        """Return the state as arrays; raise CheckpointError if it contains objects other than data."""
        state = {name: each for name, each in self.take().items() if each}
        return packed(state, OWN_STATE) if state else {}

    def load_rank_states(self, of_ranks: Sequence[Mapping[str, ArrayBlob]]) -> None:
        """Store this rank's state for ``loaded``; a rank that did not save a state uses that of rank 0."""
        rank = self._world.rank if self._world.rank < len(of_ranks) else 0
        self._loaded = (unpacked(of_ranks[rank], OWN_STATE) if of_ranks else None) or {}

    def loaded(self, name: str, present: Mapping[str, Any] | None = None) -> Any:
        """Return and remove the loaded state of a callback; None: no state is stored.

        Mutable values of ``present``, the callback's attributes, are changed in place.
        """
        data = self._loaded.pop(name, None)
        if present is None or data is None:
            return decoded(data)
        return {key: decoded(each, present.get(key)) for key, each in data.items()}

    def report_unused(self) -> None:
        """Log the callbacks whose state was loaded and that the task no longer returns, on rank 0."""
        if self._loaded and self._world.rank == 0:
            log.warning(
                "the checkpoint has state of callbacks that the task does not return any more: %s",
                ", ".join(sorted(self._loaded)),
            )
        self._loaded = {}


class Attributes:
    """State of callbacks that have no method to return it: the attributes that training has changed.

    Unchanged attributes are settings of the task, and are not saved.
    """

    def __init__(self, callbacks: Iterable[object]) -> None:
        self.is_loaded = False
        self._callbacks = dict(named(callbacks))
        self._initial = {
            name: {
                key: fingerprint(value, by_identity=True) for key, value in attributes_of(callback).items()
            }
            for name, callback in self._callbacks.items()
        }

    def load(self, saved: CallbackState) -> None:
        """Set attributes to their saved values, and add changed attributes to later checkpoints."""
        self.is_loaded = True
        for name, callback in self._callbacks.items():
            vars(callback).update(saved.loaded(name, vars(callback)) or {})
        saved.report_unused()
        saved.take = self.changed

    def changed(self) -> dict[str, dict[str, Any]]:
        """Return the attributes that differ from their initial values, by callback."""
        return {
            name: {
                key: value
                for key, value in attributes_of(callback).items()
                if fingerprint(value, by_identity=True) != self._initial[name].get(key)
            }
            for name, callback in self._callbacks.items()
        }


class SavesCallbacks:
    """Mixin for replicas whose checkpoints contain the state of callbacks; must be the first base class."""

    callbacks: CallbackState

    def rank_state(self) -> Mapping[str, ArrayBlob]:
        """Return the state that is specific to this rank, including that of callbacks."""
        of_strategy: Mapping[str, ArrayBlob] = super().rank_state()  # type: ignore[misc]
        return {**of_strategy, **self.callbacks.rank_state()}

    def load_rank_states(self, of_ranks: Sequence[Mapping[str, ArrayBlob]]) -> None:
        """Load the result of ``rank_state`` of each rank."""
        self.callbacks.load_rank_states(of_ranks)
        super().load_rank_states(  # type: ignore[misc]
            [
                {name: blob for name, blob in blobs.items() if not name.startswith(OWN_STATE)}
                for blobs in of_ranks
            ]
        )


class GuardedLearningRate:
    """Setter of the job's learning rates, which detects rates that other code has set."""

    def __init__(self, read: Callable[[], list[float]], write: Callable[[list[float]], None]) -> None:
        self._read = read
        self._write = write
        self._last: list[float] | None = None

    def set(self, rates: list[float]) -> None:
        """Set the rates of the next step; raise UserError if the current rates are not those set last."""
        if self._last is not None:
            for found, expected in zip(self._read(), self._last, strict=True):
                if not math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-30):
                    raise UserError(
                        f"a callback or the model has set the learning rate to {found:g}; the job had set it "
                        f"to {expected:g}",
                        hint="remove the code that sets it; set the schedule in lr:",
                    )
        if rates != self._last:
            self._write(rates)
            self._last = rates


def _is_of_a_framework(value: object) -> bool:
    return any(each.__module__.partition(".")[0] in LIBRARIES for each in type(value).__mro__[:-1])


def check_callbacks(callbacks: Iterable[object], framework: str) -> None:
    """Raise UserError if a callback conflicts with a function of the job."""
    support = framework_support(framework)
    for callback in callbacks:
        for each in type(callback).__mro__:
            refused = support.callbacks.get(each.__name__)
            is_of_framework = each.__module__.partition(".")[0] in support.modules
            if refused and is_of_framework and refused.condition(callback):
                raise UserError(
                    f"the callback {type(callback).__name__} {refused.reason}", hint=refused.instead
                )
