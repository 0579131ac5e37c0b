"""Hooks that check and preserve the state of ranks.

    CheckReplicasIdentical   replicas are identical on all ranks
    CompareWithOneProcess    compares the gradient of all ranks with that of one process
    WatchPythonState         compares the state in Python between ranks, and reports state that checkpoints
                             do not contain
    KeepGenerators           random generators during evaluations

A difference between replicas ends training.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from time import perf_counter
from typing import Protocol, runtime_checkable

import numpy as np

from horovod_train.checkpoint.arrays import ArrayBlob
from horovod_train.data.order import order_of
from horovod_train.data.shard import StepShare
from horovod_train.errors import UserError
from horovod_train.events.types import ComparedWithOneProcess
from horovod_train.events.wire import Reporter
from horovod_train.frameworks.base import HasGenerators, HasPythonState, PythonStateOfRank
from horovod_train.health.comparisons import check_replicas_identical
from horovod_train.training.hooks.base import INTERVAL_S, Hook, HookParts, PeriodicExchange
from horovod_train.training.run import Run, StepReport


class CheckReplicasIdentical(Hook):
    """Compares the state of all ranks before the first step, at the end, and periodically."""

    def __init__(self) -> None:
        self._is_due = False

    def on_start(self, run: Run) -> None:
        self._check(run, "before the first step")

    def on_step(self, run: Run) -> None:
        """Compare every ``health.sync_check_every_steps`` steps, as soon as replicas must be identical."""
        every = run.job.health.sync_check_every_steps
        self._is_due = self._is_due or bool(every and run.progress.step % every == 0)
        if self._is_due and run.replica.replicas_identical:
            self._is_due = False
            self._check(run, f"after step {run.progress.step}")

    def on_end(self, run: Run) -> None:
        """Compare the final state before it is saved."""
        self._check(run, "at the end")

    def _check(self, run: Run, when: str) -> None:
        if run.world.size > 1:
            run.replica.sync_buffers()
            check_replicas_identical(run.world, run.replica.state(copy=False), when)


MAX_INTERVAL_STEPS = 1000
"""Largest number of steps between two comparisons."""
MAX_PER_PART = 4
"""Largest number of samples of a part."""


class GradientComparison(Protocol):
    """Compares gradients (``torch/verify/one_process.py``)."""

    def compare(self, step: int, parts: Sequence[Sequence[int]]) -> str | None:
        """Compare on two parts of the samples of a step; raises ``UserError`` for a refused difference.

        Returns:
            What differs, or why nothing is compared; None: the gradients are equal; empty: they are not
            finite in this step.
        """


@runtime_checkable
class ComparesGradients(Protocol):
    """A replica whose gradients may be compared with those of one process."""

    one_process: GradientComparison | None


class CompareWithOneProcess(Hook):
    """Compares after steps 1, 2, 4, 8, ..., and then after every 1,000 steps, and reports the result."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._num_steps, self._next = 0, 1.0
        self._share: StepShare | None = None

    @classmethod
    def of(cls, parts: HookParts) -> CompareWithOneProcess | None:
        """Return the hook, unless the job disables it or has one rank."""
        is_wanted = parts.job.health.one_process != "off" and parts.world.size > 1
        return cls(parts.reporter) if is_wanted else None

    def on_result(self, run: Run, report: StepReport) -> None:
        """Record which samples a step had; on a device, it is not the last one."""
        self._share = report.share

    def on_step(self, run: Run) -> None:
        """Compare, if it is due and the replica supports it."""
        self._num_steps += 1
        replica = run.replica
        if not isinstance(replica, ComparesGradients) or replica.one_process is None or self._share is None:
            return
        if self._num_steps < self._next:
            return
        self._next = self._num_steps + min(self._num_steps, MAX_INTERVAL_STEPS)
        if all(parts := _samples(run, self._share)) and self._compare(run, replica.one_process, parts):
            self._next = math.inf  # a difference is told once

    def _compare(self, run: Run, comparison: GradientComparison, parts: Sequence[Sequence[int]]) -> str:
        """Compare, and report the result on rank 0; return what differs."""
        step = run.progress.step
        try:
            found = comparison.compare(step, parts)
        except UserError as error:
            self._report_result(run, step, str(error))
            raise
        if found != "":
            self._report_result(run, step, found or "")
        return found or ""

    def _report_result(self, run: Run, step: int, text: str) -> None:
        if run.world.rank == 0:
            self._reporter.report(ComparedWithOneProcess(step=step, text=text))


def _samples(run: Run, share: StepShare) -> list[list[int]]:
    """Return the samples of a step in two parts: others in each step, in the order of the step."""
    order = run.progress.order
    places = order_of(order, run.train_reader.dataset, run.progress.epoch)
    of_step = places[share.cursor : share.cursor + share.num_samples]
    chosen = np.random.default_rng(share.cursor + run.progress.step).permutation(len(of_step))
    half = len(chosen) // 2
    size = min(half, MAX_PER_PART)
    return [of_step[np.sort(part[:size])].tolist() for part in (chosen[:half], chosen[half:])]


