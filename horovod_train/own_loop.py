"""Parts of a user's own training loop: steps, the sharded loader, checkpoints and preemption.

``training/loop.py`` records a step of such a loop like one of a job, and calls the hooks that observe it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import strftime
from typing import Any, Self

import torch

from horovod_train.checkpoint.arrays import dump_state
from horovod_train.checkpoint.manager import CheckpointManager
from horovod_train.collectives.base import Communicator, Mesh, broadcast_json
from horovod_train.config.arguments import axes_of, batch_size_of_lr
from horovod_train.config.schema import Job
from horovod_train.data.shard import PlannedStep
from horovod_train.errors import NumericError, PreemptedError, UserError
from horovod_train.events.wire import Reporter
from horovod_train.frameworks.torch.device import TorchBased
from horovod_train.frameworks.torch.framework import choose_device
from horovod_train.frameworks.torch.state.rank_state import rng_state, seed_generators
from horovod_train.frameworks.torch.step.averages import Averaging
from horovod_train.frameworks.torch.step.deferred import Outcome
from horovod_train.frameworks.torch.step.gradient_hooks import defer_hooks_after_accumulation
from horovod_train.frameworks.torch.step.replica import TorchReplica
from horovod_train.frameworks.torch.strategies.base import DevicePlacement, make_strategy
from horovod_train.frameworks.torch.task import TorchReader
from horovod_train.health.comparisons import FiniteGuard, check_replicas_identical
from horovod_train.lr.policy import policy_of
from horovod_train.rank import RankServices, check_data, resume
from horovod_train.registry import OBSERVERS
from horovod_train.training import loop
from horovod_train.training.hooks.base import Hook, PeriodicExchange, save_checkpoint
from horovod_train.training.hooks.saving import PreemptionAgreement
from horovod_train.training.run import Progress, Run

log = logging.getLogger(__name__)


class OwnRun(Run):
    """Run of one replica in a user's own loop."""

    replica: TorchReplica

    def deliver_all(self) -> None:
        """Wait for the results of all steps, and pass them to hooks.

        Raises:
            NumericError: The loss or gradient of a step was not finite, and the job does not skip such steps.
        """
        with self.resuming_updates():
            super().deliver_all()

    def report_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Record an evaluation of the user's loop, and report it to hooks."""
        self.deliver_all()
        self.progress.metrics, self.progress.metrics_step = dict(metrics), self.progress.step
        for hook in self.hooks:
            hook.on_evaluation(self, begins=False)

    @contextmanager
    def resuming_updates(self) -> Iterator[None]:
        """Re-enable updates if the block raises ``NumericError``, so that a loop can continue."""
        try:
            yield
        except NumericError:
            self.replica.resume_updates()
            self.pending_steps.clear()
            raise


def make_own_run(
    job: Job, mesh: Mesh, replica: TorchReplica, loader: ShardedLoader, services: RankServices
) -> OwnRun:
    """Return the run of a replica over the data of a loader."""
    job = changed(loader.job_of(job), train={"epochs": math.ceil(loader.num_epochs or 1)})
    run = OwnRun(
        job=job,
        mesh=mesh,
        replica=replica,
        train_reader=loader.reader,
        eval_reader=None,
        policy=policy_of(job, mesh.data.size),
        guard=FiniteGuard(job.health, mesh.world, scaler_skips=job.train.precision == "fp16"),
        progress=loader.progress,
        is_open_ended=loader.num_epochs is None,
    )
    check_data(run)
    run.hooks += [*services.hooks(OBSERVERS), SyncAfterSteps(services.exchange)]
    if mesh.world.rank == 0:
        services.report_started(run)
    loop.begin(run)
    return run


def end_runs(runs: Iterable[OwnRun], *, has_failed: bool) -> None:
    """End the runs of a session.

    Raises:
        NumericError: One of the last steps was not finite; not raised if ``has_failed``.
    """
    for run in runs:
        (loop.report_pending_steps_after_failure if has_failed else loop.end)(run)


AnyOptimizer = torch.optim.Optimizer | Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
"""An optimizer, or a function that creates one from parameters."""


