r"""The critical batch size, measured directly by branches of a training.

From checkpoints of one training, short branches train on the same samples with 1, 2, 4, ... times the batch,
and with the rate that the scaling rule gives for it. The critical batch size at a checkpoint is the largest
batch whose loss at the end of the branch is not above that of the smallest batch by more than a tolerance.
Between two batches, the loss is interpolated in the logarithm of the batch.

Source: Merrill et al., "Critical Batch Size Revisited", arXiv:2505.23971.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from horovod_train.checkpoint.store import list_checkpoints, read_checkpoint
from horovod_train.config.load import changed
from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.report.document import Block, Chart, Curve, Table, Text
from horovod_train.study.results import CRITICAL, Study
from horovod_train.study.run import run_trial
from horovod_train.study.trials import Trial

BASE = "critical-base"
TOLERANCE = 0.01
"""Tolerated relative increase of the loss."""


@dataclass(frozen=True)
class Branching:
    """Settings of a measurement of the critical batch size.

    Attributes:
        epochs: Epochs of the training after which branches begin.
        multiples: Factors of the batch; the first is 1.
        length_epochs: Length of a branch, in epochs.
        num_seeds: Number of orders of the samples.
    """

    epochs: tuple[int, ...]
    multiples: tuple[int, ...] = (1, 2, 4, 8, 16)
    length_epochs: float = 1.0
    num_seeds: int = 1

    def check(self, job: Job) -> None:
        """Raise UserError if branches do not fit in the training of a job."""
        ends = {
            "train.max_steps": job.train.max_steps is not None,
            "train.max_samples": job.train.max_samples is not None,
            "train.stop_at_step": job.train.stop_at_step is not None,
            "evaluation.early_stopping": job.evaluation.early_stopping is not None,
        }
        if found := [path for path, is_set in ends.items() if is_set]:
            raise UserError(
                f"--critical-batch: {found[0]} may end the training before a branch",
                hint=f"use --set {found[0]}=null",
            )
        if not 0 < self.length_epochs < math.inf:
            raise UserError(f"--branch-length {self.length_epochs:g} must be a number of epochs above 0")
        if job.train.most_epochs == 1:
            raise UserError(
                "--critical-batch: the job has one epoch, and branches begin after one",
                hint="use --set train.epochs",
            )
        if not self.epochs or max(self.epochs) + self.length_epochs > job.train.most_epochs:
            raise UserError(
                f"branches of {self.length_epochs:g} epochs cannot begin after {max(self.epochs, default=0)} "
                f"epochs of {job.train.most_epochs}",
                hint="use --branch-epochs with earlier epochs, or a shorter --branch-length",
            )
        if self.multiples[0] != 1 or list(self.multiples) != sorted(set(self.multiples)):
            raise UserError(
                f"--multiples {','.join(map(str, self.multiples))} must be increasing and begin with 1",
                hint="such as 1,2,4,8",
            )


@dataclass(frozen=True)
class Branch:
    """End of a branch: epoch of its begin, seed, samples per step, and the loss of its evaluation."""

    epoch: int
    seed: int
    batch: int
    loss: float


def default_epochs(num_epochs: int) -> tuple[int, ...]:
    """Return the epochs of branches: after a tenth, a quarter, a half and three quarters of the training.

    >>> default_epochs(14), default_epochs(2)
    ((1, 4, 7, 10), (1,))
    """
    found = {max(1, round(num_epochs * part)) for part in (0.1, 0.25, 0.5, 0.75)}
    return tuple(sorted(epoch for epoch in found if epoch < num_epochs))


def measure(study: Study, job: Job, branching: Branching, report: Callable[[str], None]) -> None:
    """Train the base and all branches that are not in the study yet; results are added to the study.

    Raises:
        UserError: The base or a branch fails, or its evaluation has no loss.
    """
    branching.check(job)
    base = _trial(job, study.folder, BASE, {"checkpoint.keep_last": job.train.most_epochs + 1})
    for multiple in branching.multiples:  # refuses a batch that the scaling rule does not support
        _trial(job, study.folder, BASE, _sizes(base.global_batch_size * multiple))
    if study.result_of(base) is None:
        report(
            f"training {BASE}: {job.train.most_epochs} epochs at a global batch of {base.global_batch_size}"
        )
        study.results[BASE] = run_trial(study, base, report)
        study.save()
    if study.results[BASE].problem:
        raise UserError(f"{BASE} failed: {study.results[BASE].problem}", hint=f"delete {study.folder}")
    checkpoints = checkpoints_by_epoch(study.folder / BASE / "checkpoints")
    if missing := [epoch for epoch in branching.epochs if epoch not in checkpoints]:
        raise UserError(f"{BASE} has no checkpoint after epoch {missing[0]}", hint=f"delete {study.folder}")
    if any(branch["length"] != branching.length_epochs for branch in study.critical):
        raise UserError(
            f"{study.folder} has branches of another length", hint="use --output, or delete this folder"
        )
    known = {(b["epoch"], b["seed"], b["batch"]) for b in study.critical}
    for epoch in branching.epochs:
        for seed in range(job.train.seed, job.train.seed + branching.num_seeds):
            for multiple in branching.multiples:
                batch = base.global_batch_size * multiple
                if (epoch, seed, batch) in known:
                    continue
                branch = _train_branch(study, job, checkpoints[epoch], epoch, seed, batch, branching, report)
                study.critical.append({**asdict(branch), "length": branching.length_epochs})
                study.save()
                report(f"epoch {epoch}, seed {seed}, batch {batch}: loss {branch.loss:.5f}")


def _train_branch(
    study: Study,
    job: Job,
    checkpoint: Path,
    epoch: int,
    seed: int,
    batch: int,
    branching: Branching,
    report: Callable[[str], None],
) -> Branch:
    progress = progress_of(checkpoint)
    num_samples = branching.length_epochs * progress["order"]["num_samples"]
    settings = {
        "train.seed": seed,
        **_sizes(batch),
        "train.stop_at_step": progress["step"] + max(1, round(num_samples / batch)),
        "checkpoint.resume": "required",
    }
    trial = _trial(job, study.folder, f"critical-e{epoch}-b{batch}-s{seed}", settings)
    own = study.folder / trial.name / "checkpoints" / checkpoint.name
    if not own.exists():
        partial = own.with_name(f".copy-{own.name}")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(checkpoint, partial)
        partial.rename(own)
    result = run_trial(study, trial, report)
    shutil.rmtree(own.parent, ignore_errors=True)
    if result.problem:
        raise UserError(f"{trial.name} failed: {result.problem}")
    if "loss" not in result.metrics:
        raise UserError(
            f"{trial.name}: its evaluation has no metric named loss",
            hint="the critical batch size is measured by the loss of the evaluation",
        )
    return Branch(epoch, seed, batch, result.metrics["loss"])


def _sizes(batch: int) -> dict[str, Any]:
    return {"train.global_batch_size": batch, "train.accumulation_steps": 1}


def _trial(job: Job, folder: Path, name: str, settings: Mapping[str, Any]) -> Trial:
    fields = {"name": name, "run_dir": str(folder), "checkpoint.dir": None, "checkpoint.every": "1 epoch"}
    described = changed(job, {**fields, **settings}, name)
    return Trial.of(CRITICAL, described.launch.num_ranks or 1, described)


def progress_of(checkpoint: Path) -> Mapping[str, Any]:
    """Return the progress that a checkpoint contains.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    progress: Mapping[str, Any] = read_checkpoint(checkpoint, ["state"]).documents["state"]["progress"]
    return progress


