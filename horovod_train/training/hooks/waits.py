"""Attribution of waiting time to ranks, from the exchanged wait and phase times of all ranks."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from time import monotonic

import numpy as np
import numpy.typing as npt

from horovod_train.events.types import PHASES, WAIT_PHASE, RankTimes
from horovod_train.events.wire import Reporter
from horovod_train.telemetry.recorder import Recorder
from horovod_train.telemetry.records import WaitRecord
from horovod_train.telemetry.waiting import attribute_waiting
from horovod_train.training.hooks.base import Hook, HookParts
from horovod_train.training.pending_steps import StepReport
from horovod_train.training.run import Run

RANKS_PER_EVENT = 32
"""Ranks in an event, limited because launchers split long lines."""

MIN_REPORT_S = 2.0
REPORT_S_PER_RANK = 0.03
"""The interval grows with the number of ranks (1000 ranks: 30 s), which limits the bytes per second."""

# Time and number of steps, number of samples, time of each phase; then the step of the first wait time.
_SUMS = struct.Struct(f"<{3 + len(PHASES)}d")
_FIRST = struct.Struct("<q")


class AttributeWaiting(Hook):
    """Exchanges wait times, and computes how long each rank waits and how long others wait for it.

    ``recorder`` receives the times of this rank; on rank 0, ``reporter`` receives those of all ranks.
    """

    def __init__(self, num_ranks: int, rank: int, recorder: Recorder, reporter: Reporter) -> None:
        self._rank = rank
        self._recorder = recorder
        self._reporter = reporter
        self._first_step = 0
        self._wait_times_s: list[float] = []
        self._sums = np.zeros(3 + len(PHASES))
        self._interval_s = max(MIN_REPORT_S, REPORT_S_PER_RANK * num_ranks)
        self._reported_s = monotonic()
        # A row per rank, since the last report: sums as above, waiting_s, waited_for_s.
        self._of_ranks = np.zeros((num_ranks, self._sums.size + 2))

    @classmethod
    def of(cls, parts: HookParts) -> AttributeWaiting | None:
        """Return the hook; None: the job has no metrics."""
        if not parts.job.metrics.enabled:
            return None
        hook = cls(parts.world.size, parts.world.rank, parts.recorder, parts.reporter)
        parts.exchange.contributions.append(hook)
        return hook

    def on_reading(self, run: Run, report: StepReport) -> None:
        """Add the times of a step."""
        clock = report.outcome.clock
        phases = clock.seconds
        sums = self._sums
        sums[0] += clock.total_s
        sums[1] += 1
        sums[2] += report.share.num_local_samples
        for place, phase in enumerate(PHASES, 3):
            if phase in phases:
                sums[place] += phases[phase]
        wait_s = phases.get(WAIT_PHASE)
        if report.step != self._first_step + len(self._wait_times_s) or wait_s is None:
            # The first step, a step without wait time, or a restored checkpoint.
            self._first_step, self._wait_times_s = report.step, []
        if wait_s is not None:
            self._wait_times_s.append(wait_s)

    def payload(self) -> bytes:
        """Return the sums since the last exchange, and the wait times that are not attributed yet."""
        wait_times = np.array(self._wait_times_s, np.float32).tobytes()
        header = _SUMS.pack(*self._sums) + _FIRST.pack(self._first_step) + wait_times
        self._sums[:] = 0
        return header

    def on_gathered(self, of_ranks: Sequence[bytes]) -> None:
        """Attribute the waiting of the steps whose wait times all ranks have sent."""
        if self._rank == 0:
            for rank, message in enumerate(of_ranks):
                self._of_ranks[rank, :-2] += _SUMS.unpack_from(message)
        firsts = [_FIRST.unpack_from(message, _SUMS.size)[0] for message in of_ranks]
        wait_times = [
            np.frombuffer(message, np.float32, offset=_SUMS.size + _FIRST.size) for message in of_ranks
        ]
        begin = max(firsts)
        end = min(first + len(each) for first, each in zip(firsts, wait_times, strict=True))
        if end > begin:
            known = [
                each[begin - first : end - first] for first, each in zip(firsts, wait_times, strict=True)
            ]
            self._attribute(np.stack(known, axis=1).astype(np.float64))
            self._wait_times_s = self._wait_times_s[end - self._first_step :]
            self._first_step = end
        if self._rank == 0 and monotonic() - self._reported_s >= self._interval_s:
            self._report()

    def _attribute(self, wait_times_s: npt.NDArray[np.float64]) -> None:
        waiting, waited_for, communication = attribute_waiting(wait_times_s)
        self._recorder.record(
            WaitRecord(
                waiting_s=float(waiting[self._rank]),
                communication_s=float(communication.sum()),
                waited_for_s=float(waited_for[self._rank]),
            )
        )
        self._of_ranks[:, -2] += waiting
        self._of_ranks[:, -1] += waited_for

    def on_end(self, run: Run) -> None:
        """Report the times since the last report."""
        if self._rank == 0:
            self._report()

    def _report(self) -> None:
        """Report the times of all ranks since the last report, in events of 32 ranks."""
        now = monotonic()
        table, self._of_ranks = self._of_ranks, np.zeros_like(self._of_ranks)
        seconds, self._reported_s = now - self._reported_s, now
        if not table[:, 1].any():
            return
        seen = {phase: table[:, place] for place, phase in enumerate(PHASES, 3) if table[:, place].any()}
        has_wait_times = WAIT_PHASE in seen
        for begin in range(0, len(table), RANKS_PER_EVENT):
            part = slice(begin, begin + RANKS_PER_EVENT)
            self._reporter.report(
                RankTimes(
                    first_rank=begin,
                    seconds=round(seconds, 3),
                    steps=tuple(map(int, table[part, 1])),
                    samples=tuple(map(int, table[part, 2])),
                    step_s=_rounded(table[part, 0]),
                    phases_s={phase: _rounded(column[part]) for phase, column in seen.items()},
                    waiting_s=_rounded(table[part, -2]) if has_wait_times else (),
                    waited_for_s=_rounded(table[part, -1]) if has_wait_times else (),
                )
            )


def _rounded(numbers: npt.NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(round(number, 4) for number in numbers.tolist())
