"""What a rank of a script does, as far as it can be seen from outside: steps, their phases, samples, bytes.

A step ends when the optimizer has updated the weights. Between two of them, calls divide the
time: reading a batch, a backward pass, waiting for Horovod. An evaluation between steps is not counted in
either. Whatever goes wrong in here ends the measuring, and never the script.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from threading import get_ident
from time import monotonic, perf_counter
from types import TracebackType

from horovod_train.events.types import WAIT_PHASE, Notice, Progress, RankTimes, Started
from horovod_train.events.wire import Reporter
from horovod_train.telemetry.recorder import Recorder
from horovod_train.telemetry.records import StepRecord, WorldRecord

log = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 0.5
MIN_REPORT_S = 2.0
REPORT_S_PER_RANK = 0.03
"""Each rank tells where its time went; a thousand of them do so every 30 s."""

LOSS_INTERVAL_S = 0.05
"""Reading a loss takes tens of microseconds: of quick steps not every one's is read."""


class StepMeter:
    """Measures the steps of one rank.

    Args:
        job: Name of the job.
        rank: This rank.
        num_ranks: Ranks that were started.
        recorder: Gets each step.
        reporter: Gets where time went, and on rank 0 how far it is.
        samples_per_batch: Samples per backward pass, if they cannot be determined; None: unknown.
        norm_every_steps: The gradient norm is wanted this often.
        clock: Seconds that only grow.
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
        self._interval_s = max(MIN_REPORT_S, REPORT_S_PER_RANK * num_ranks)
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
        self._thread: int | None = None  # that trains
        self._sums: dict[str, float] = {}
        self._since = (0, 0, 0.0)  # steps, samples, seconds since the last report
        self._samples_since_report = 0
        self._samples_per_s: float | None = None
        self._reported_step = 0
        self.num_steps = 0
        self.is_off = False
        """Something went wrong: nothing is measured any more."""
        self.watching = _Watching(self)
        """What is done within it may fail."""
        self.waiting_since_s: float | None = None
        """Since when Horovod is waited for, by ``monotonic``; None: it is not."""
        self.waiting_in = None
        self.has_joined = False
        """The script has called ``hvd.init()``."""
        self.hides_phases = False
        """Work is queued on a GPU: what the host sees of phases is not so."""

    @property
    def wants_norm(self) -> bool:
        """Whether the gradient norm of the step that ends now is wanted."""
        return self.num_steps % self._norm_every_steps == 0

    @property
    def wants_loss(self) -> bool:
        """Whether the loss of the backward pass that ends now is wanted."""
        return self._clock() - self._loss_s >= LOSS_INTERVAL_S

    @property
    def has_gradients(self) -> bool:
        """Whether there was a backward pass in the step that is being made."""
        return self._num_backward > 0

    def batch(self, begun_s: float, num_samples: int | None, reader: object = None) -> None:
        """A batch was read, from a time until now.

        Args:
            begun_s: When that began, by the clock.
            num_samples: How many samples it has; None: that cannot be seen.
            reader: Who has read it. One that reads a second time before there is a backward pass reads for
                something else than this step: an evaluation, or batches that are left out.
        """
        if self._thread in (None, get_ident()):  # one that reads ahead takes no time from the step
            if not self._num_backward and (not self._readers or id(reader) in self._readers):
                self._begin(begun_s)
            self._readers.add(id(reader))
            self._lap("data", self._clock())
        if num_samples is not None and self._given_samples is None:
            self._samples += num_samples

    def exclude(self, begun_s: float) -> None:
        """Exclude the time since ``begun_s`` from the step: an evaluation, for example."""
        if self._thread not in (None, get_ident()):
            return
        if not self._num_backward:
            self._begin(self._clock())
        else:
            excluded_s = self._clock() - max(begun_s, self._mark_s)
            self._begun_s += excluded_s
            self._mark_s += excluded_s

    def begin(self, begun_s: float, num_samples: int | None) -> None:
        """A step was begun at a time, with so many samples; None: that cannot be seen."""
        sent = self._bytes
        self._begin(begun_s)
        self._bytes = sent
        self._samples = num_samples or 0

    def backward(self, begun_s: float, loss: float | None) -> None:
        """A backward pass was made, from a time until now; ``loss`` is None where it is not known."""
        self._thread = get_ident()
        if not (self.num_steps or self._num_backward or self._readers):
            # What was before the first step of all, imports and broadcasts above all, does not belong to it.
            self._begun_s = self._mark_s = begun_s
            self._phases, self._wait_s = {}, 0.0
        self._lap("forward", begun_s)
        self._lap("backward", self._clock())
        self._num_backward += 1
        if loss is not None:
            self._loss, self._loss_s = loss, self._mark_s
            self._is_finite = math.isfinite(loss)

    def add_wait_s(self, seconds: float) -> None:
        """Horovod was waited for."""
        self._wait_s += seconds
        self._phases[WAIT_PHASE] = self._phases.get(WAIT_PHASE, 0.0) + seconds

    def sent(self, size_bytes: int) -> None:
        """Something was given to all-reduce."""
        self._bytes += size_bytes

    def step(
        self, lr: float | None, grad_norm: float | None = None, *, last_phase: str = "optimizer"
    ) -> None:
        """A step has ended.

        Args:
            lr: Its learning rate; None: that cannot be seen.
            grad_norm: L2 norm of its gradient; None: it was not taken.
            last_phase: What the time since the last thing that was seen belongs to.
        """
        now_s = self._clock()
        self._lap(last_phase, now_s)
        if self._given_samples is not None:
            self._samples = self._given_samples * max(1, self._num_backward)
        self.num_steps += 1
        self._lr = lr
        self._look_at_numbers(grad_norm)
        total_s = now_s - self._begun_s
        phases = {} if self.hides_phases else self._phases
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
        """The first step is being made."""
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
        """Nothing more will come: tell the rest."""
        if self._rank == 0 and self.num_steps > self._reported_step:
            self._report_progress(monotonic())
        self._report_times(monotonic())

    def _check_world(self) -> None:
        """Tell a person whose ranks do not know of each other: it looks as if all were well."""
        if (
            self._rank == 0
            and self._num_ranks > 1
            and not self.has_joined
            and "mpi4py.MPI" not in sys.modules
        ):
            text = (
                f"{self._num_ranks} ranks were started, but the script trains and has not called hvd.init(): "
                "each rank trains alone, on the same data unless the script sees to that"
            )
            self._reporter.report(Notice(text=text))

    def _look_at_numbers(self, grad_norm: float | None) -> None:
        """Report once that the loss or the gradient is not finite; the script decides whether to continue."""
        if grad_norm is not None and not math.isfinite(grad_norm):
            self._is_finite = False
        if self._is_finite is False and self._was_finite:
            norm = "" if grad_norm is None else f", the gradient norm {grad_norm}"
            text = f"not finite: in step {self.num_steps} this rank's loss is {self._loss}{norm}"
            if self._finite_step:
                text += f"; in step {self._finite_step} it was finite (of quick steps not all are looked at)"
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
        """Count the time since the last lap for a phase, but for what was waited meanwhile."""
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
                samples=(samples,) if samples else (),  # none: they cannot be seen
                step_s=(round(step_s, 4),),
                phases_s={phase: (round(seconds, 4),) for phase, seconds in self._sums.items()},
                waiting_s=(),
                waited_for_s=(),
            )
        )
        self._reported_s, self._since, self._sums = now_s, (0, 0, 0.0), {}


class _Watching:
    """Lets nothing out that goes wrong in it."""

    def __init__(self, meter: StepMeter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """End; after an error, measuring stops, which is reported."""
        if not isinstance(error, Exception):
            return False
        if not self._meter.is_off:
            self._meter.is_off = True
            log.warning("nothing more is measured of the script: %s: %s", type(error).__name__, error)
        return True


def replace_everywhere(package: str, name: str, plain: object, wrapped: object) -> None:
    """Put a function in another's place, wherever a package's modules have imported it."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(package) and getattr(module, name, None) is plain:
            setattr(module, name, wrapped)