def checkpoints_by_epoch(folder: Path) -> dict[int, Path]:
    """Return the checkpoints at the end of epochs, by number of completed epochs."""
    found = {}
    for stored in list_checkpoints(folder):
        progress = progress_of(stored.path)
        if progress["cursor"] == 0:
            found[int(progress["epoch"])] = stored.path
    return found


def critical_batch(losses: Mapping[int, float], tolerance: float) -> float | None:
    """Return the largest batch whose loss is at most (1 + tolerance) x that of the smallest batch.

    Args:
        losses: Loss by batch.
        tolerance: Tolerated relative increase.

    Returns:
        The batch in samples, interpolated in its logarithm; None: no batch has exceeded the tolerance.

    >>> critical_batch({8: 1.0, 16: 1.0, 32: 1.02}, tolerance=0.01)
    22.627416997969522
    """
    batches = sorted(losses)
    limit = losses[batches[0]] + tolerance * abs(losses[batches[0]])
    for small, large in pairwise(batches):
        if losses[large] > limit:
            part = (limit - losses[small]) / (losses[large] - losses[small])
            return float(small * (large / small) ** part)
    return None


def mean_losses(branches: Sequence[Mapping[str, float]]) -> dict[int, dict[int, float]]:
    """Return the mean loss over seeds by epoch and batch, both in ascending order."""
    found: dict[int, dict[int, list[float]]] = {}
    for branch in sorted(branches, key=lambda branch: (branch["epoch"], branch["batch"])):
        of_epoch = found.setdefault(int(branch["epoch"]), {})
        of_epoch.setdefault(int(branch["batch"]), []).append(branch["loss"])
    return {
        epoch: {batch: fmean(values) for batch, values in of_epoch.items()}
        for epoch, of_epoch in found.items()
    }


