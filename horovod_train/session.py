"""API for a user's own training loop: ``horovod_train.init()`` (see docs/own-loop.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from horovod_train.collectives.base import mean_over_ranks
from horovod_train.config.data import Data
from horovod_train.config.load import job_from
from horovod_train.config.optimization import Checkpoint, LearningRate
from horovod_train.data.order import settings_of
from horovod_train.data.shard import EvalMicroBatches, InOrder, num_steps
from horovod_train.frameworks.base import Dataset
from horovod_train.frameworks.devices import join
from horovod_train.frameworks.torch.comm.collectives import TorchCommunicator
from horovod_train.frameworks.torch.step.replica import TorchReplica
from horovod_train.frameworks.torch.task import Placement, TorchReader
from horovod_train.horovod.fingerprint import environment_fingerprint
from horovod_train.lr.policy import EpochLength, LearningRatePolicy, policy_of_section
from horovod_train.own_loop import (
    AnyOptimizer,
    SessionBase,
    SessionCheckpoints,
    SessionMetrics,
    SessionPreemption,
    ShardedLoader,
    changed,
)
from horovod_train.training.hooks.saving import PreemptionAgreement, PreemptionRequest
from horovod_train.training.run import Progress


def init(
    name: str = "job", *, device: Literal["auto", "cpu", "cuda"] = "auto", seed: int = 0,
    run_dir: str | Path | None = None, **sections: Any,
) -> Session:  # fmt: skip
    """Initialize communication with the ranks that were started with this process; return the session.

    Args:
        name: Name of the job, a label of its metrics.
        device: Device of the model; auto: the rank's own GPU if there is one.
        seed: Seed of this rank's generators. It must be equal on all ranks, so that models start identically.
        run_dir: Folder for ``events.jsonl``, which the web page reads; None: it is not written.
        sections: Further sections of a job, such as ``strategy={"name": "zero"}``; see docs/job.md.

    Raises:
        HorovodTrainError: A section is not valid, or Horovod is missing or cannot start.
    """
    train = {**sections.pop("train", {}), "device": device, "seed": seed}
    where = {} if run_dir is None else {"run_dir": str(run_dir)}
    tree = {"name": name, "task": "own:Loop", "train": train, **where, **sections}
    job = job_from(tree, Path.cwd(), "horovod_train.init()", environ={})
    return Session(job, join(TorchCommunicator, job), writes_events=run_dir is not None)


class Session(SessionBase):
    """One rank of a job with a user's own training loop."""

    def prepare(
        self,
        model: torch.nn.Module,
        optimizer: AnyOptimizer,
        *,
        precision: Literal["fp32", "bf16", "fp16"] | None = None,
        clip_grad_norm: float | None = None,
        non_finite: Literal["stop", "skip"] | None = None,
        bucket_size_mib: float | None = None,
        wire_dtype: Literal["fp32", "fp16", "bf16"] | None = None,
    ) -> TorchReplica:
        """Broadcast rank 0's weights, and return the replica, which sums gradients over ranks.

        Settings that are None have the values of the job (``init``). Every rank must call this.

        Args:
            model: A model on ``session.device``. In the loop, call ``replica.forward_model`` instead.
            optimizer: Optimizer of the model's parameters, or a function that creates it. Its ``lr`` has no
                effect: each step sets the rate of each parameter group, times the group's ``lr_scale``.
            precision: Precision of forward passes that run inside ``replica.autocast()``.
            clip_grad_norm: Maximum L2 norm of the global gradient.
            non_finite: If loss or gradient is not finite: stop with NumericError, or skip the update.
            bucket_size_mib: Approximate size of a bucket of gradients.
            wire_dtype: Data type of gradients in collectives.
        """
        return self._prepare(
            model,
            optimizer,
            train={"precision": precision, "clip_grad_norm": clip_grad_norm},
            allreduce={"bucket_size_mib": bucket_size_mib, "wire_dtype": wire_dtype},
            health={"non_finite": non_finite},
        )

    def loader(
        self, dataset: Dataset, *, batch_size: int, accumulation_steps: int = 1, shuffle: bool = True,
        num_workers: int = 0,
    ) -> ShardedLoader:  # fmt: skip
        """Return a loader that shards a dataset over ranks; an epoch contains each sample exactly once.

        Args:
            dataset: An object with ``__len__`` and ``__getitem__``.
            batch_size: Samples per rank and micro-batch.
            accumulation_steps: Micro-batches per step.
            shuffle: Use a new random order in each epoch.
            num_workers: Number of loader processes of this rank.
        """
        seed = self._job.train.seed
        reader = TorchReader(dataset, Data(num_workers=num_workers), seed, Placement(self.device))
        ranks = self._mesh.data.size
        order = settings_of(
            dataset,
            len(reader),
            seed=seed,
            shuffle=shuffle,
            samples_per_epoch=None,
            row_size=batch_size * accumulation_steps * ranks,
        )
        progress = Progress(order)
        return ShardedLoader(self._run, reader, progress, batch_size, accumulation_steps, ranks)

    def learning_rate(self, loader: ShardedLoader, *, epochs: float, **lr: Any) -> LearningRatePolicy:
        """Return the learning-rate policy for a loader's global batch; under adasum, for one rank's batch.

        Args:
            loader: The loader; its ``num_epochs`` is set to ``epochs``.
            epochs: Length of the whole training.
            lr: Fields of the job description's ``lr`` section, such as ``base_lr=0.1``.
        """
        loader.num_epochs = epochs
        length = EpochLength(num_steps(len(loader.reader), 0, loader.global_batch_size), len(loader.reader))
        return policy_of_section(LearningRate(**lr), loader.batch_size_of_lr(self._job), epochs, length)

    def eval_batches(self, replica: TorchReplica, dataset: Dataset, *, batch_size: int) -> Iterator[Any]:
        """Return this rank's batches of a dataset, in order; each sample is on exactly one rank.

        Every rank must call this, because buffers such as running means are averaged first.

        Raises:
            NumericError: The loss or gradient of an earlier step was not finite (see ``Step.finish``).
        """
        for run in self._runs_of(replica):
            run.deliver_all()
        replica.sync_buffers()
        reader = TorchReader(dataset, Data(), self._job.train.seed, Placement(self.device))
        ranks = self._mesh.data
        mine = EvalMicroBatches(len(reader), batch_size, ranks.rank, ranks.size)
        return reader.read(0, InOrder(len(reader)), mine)

    def mean(self, sums: Mapping[str, tuple[float, int]]) -> dict[str, float]:
        """Return exact means over all ranks, from each rank's sums and counts; every rank must call it."""
        return mean_over_ranks(self._mesh.data, sums)

    def report_evaluation(self, replica: TorchReplica, metrics: Mapping[str, float]) -> None:
        """Record the metrics of an evaluation after a step, for Prometheus, events and trackers."""
        self._last_run(replica).report_evaluation(metrics)

    def metrics(self, *, port: int = 9400, host: str = "127.0.0.1") -> SessionMetrics:
        """Serve this rank's Prometheus metrics on ``port + local_rank``, or the next free port."""
        self._services.job = changed(self._job, metrics={"host": host, "port": port})
        return SessionMetrics(self._services.serve_metrics())

    def checkpoints(
        self, directory: str | Path, replica: TorchReplica, loader: ShardedLoader, *, keep_last: int = 3
    ) -> SessionCheckpoints:
        """Return an object that saves and resumes a replica and its position in the data.

        Args:
            directory: Folder that every rank can read.
            replica: The replica to save.
            loader: The loader whose position is saved.
            keep_last: Number of checkpoints that are retained.
        """
        job = self._job.model_copy(update={"checkpoint": Checkpoint(dir=str(directory), keep_last=keep_last)})
        manager = self._services.open_checkpoints(environment_fingerprint(), job)
        return SessionCheckpoints(manager, self._run(replica, loader), self._services.reporter)

    def preemption(self, checkpoints: SessionCheckpoints) -> SessionPreemption:
        """Handle SIGTERM and SIGUSR1 to any rank as a request to save and exit; main thread only."""
        request = PreemptionRequest()
        request.listen()
        agreement = PreemptionAgreement(self.world, lambda: request.is_received, self._services.exchange)
        return SessionPreemption(checkpoints, agreement)