log = logging.getLogger(__name__)

MAX_SHOWN = 6
MAX_BETWEEN = 64
"""Largest number of periodic exchanges between two comparisons, if these are fast; they are half a minute."""
MAX_PART = 0.002
"""Largest part of the time that comparisons take."""
_HEAD = struct.Struct("<dI")
"""Duration of an examination, and number of the part of the model."""


class WatchPythonState(Hook):
    """Compares the state in Python of all ranks in the exchanges 1, 2, 4, ..., 64, and then in every 64th."""

    def __init__(self, exchange: PeriodicExchange) -> None:
        self._state: PythonStateOfRank | None = None
        self._num_exchanges, self._next = 0, 1
        self._is_due = self._is_different = False
        self._unsaved: Mapping[str, str] = {}
        self._reported: set[str] = set()
        self._reported_unsaved: set[str] = set()
        exchange.contributions.append(self)

    @classmethod
    def of(cls, parts: HookParts) -> WatchPythonState:
        return cls(parts.exchange)

    def on_start(self, run: Run) -> None:
        """Report the state that the checkpoint of a resumed job does not contain."""
        if isinstance(run.replica, HasPythonState):
            self._state = run.replica.python_state
        if self._state is not None and self._state.not_restored and run.world.rank == 0:
            log.warning(
                "state that the checkpoint does not contain, and that is initialized again: %s",
                _joined(dict.fromkeys(self._state.not_restored, "")),
            )

    def payload(self) -> bytes:
        """Return duration of an examination, part, and digest of the state; empty: no comparison is due."""
        self._num_exchanges += 1
        self._is_due = self._state is not None and self._num_exchanges >= self._next
        if self._state is None or not self._is_due:
            return b""
        begun_s = perf_counter()
        digests, self._unsaved = self._state.examined()
        digest = blake2b(repr(sorted(digests.items())).encode(), digest_size=16).digest()
        return _HEAD.pack(perf_counter() - begun_s, self._state.part) + digest

    def on_gathered(self, of_ranks: Sequence[bytes]) -> None:
        """Record whether the state differs between ranks, and when all ranks compare it again."""
        if not self._is_due:
            return
        heads = [_HEAD.unpack_from(message) for message in of_ranks]
        digests = {(part, message[_HEAD.size :]) for (_, part), message in zip(heads, of_ranks, strict=True)}
        self._is_different = len(digests) > len({part for _, part in heads})
        longest_s = max(duration_s for duration_s, _ in heads)
        rest = int(longest_s / (INTERVAL_S * MAX_PART))
        self._next = self._num_exchanges + max(min(self._num_exchanges, MAX_BETWEEN), rest)

    def on_step(self, run: Run) -> None:
        """Report what differs between ranks, and what is not saved, once for each value."""
        if self._state is None or not self._is_due:
            return
        self._is_due = False
        if self._is_different:
            self._report_differences(run, self._state.differences())
        found = {
            name: f" ({why})" for name, why in self._unsaved.items() if name not in self._reported_unsaved
        }
        self._reported_unsaved.update(found)
        if found and run.world.rank == 0:
            log.warning(
                "state that checkpoints do not contain, and that a resume initializes again: %s",
                _joined(found),
            )

    def _report_differences(self, run: Run, differences: Mapping[str, str]) -> None:
        found = {name: f": {text}" for name, text in differences.items() if name not in self._reported}
        self._reported.update(found)
        if found and run.world.rank == 0:
            log.warning(
                "step %d: state in Python differs between ranks: %s. If the loss depends on it, ranks train "
                "other weights than one process: compute it from the samples of all ranks "
                "(horovod_train.gather, for PyTorch), or keep it in a buffer of the model and name that in "
                "train.average_buffers",
                run.progress.step,
                _joined(found),
            )


def _joined(found: Mapping[str, str]) -> str:
    """Return names with their texts, at most ``MAX_SHOWN``."""
    shown = [f"{name}{text}" for name, text in list(found.items())[:MAX_SHOWN]]
    return "; ".join(shown) + (f"; and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else "")


class KeepGenerators(Hook):
    """Restores random generators after each evaluation, so that training does not depend on evaluations.

    Metrics may draw numbers, and so do readers of the frameworks.
    """

    def __init__(self, framework: HasGenerators) -> None:
        self._framework = framework
        self._state: tuple[object, Mapping[str, ArrayBlob]] = None, {}

    @classmethod
    def of(cls, parts: HookParts) -> KeepGenerators:
        assert parts.framework is not None
        return cls(parts.framework)

    def on_evaluation(self, run: Run, *, begins: bool) -> None:
        """Take the state before an evaluation, and load it after it."""
        if begins:
            self._state = self._framework.rng_state()
        else:
            self._framework.load_rng_state(*self._state)
