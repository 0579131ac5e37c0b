"""Measurement of a script's training from outside: steps, their phases, samples and bytes of one rank.

    StepMeter        the measurement
    watch_joining    instrumentation of ``hvd.init()``

A step ends when the optimizer has updated the weights. Instrumented calls divide its time into phases:
reading a batch, backward passes, waiting for Horovod. The time of evaluations between steps is excluded. An
error in the instrumentation ends the measurement, never the script.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from time import monotonic, perf_counter
from types import TracebackType
from typing import Any

from horovod_train.events.types import WAIT_PHASE, Notice, Progress, RankTimes, Started
from horovod_train.events.wire import Reporter
from horovod_train.telemetry.catalog import StepRecord, WorldRecord
from horovod_train.telemetry.recorder import Recorder, times_interval_s

log = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 0.5
LOSS_INTERVAL_S = 0.05
"""Minimum time between two readings of the loss, because a reading takes tens of microseconds."""


class StepMeter:
    """Measurement of the steps of one rank.

    Args:
        job: Name of the job.
        rank: This rank.
        num_ranks: Number of ranks that were started.
        recorder: Receives a record of each step.
        reporter: Receives the times of this rank, and on rank 0 the progress.
        samples_per_batch: Samples per backward pass; None: detected from the batches.
        norm_every_steps: Interval of the gradient norm, in steps.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        job: str,
        rank: int,
        num_ranks: int,
        recorder: Recorder,
        reporter: Reporter,
        *,
        samples_per_batch: int | None = None,
        norm_every_steps: int = 50,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._job = job
        self._rank = rank
        self._num_ranks = num_ranks
        self._recorder = recorder
        self._reporter = reporter
        self._given_samples = samples_per_batch
        self._norm_every_steps = norm_every_steps
        self._clock = clock
        self._interval_s = times_interval_s(num_ranks)
        self._reported_s = monotonic()
        self._progress_reported_s = 0.0
        self._begun_s = self._mark_s = clock()
        self._phases: dict[str, float] = {}
        self._wait_s = 0.0
        self._bytes = 0
        self._samples = 0
        self._num_backward = 0
        self._loss: float | None = None
        self._loss_s = -LOSS_INTERVAL_S
        self._lr: float | None = None
        self._is_finite: bool | None = None
        self._was_finite = True
        self._finite_step = 0
        self._readers: set[int] = set()
        self._thread: int | None = None  # the thread that trains
        self._sums: dict[str, float] = {}
        self._since = (0, 0, 0.0)  # steps, samples, seconds since the last report
        self._samples_since_report = 0
        self._samples_per_s: float | None = None
        self._reported_step = 0
        self.num_steps = 0
        self.is_off = False
        """Whether measurement has ended because of an error."""
        self.watching = _Watching(self)
        """Context in which the instrumentation may raise exceptions."""
        self.waiting_since_s: float | None = None
        """Start time of the current wait for Horovod (``monotonic``); None: not waiting."""
        self.waiting_in = None
        self.has_joined = False
        """Whether the script has called ``hvd.init()``."""
        self.is_asynchronous = False
        """Whether phases are not recorded, because a GPU runs asynchronously."""

    @property
    def wants_norm(self) -> bool:
        """Whether the gradient norm of the current step is requested."""
        return self.num_steps % self._norm_every_steps == 0

    @property
    def wants_loss(self) -> bool:
        """Whether the loss of the current backward pass is requested."""
        return self._clock() - self._loss_s >= LOSS_INTERVAL_S

    @property
    def has_gradients(self) -> bool:
        """Whether the current step had a backward pass."""
        return self._num_backward > 0

    def batch(self, begun_s: float, num_samples: int | None, reader: object = None) -> None:
        """Record that a batch was read between ``begun_s`` and now.

        Args:
            begun_s: Start time of the read.
            num_samples: Number of samples of the batch; None: unknown.
            reader: Iterator of the batch. If it reads a second batch before a backward pass, the first was
                not for this step (an evaluation, or a skipped batch), and its time is excluded.
        """
        if self._thread in (None, get_ident()):  # reads of a prefetching thread cost the step no time
            if not self._num_backward and (not self._readers or id(reader) in self._readers):
                self._begin(begun_s)
            self._readers.add(id(reader))
            self._lap("data", self._clock())
        if num_samples is not None and self._given_samples is None:
            self._samples += num_samples

    def exclude(self, begun_s: float) -> None:
        """Exclude the time since ``begun_s`` from the step, for example that of an evaluation."""
        if self._thread not in (None, get_ident()):
            return
        if not self._num_backward:
            self._begin(self._clock())
        else:
            excluded_s = self._clock() - max(begun_s, self._mark_s)
            self._begun_s += excluded_s
            self._mark_s += excluded_s

    def begin(self, begun_s: float, num_samples: int | None) -> None:
        """Record the start of a step; ``num_samples`` None: unknown."""
        sent = self._bytes
        self._begin(begun_s)
        self._bytes = sent
        self._samples = num_samples or 0

    def backward(self, begun_s: float, loss: float | None) -> None:
        """Record a backward pass between ``begun_s`` and now; ``loss`` None: unknown."""
        self._thread = get_ident()
        if not (self.num_steps or self._num_backward or self._readers):
            # Imports and broadcasts before the first step are not part of it.
            self._begun_s = self._mark_s = begun_s
            self._phases, self._wait_s = {}, 0.0
        self._lap("forward", begun_s)
        self._lap("backward", self._clock())
        self._num_backward += 1
        if loss is not None:
            self._loss, self._loss_s = loss, self._mark_s
            self._is_finite = math.isfinite(loss)

    def add_wait_s(self, seconds: float) -> None:
        """Record a wait for Horovod."""
        self._wait_s += seconds
        self._phases[WAIT_PHASE] = self._phases.get(WAIT_PHASE, 0.0) + seconds

    def sent(self, size_bytes: int) -> None:
        """Record the size of the input of a collective."""
        self._bytes += size_bytes

    def step(
        self, lr: float | None, grad_norm: float | None = None, *, last_phase: str = "optimizer"
    ) -> None:
        """Record the end of a step, with its learning rate and gradient norm (L2), each None if unknown.

        The time since the last recorded call belongs to ``last_phase``.
        """
        now_s = self._clock()
        self._lap(last_phase, now_s)
        if self._given_samples is not None:
            self._samples = self._given_samples * max(1, self._num_backward)
        self.num_steps += 1
        self._lr = lr
        self._check_finite(grad_norm)
        total_s = now_s - self._begun_s
        phases = {} if self.is_asynchronous else self._phases
        wait_s = phases.get(WAIT_PHASE)
        self._recorder.record(
            StepRecord(
                seconds=total_s,
                phase_seconds=phases,
                num_samples=self._samples or None,
                epochs=None,
                loss=None,
                local_loss=self._loss,
                lr=lr,
                numbers={"grad_norm": grad_norm, "sent_bytes": self._bytes},
                is_finite=self._is_finite,
                own_seconds=None if wait_s is None else max(0.0, total_s - wait_s),
            )
        )
        for phase, seconds in phases.items():
            self._sums[phase] = self._sums.get(phase, 0.0) + seconds
        steps, samples, seconds = self._since
        self._since = steps + 1, samples + self._samples, seconds + total_s
        self._samples_since_report += self._samples
        self._report()
        self._begin(now_s)

    def begin_training(self, num_parameters: int, num_present: int, device: str) -> None:
        """Report the start of training, during the first step."""
        self._check_world()
        self._recorder.record(WorldRecord(num_wanted=self._num_ranks, num_present=num_present))
        if self._rank == 0:
            self._reporter.report(
                Started(
                    job=self._job,
                    num_parameters=num_parameters,
                    world_size=num_present,
                    global_batch_size=0,
                    precision="",
                    device=device,
                )
            )

    def end(self) -> None:
        """Report the remaining steps, at the end of the script."""
        if self._rank == 0 and self.num_steps > self._reported_step:
            self._report_progress(monotonic())
        self._report_times(monotonic())

    def _check_world(self) -> None:
        """Warn if ranks train independently because the script has not called ``hvd.init()``."""
        if (
            self._rank == 0
            and self._num_ranks > 1
            and not self.has_joined
            and "mpi4py.MPI" not in sys.modules
        ):
            text = (
                f"{self._num_ranks} ranks were started, but the script trains and has not called hvd.init(): "
                "each rank trains alone, on the same data unless the script shards it"
            )
            self._reporter.report(Notice(text=text))

    def _check_finite(self, grad_norm: float | None) -> None:
        """Report once that the loss or the gradient is not finite; the script decides whether to continue."""
        if grad_norm is not None and not math.isfinite(grad_norm):
            self._is_finite = False
        if self._is_finite is False and self._was_finite:
            norm = "" if grad_norm is None else f", the gradient norm {grad_norm}"
            text = f"not finite: in step {self.num_steps} this rank's loss is {self._loss}{norm}"
            if self._finite_step:
                text += f"; in step {self._finite_step} it was finite (short steps are sampled)"
            self._reporter.report(Notice(text=text))
            self._was_finite = False
        if self._is_finite:
            self._finite_step = self.num_steps

    def _begin(self, now_s: float) -> None:
        self._begun_s = self._mark_s = now_s
        self._phases, self._wait_s = {}, 0.0
        self._bytes = self._samples = self._num_backward = 0
        self._is_finite = None
        self._readers.clear()

    def _lap(self, phase: str, now_s: float) -> None:
        """Add the time since the end of the last phase to a phase, without the waits in this time."""
        now_s = max(now_s, self._mark_s)
        seconds = now_s - self._mark_s - self._wait_s
        self._phases[phase] = self._phases.get(phase, 0.0) + max(0.0, seconds)
        self._mark_s, self._wait_s = now_s, 0.0

    def _report(self) -> None:
        now_s = monotonic()
        if self._rank == 0 and now_s - self._progress_reported_s >= PROGRESS_INTERVAL_S:
            self._report_progress(now_s)
        if now_s - self._reported_s >= self._interval_s:
            self._report_times(now_s)

    def _report_progress(self, now_s: float) -> None:
        if (
            self._reported_step
            and self._samples_since_report
            and now_s - self._progress_reported_s >= PROGRESS_INTERVAL_S
        ):
            self._samples_per_s = (
                self._samples_since_report * self._num_ranks / (now_s - self._progress_reported_s)
            )
        self._progress_reported_s, self._samples_since_report, self._reported_step = now_s, 0, self.num_steps
        self._reporter.report(
            Progress(
                step=self.num_steps,
                num_steps=0,
                epoch=0,
                num_epochs=0,
                loss=self._loss,
                lr=self._lr,
                samples_per_s=self._samples_per_s,
                eta_s=None,
                loss_is_local=True,
            )
        )

    def _report_times(self, now_s: float) -> None:
        steps, samples, step_s = self._since
        if not steps:
            return
        self._reporter.report(
            RankTimes(
                first_rank=self._rank,
                seconds=round(now_s - self._reported_s, 3),
                steps=(steps,),
                samples=(samples,) if samples else (),  # empty: unknown
                step_s=(round(step_s, 4),),
                phases_s={phase: (round(seconds, 4),) for phase, seconds in self._sums.items()},
                waiting_s=(),
                waited_for_s=(),
            )
        )
        self._reported_s, self._since, self._sums = now_s, (0, 0, 0.0), {}


class _Watching:
    """Context that suppresses exceptions; the first one is logged and ends the measurement."""

    def __init__(self, meter: StepMeter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Suppress an ``Exception``, and end the measurement."""
        if not isinstance(error, Exception):
            return False
        if not self._meter.is_off:
            self._meter.is_off = True
            log.warning("measurement of the script has stopped: %s: %s", type(error).__name__, error)
        return True


def replace_everywhere(package: str, name: str, plain: object, wrapped: object) -> None:
    """Replace a function in all modules of a package that have imported it."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(package) and getattr(module, name, None) is plain:
            setattr(module, name, wrapped)


def watch_joining(meter: StepMeter) -> None:
    """Record in the meter when the script calls ``hvd.init()`` of any framework."""
    basics: Any = sys.modules["horovod.common.basics"].HorovodBasics
    plain_init = basics.init

    @wraps(plain_init)
    def init(*args: object, **kwargs: object) -> object:
        found = plain_init(*args, **kwargs)
        meter.has_joined = True
        return found

    basics.init = init
