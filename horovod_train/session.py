"""The parts of the trainer, for people who keep their own PyTorch loop.

    import horovod_train as ht

    with ht.init() as session:
        replica = session.prepare(model, optimizer)
        loader = session.loader(dataset, batch_size=32)
        policy = session.learning_rate(loader, epochs=10, base_lr=0.1, reference_batch_size=32)
        for epoch in range(10):
            for step in loader.epoch(epoch, replica):
                for images, labels in step:
                    step.backward(functional.cross_entropy(model(images), labels))
                step.finish(lr=policy.at(loader.epochs_passed))

The same script trains alone (``python train.py``) and on many ranks
(``horovodrun -np 4 python train.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import strftime
from typing import Any, Literal, NoReturn, Self

import numpy as np
import torch

from horovod_train.checkpoint.arrays import dump_state
from horovod_train.checkpoint.manager import CheckpointManager
from horovod_train.collectives.base import Communicator, broadcast_json, mean_over_ranks
from horovod_train.config.schema import Allreduce, Checkpoint, Data, Health, Job, LearningRate, Train
from horovod_train.data.planned_step import PlannedStep
from horovod_train.data.shard import eval_micro_batches
from horovod_train.errors import PreemptedError, UserError
from horovod_train.frameworks.base import Dataset
from horovod_train.frameworks.join import join
from horovod_train.frameworks.torch.comm.collectives import TorchCommunicator
from horovod_train.frameworks.torch.framework import choose_device, seed_generators
from horovod_train.frameworks.torch.reader import Placement, TorchReader
from horovod_train.frameworks.torch.state.blobs import load_rng_state, rng_state
from horovod_train.frameworks.torch.step.deferred import Outcome
from horovod_train.frameworks.torch.step.replica import TorchReplica
from horovod_train.frameworks.torch.strategies.allreduce import summed_gradients
from horovod_train.health.desync import check_replicas_identical
from horovod_train.health.finite import FiniteGuard
from horovod_train.horovod.fingerprint import environment_fingerprint
from horovod_train.lr.policy import LearningRatePolicy
from horovod_train.telemetry.exporter import Exporter
from horovod_train.telemetry.recorder import Recorder
from horovod_train.training.hooks.preemption import PreemptionAgreement, PreemptionRequest
from horovod_train.training.parts import changes_since, resume_from, save_checkpoint
from horovod_train.training.pending_steps import PendingSteps, StepReport
from horovod_train.training.plan import plan_epoch
from horovod_train.training.progress import DataOrder, Progress
from horovod_train.training.watch import StepRecords, StepWatch

log = logging.getLogger(__name__)


def init(name: str = "job", *, device: Literal["auto", "cpu", "cuda"] = "auto", seed: int = 0) -> Session:
    """Join the ranks this process was started with; a world of one when it was started alone.

    Args:
        name: Name of the job, a label of its metrics.
        device: Where the model will live; auto: the rank's own GPU when there is one.
        seed: Seeds this rank's generators; equal on all ranks, so that models start equal.

    Raises:
        EngineError: Started as one of several ranks, and Horovod is missing or cannot start.
    """
    job = Job(name=name, task="own:Loop", train=Train(device=device, seed=seed))
    return Session(job, join(TorchCommunicator, job))


class Session:
    """One rank's place in the world, and the parts it trains with."""

    def __init__(self, job: Job, world: Communicator) -> None:
        self._job = job
        self._watches: dict[TorchReplica, StepWatch] = {}
        self._stack = ExitStack()
        self.world = world
        self._stack.callback(world.close)
        self.device = choose_device(job, world)
        seed_generators(job.train.seed, 0, 0)

    @property
    def rank(self) -> int:
        """This process's number."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.world.size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            for watch in self._watches.values() if kind is None else ():
                watch.flush()
        finally:
            self.close()

    def close(self) -> None:
        """Finish writing checkpoints, stop serving metrics, leave the world. Safe to call twice."""
        self._stack.close()

    def prepare(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
        clip_grad_norm: float | None = None,
        non_finite: Literal["stop", "skip"] = "stop",
        bucket_size_mib: float = 8.0,
        wire_dtype: Literal["fp32", "fp16", "bf16"] = "fp32",
    ) -> TorchReplica:
        """Return the replica of a model: rank 0's weights on every rank, gradients kept equal.

        Args:
            model: On ``session.device``.
            optimizer: Over its parameters. Each step sets its learning rate, that of all groups alike but
                for a group's ``lr_scale``: its own rate, and a scheduler of PyTorch, change nothing.
            precision: Of the forward pass, inside ``replica.autocast()``.
            clip_grad_norm: Largest L2 norm of the global gradient; None: no clipping.
            non_finite: What a step does whose loss or gradient is NaN or infinite: raise NumericError, or
                leave the weights alone, ten times in a row at most.
            bucket_size_mib: Gradients travel in pieces of about this size.
            wire_dtype: Their type on the way.
        """
        train = self._job.train.model_copy(update={"precision": precision, "clip_grad_norm": clip_grad_norm})
        allreduce = Allreduce(bucket_size_mib=bucket_size_mib, wire_dtype=wire_dtype)
        health = Health(non_finite=non_finite)
        strategy = summed_gradients(self.world, allreduce)
        strategy.bind(model, optimizer)
        replica = TorchReplica(
            model=model,
            optimizer=optimizer,
            strategy=strategy,
            world=self.world,
            train=train,
            health=health,
        )
        guard = FiniteGuard(health, self.world, scaler_skips=precision == "fp16")
        self._watches[replica] = StepWatch(replica, guard, PendingSteps(replica.lag_steps))
        replica.broadcast()
        check_replicas_identical(self.world, replica.state(copy=False), "at the start")
        # From here on, what is random (dropout) is the rank's own.
        seed_generators(train.seed, self.rank + 1, 0)
        return replica

    def loader(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        accumulation_steps: int = 1,
        shuffle: bool = True,
        num_workers: int = 0,
    ) -> ShardedLoader:
        """Return a loader that shares a dataset exactly: every sample once per epoch.

        Args:
            dataset: Anything with ``__len__`` and ``__getitem__``.
            batch_size: Samples per rank and micro-batch.
            accumulation_steps: Micro-batches per step.
            shuffle: A new order each epoch.
            num_workers: Loader processes of this rank.
        """
        seed = self._job.train.seed
        reader = TorchReader(dataset, Data(num_workers=num_workers), seed, Placement(self.device))
        progress = Progress(DataOrder(len(reader), seed, shuffle))
        return ShardedLoader(self.world, reader, progress, batch_size, accumulation_steps, self._watches)

    def learning_rate(self, loader: ShardedLoader, *, epochs: float, **lr: Any) -> LearningRatePolicy:
        """Return the learning-rate policy for a loader's global batch.

        Args:
            loader: Gives the global batch.
            epochs: Length of the whole training.
            lr: Fields of the job description's ``lr`` section, such as ``base_lr=0.1``.
        """
        return LearningRatePolicy(LearningRate(**lr), loader.global_batch_size, epochs)

    def eval_batches(self, replica: TorchReplica, dataset: Dataset, *, batch_size: int) -> Iterator[Any]:
        """Return this rank's batches of a dataset, in order: every sample on exactly one rank.

        Every rank calls it: buffers such as running means are made equal first.

        Raises:
            NumericError: A step before was not finite: as ``Step.finish``.
        """
        self._watches[replica].flush()
        replica.sync_buffers()
        reader = TorchReader(dataset, Data(), self._job.train.seed, Placement(self.device))
        mine = eval_micro_batches(len(reader), batch_size, self.rank, self.size)
        return reader.read(0, np.arange(len(reader)), mine)

    def mean(self, sums: Mapping[str, tuple[float, int]]) -> dict[str, float]:
        """Return exact means over all ranks, from each rank's sums and counts."""
        return mean_over_ranks(self.world, sums)

    def metrics(self, *, port: int = 9400, host: str = "127.0.0.1") -> SessionMetrics:
        """Serve this rank's Prometheus metrics on ``port + local_rank``; a port in use moves on."""
        run = broadcast_json(self.world, strftime("%Y%m%d-%H%M%S"))
        recorder = Recorder(self._job.name, run, self.world, self.world.size)
        exporter = Exporter(recorder.registry, host, port + self.world.local_rank)
        self._stack.callback(exporter.close)
        records = StepRecords(recorder)
        self._stack.callback(records.close)
        return SessionMetrics(records, exporter.address)

    def checkpoints(
        self, directory: str | Path, replica: TorchReplica, loader: ShardedLoader, *, keep_last: int = 3
    ) -> SessionCheckpoints:
        """Return what saves and resumes a replica and its place in the data.

        Args:
            directory: Folder that every rank can read.
            replica: What is saved.
            loader: Its place in the data is saved too.
            keep_last: How many of the newest are kept.
        """
        manager = CheckpointManager(
            Path(directory).resolve(),
            Checkpoint(keep_last=keep_last),
            self.world,
            self._job.model_dump(mode="json"),
            environment=environment_fingerprint(),
        )
        self._stack.callback(manager.close)
        return SessionCheckpoints(self.world, manager, replica, loader, self._watches[replica])

    def preemption(self, checkpoints: SessionCheckpoints) -> SessionPreemption:
        """Take SIGTERM and SIGUSR1 to any rank for the wish that all save and leave; main thread only.

        Args:
            checkpoints: What saves them.
        """
        request = PreemptionRequest()
        request.listen()
        return SessionPreemption(checkpoints, PreemptionAgreement(self.world, lambda: request.is_received))

    def leaving(self, *_: object) -> NoReturn:
        """Tell the name that this method has now."""
        raise UserError("session.leaving is session.preemption now", hint="call it by that name")