def prepare_replica(
    job: Job, mesh: Mesh, device: torch.device, model: torch.nn.Module, optimizer: AnyOptimizer
) -> TorchReplica:
    """Return the replica of a user's model under the job's strategy, with rank 0's weights on all ranks.

    Raises:
        UserError: The strategy does not support a user's own loop, or requires a function as ``optimizer``.
    """
    strategy = make_strategy(job, mesh)
    name = job.strategy.name
    if strategy.capabilities.owns_schedule:
        raise UserError(
            f"strategy {name} runs the passes of a step itself, and cannot be used in your own training loop",
            hint="describe a job with a task (docs/job.md), or use another strategy",
        )
    before = set(map(id, model.parameters()))
    defer_hooks_after_accumulation(model)
    model = strategy.wrap(model, DevicePlacement(device, job.train))
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(model.parameters())
    elif not before & set(map(id, model.parameters())):
        raise UserError(
            f"strategy {name} replaces the model's parameters, but the optimizer has the original ones",
            hint="give session.prepare a function that makes it: lambda parameters: SGD(parameters)",
        )
    strategy.bind(model, optimizer)
    replica = TorchReplica(
        model=model,
        forward_model=strategy.forward_module(model),
        optimizer=optimizer,
        strategy=strategy,
        data_ranks=mesh.data,
        all_ranks=mesh.world,
        train=job.train,
        health=job.health,
        averaging=None if job.ema is None else Averaging(job.ema),
    )
    replica.broadcast()
    check_replicas_identical(mesh.world, replica.state(copy=False), "at the start")
    # From here on, random numbers (dropout) differ between ranks.
    seed_generators(job.train.seed, mesh.data.rank + 1, 0)
    return replica


class SyncAfterSteps(Hook):
    """Hook that exchanges waiting times and preemption flags between ranks about twice a second."""

    def __init__(self, exchange: PeriodicExchange) -> None:
        self._exchange = exchange

    def on_step(self, run: Run) -> None:
        self._exchange.after_step()


class Step:
    """One optimizer step: iterate over it for this rank's micro-batches, then call ``finish``.

    A rank without micro-batches (possible in a step with fewer than two samples per rank) must call
    ``finish``, too.
    """

    def __init__(self, planned: PlannedStep, run: OwnRun) -> None:
        self.share = planned.share
        self.clock = run.replica.new_clock()
        self._planned = planned
        self._run = run
        self._at = -1  # index of the current micro-batch
        self.number = run.progress.step + 1
        """Number of the step since the start of training, including all restarts; the first is 1."""
        run.replica.begin(planned)

    def __iter__(self) -> Iterator[Any]:
        for number, (_, batch) in enumerate(self._planned):
            self._at = number
            self.clock.end_phase("data")
            yield batch

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of the current micro-batch, given its mean loss, shape []."""
        self.clock.end_phase("forward")
        is_last = self._at == len(self._planned) - 1
        self._run.replica.backward(loss, self._planned.share_at(self._at), is_last=is_last)
        self.clock.end_phase("backward")

    def finish(self, lr: float, *, want_norm: bool = False) -> Outcome:
        """Wait for the other ranks' gradients and update the weights.

        On a GPU this returns before the device has finished. Properties of the outcome, such as ``loss``,
        wait for the device: read them rarely, or read the outcome of an earlier step.

        Raises:
            PeerError: Another rank was lost.
            NumericError: Loss or gradient is not finite, and ``prepare`` does not allow skipping such steps.
                On a GPU it is raised some steps later; the updates in between are skipped, too.
            UserError: Not all micro-batches of the step were read.
        """
        unread = len(self._planned) - 1 - self._at
        if unread:
            raise UserError(
                f"the step was finished with {unread} of its micro-batches unread",
                hint="iterate over the whole step; to leave out a batch, multiply its loss by 0",
            )
        run = self._run
        outcome = run.replica.finish(self.clock, lr, want_norm=want_norm or run.wants_norm)
        with run.resuming_updates():
            loop.after_step(run, self._planned, outcome, lr)
        if run.is_epoch_complete:
            run.progress.finish_epoch()
        return outcome


@dataclass(eq=False)
class ShardedLoader:
    """Loader that shards a dataset over ranks. Checkpoints contain its position.

    Attributes:
        progress: Position in the data, and number of steps so far.
        batch_size: Samples per rank and micro-batch.
        accumulation_steps: Micro-batches per step.
    """

    _run_of: Callable[[TorchReplica, ShardedLoader], OwnRun]
    reader: TorchReader
    progress: Progress
    batch_size: int
    accumulation_steps: int
    num_data_ranks: int
    num_epochs: float | None = None

    @property
    def global_batch_size(self) -> int:
        """Samples per step, over all ranks."""
        return self.batch_size * self.accumulation_steps * self.num_data_ranks

    def job_of(self, job: Job) -> Job:
        """Return a copy of a job with this loader's batch size and accumulation steps."""
        data = {"batch_size_per_rank": self.batch_size, "accumulation_steps": self.accumulation_steps}
        return changed(job, train=data)

    def batch_size_of_lr(self, job: Job) -> int:
        """Return the batch size that scales the learning rate: of all ranks, or of one rank under adasum."""
        return batch_size_of_lr(self.job_of(job), self.num_data_ranks)

    @property
    def epochs_passed(self) -> float:
        """Epochs completed before the current step, including the fraction of the current epoch."""
        return self.progress.epochs_passed

    def epoch(self, epoch: int, replica: TorchReplica) -> Iterator[Step]:
        """Yield the remaining steps of an epoch: after a resume fewer than all, or none."""
        if epoch < self.progress.epoch:
            return
        if epoch > self.progress.epoch:
            self.progress.epoch, self.progress.cursor = epoch, 0
        run = self._run_of(replica, self)
        for planned in loop.rest_of_epoch(run):
            yield Step(planned, run)
        run.deliver_all()