def batch_warmup(critical: Mapping[int, float], full: float) -> tuple[int, float] | None:
    """Return the start and the length in epochs of a batch warm-up that stays below the critical batch size.

    Args:
        critical: Critical batch size by epoch.
        full: Global batch after the warm-up.

    Returns:
        ``train.batch_warmup.start``, and its length in epochs; None: none is needed, or the batch is above
        the critical batch size at the last epoch.

    >>> batch_warmup({1: 32.0, 4: 64.0, 8: 160.0}, 128)
    (16, 9.333333333333334)
    """
    below = {epoch: batch for epoch, batch in critical.items() if batch < full}
    if not below or critical[max(critical)] < full:
        return None
    start = max(1, math.floor(min(below.values()) / 2))
    return start, max(epoch * (full - start) / (batch - start) for epoch, batch in below.items())


def critical_blocks(branches: Sequence[Mapping[str, float]]) -> Iterator[Block]:
    """Yield the table, the chart and the suggested batch warm-up of a measurement."""
    losses = mean_losses(branches)
    found = {epoch: critical_batch(of_epoch, TOLERANCE) for epoch, of_epoch in losses.items()}
    largest = {epoch: max(of_epoch) for epoch, of_epoch in losses.items()}
    rows = [
        (str(epoch), f"at least {largest[epoch]}" if batch is None else f"{batch:.0f}", str(largest[epoch]))
        for epoch, batch in found.items()
    ]
    yield Text(
        f"The largest batch whose loss after a branch is at most {TOLERANCE:.0%} above that of the smallest "
        "batch, on the same samples."
    )
    yield Table("By epoch", ("epoch", "critical batch size", "largest examined"), tuple(rows))
    curves = [
        Curve(f"epoch {epoch}", tuple(map(float, of_epoch)), tuple(of_epoch.values()))
        for epoch, of_epoch in losses.items()
    ]
    yield Chart("Loss of branches by batch", "batch (samples)", "loss", tuple(curves))
    known = {epoch: float(largest[epoch]) if batch is None else batch for epoch, batch in found.items()}
    full = max(known.values())
    warmup = batch_warmup(known, full)
    if warmup is not None:
        start, epochs = warmup
        yield Text(
            f"A batch that grows to {full:.0f} without exceeding it: train.batch_warmup: {{start: {start}, "
            f"length: {epochs:.3g} epochs}} with train.global_batch_size: {full:.0f}."
        )