class Step:
    """One optimizer step: iterate over it for this rank's micro-batches, then ``finish`` it.

    There may be no micro-batch, when an epoch's last step has fewer samples than there are ranks;
    the rank still takes part.
    """

    def __init__(
        self, planned: PlannedStep, replica: TorchReplica, progress: Progress, watch: StepWatch
    ) -> None:
        self.share = planned.share
        self.clock = replica.new_clock()
        self._planned = planned
        self._replica = replica
        self._progress = progress
        self._watch = watch
        self._at = -1
        self.lag_steps = replica.lag_steps
        self.number = progress.step + 1
        """Counted from the beginning of training through all restarts; the first is 1."""
        replica.begin(planned)

    def __iter__(self) -> Iterator[Any]:
        for number, (_, batch) in enumerate(self._planned):
            self._at = number
            self.clock.lap("data")
            yield batch

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of the current micro-batch, given its mean loss, shape []."""
        self.clock.lap("forward")
        is_last = self._at == len(self._planned) - 1
        self._replica.backward(loss, self._planned.share_at(self._at), is_last=is_last)
        self.clock.lap("backward")

    def finish(self, lr: float, *, want_norm: bool = False) -> Outcome:
        """Wait for the other ranks' gradients and update the weights.

        On a GPU this returns while it works. What the outcome says (``loss`` and the others) is waited for
        on demand: ask seldom, or for that of some steps ago.

        Raises:
            PeerError: Another rank was lost.
            NumericError: Loss or gradient is not finite, and ``prepare`` was not told to skip such steps.
                On a GPU it comes some steps later; those were left out, too.
            UserError: Not all micro-batches of the step were read.
        """
        unread = len(self._planned) - 1 - self._at
        if unread:
            raise UserError(
                f"the step was finished with {unread} of its micro-batches unread",
                hint="iterate over the whole step; to leave out a batch, multiply its loss by 0",
            )
        outcome = self._replica.finish(self.clock, lr, want_norm=want_norm)
        self._progress.advance(self.share.num_samples)
        passed = self._progress.epochs_passed
        if self._progress.cursor == self._progress.order.num_samples:
            self._progress.finish_epoch()
        self._watch.add(StepReport(self._progress.step, passed, self.share, lr, outcome))
        return outcome


@dataclass
class ShardedLoader:
    """Shards a dataset over ranks; its position is saved and restored."""

    _world: Communicator
    _reader: TorchReader
    progress: Progress
    batch_size: int
    accumulation_steps: int
    _watches: Mapping[TorchReplica, StepWatch]

    @property
    def global_batch_size(self) -> int:
        """Samples per step, over all ranks."""
        return self.batch_size * self.accumulation_steps * self._world.size

    @property
    def epochs_passed(self) -> float:
        """Epochs with the fraction of the current one, before the step that is being made."""
        return self.progress.epochs_passed

    def epoch(self, epoch: int, replica: TorchReplica) -> Iterator[Step]:
        """Yield the steps an epoch still has: all of them, or after a resume the rest.

        An epoch that is complete already yields nothing.
        """
        if epoch < self.progress.epoch:
            return
        if epoch > self.progress.epoch:
            self.progress.epoch, self.progress.cursor = epoch, 0
        planned = plan_epoch(
            self._world,
            self._reader,
            self.progress,
            batch_size_per_rank=self.batch_size,
            accumulation_steps=self.accumulation_steps,
        )
        for step in planned:
            yield Step(step, replica, self.progress, self._watches[replica])
        self._watches[replica].flush()


@dataclass(frozen=True)
class SessionMetrics:
    """Records steps as Prometheus metrics; ``address`` says where they are served, None: nowhere."""

    _records: StepRecords
    address: str | None

    def record(self, step: Step, outcome: Outcome, lr: float, epochs: float) -> None:
        """Record one step: on a GPU, when it is known what it turned out to be."""
        report = StepReport(step.number, epochs, step.share, lr, outcome)
        self._records.add(report, lag_steps=step.lag_steps)


@dataclass
class SessionCheckpoints:
    """Saves and resumes a replica and its place in the data."""

    _world: Communicator
    _manager: CheckpointManager
    _replica: TorchReplica
    _loader: ShardedLoader
    _watch: StepWatch

    def save(self, metrics: Mapping[str, float] | None = None, *, wait: bool = False) -> None:
        """Save, between two steps; every rank calls it. Writes in the background unless ``wait``.

        Raises:
            NumericError: A step before was not finite: as ``Step.finish``.
        """
        self._watch.flush()
        rng = dump_state(*rng_state())
        save_checkpoint(
            self._manager,
            self._world,
            self._replica,
            self._loader.progress,
            rng,
            metrics=metrics or {},
            wait=wait,
        )

    def resume(self) -> bool:
        """Resume from the newest valid checkpoint; False when there is none.

        Afterwards ``loader.progress.epoch`` is the epoch to continue with.

        Raises:
            NumericError: A step before was not finite: as ``Step.finish``.
        """
        self._watch.start_again()
        resumed = self._manager.latest()
        if resumed is None:
            return False
        progress, seed = self._loader.progress, self._loader.progress.order.seed
        changes = changes_since(resumed, progress.order)
        resume_from(
            self._world,
            resumed,
            self._replica,
            progress,
            load_rng_state,
            lambda: seed_generators(seed, self._world.rank + 1, progress.step),
        )
        check_replicas_identical(self._world, self._replica.state(copy=False), "after the resume")
        self._manager.mark_resumed(resumed.name, changes)
        for change in changes if self._world.rank == 0 else ():
            log.warning("changed since %s: %s", resumed.name, change)
        return True


@dataclass(frozen=True)
class SessionPreemption:
    """Saves and ends the process when any rank was preempted."""

    _checkpoints: SessionCheckpoints
    _agreement: PreemptionAgreement

    def after_step(self) -> None:
        """Leave if the ranks agree to; every rank calls it after each of its steps.

        Raises:
            SystemExit: Everything is saved; with exit code 75 ("run me again").
            PeerError: Another rank was lost.
        """
        if self._agreement.reached():
            self._checkpoints.save(wait=True)
            raise SystemExit(PreemptedError.exit_code)