@dataclass(frozen=True)
class SessionMetrics:
    """The Prometheus metrics of this rank, served at ``address`` (None: not served)."""

    address: str | None


@dataclass
class SessionCheckpoints:
    """Saves and resumes a replica and its position in the data."""

    _manager: CheckpointManager
    run: OwnRun
    _reporter: Reporter

    def save(self, metrics: Mapping[str, float] | None = None, *, wait: bool = False) -> None:
        """Save, between two steps; every rank must call it. Writes in the background unless ``wait``.

        Raises:
            NumericError: The loss or gradient of an earlier step was not finite (see ``Step.finish``).
        """
        run = self.run
        run.deliver_all()
        rng = dump_state(*rng_state())
        save_checkpoint(
            self._manager, run.world, run.replica, run.progress, rng, metrics=metrics or {}, wait=wait
        )

    def resume(self) -> bool:
        """Resume from the newest valid checkpoint; return False if there is none.

        ``loader.progress.epoch`` is the first epoch to train afterwards.

        Raises:
            NumericError: The loss or gradient of an earlier step was not finite (see ``Step.finish``).
        """
        run = self.run
        run.deliver_all()
        run.guard.reset()
        if (changes := resume(run, self._manager, TorchBased(), self._reporter)) is None:
            return False
        for change in changes if run.world.rank == 0 else ():
            log.warning("%s", change)
        check_replicas_identical(run.world, run.replica.state(copy=False), "after the resume")
        return True


@dataclass(frozen=True)
class SessionPreemption:
    """Preemption handling of a user's own loop: saves and ends the process when any rank was preempted."""

    _checkpoints: SessionCheckpoints
    _agreement: PreemptionAgreement

    def after_step(self) -> None:
        """Exit if any rank was preempted; every rank must call it after each step.

        Raises:
            SystemExit: A checkpoint was written. The exit code is 75: start again to resume.
            PeerError: Another rank was lost.
        """
        if self._agreement.is_reached and self._checkpoints.run.replica.replicas_identical:
            self._checkpoints.save(wait=True)
            raise SystemExit(PreemptedError.exit_code)


class SessionBase:
    """Services and runs of one rank; ``writes_events``: write ``events.jsonl`` to ``job.run_dir``."""

    def __init__(self, job: Job, world: Communicator, *, writes_events: bool = False) -> None:
        self._job, self.world = job, world
        self._stack = ExitStack()
        self._stack.callback(world.close)
        self.device = choose_device(job, world)
        self._mesh = Mesh.of(world, axes_of(job.strategy, world.size))
        self._runs: dict[tuple[TorchReplica, ShardedLoader], OwnRun] = {}
        self._jobs: dict[TorchReplica, Job] = {}
        run_id = broadcast_json(world, strftime("%Y%m%d-%H%M%S"))
        reporter = Reporter(world.rank, as_json=False, stream=None)
        self._services = RankServices(job, world, run_id, reporter, self._stack)
        if writes_events and world.rank == 0:
            self._services.write_events()
        seed_generators(job.train.seed, 0, 0)

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.world.size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            end_runs(self._runs.values(), has_failed=kind is not None)
        finally:
            self.close()

    def close(self) -> None:
        """Finish writing checkpoints, stop serving metrics, close the communicator. Safe to call twice."""
        self._stack.close()

    def _run(self, replica: TorchReplica, loader: ShardedLoader) -> OwnRun:
        """Return the run of a replica over the data of a loader; the first call creates and begins it."""
        if (replica, loader) not in self._runs:
            job = self._jobs[replica]
            self._runs[replica, loader] = make_own_run(job, self._mesh, replica, loader, self._services)
        return self._runs[replica, loader]

    def _runs_of(self, replica: TorchReplica) -> list[OwnRun]:
        return [run for (of, _), run in self._runs.items() if of is replica]

    def _last_run(self, replica: TorchReplica) -> OwnRun:
        if runs := self._runs_of(replica):
            return runs[-1]
        raise UserError("no step has been made with this replica", hint="call this after loader.epoch(...)")

    def _prepare(
        self, model: torch.nn.Module, optimizer: AnyOptimizer, **changes: Mapping[str, object]
    ) -> TorchReplica:
        """Return a replica for the session's job, after changing fields of the job's sections."""
        job = changed(self._job, **changes)
        replica = prepare_replica(job, self._mesh, self.device, model, optimizer)
        self._jobs[replica] = job
        return replica


def changed(job: Job, **sections: Mapping[str, object]) -> Job:
    """Return a copy of a job with changed fields in its sections; fields that are None are not changed."""
    return job.model_copy(
        update={
            name: getattr(job, name).model_copy(update={k: v for k, v in new.items() if v is not None})
            for name, new in sections.items()
        }
    )
