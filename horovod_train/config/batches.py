"""The global batch of a step, and the micro-batches of a rank, as arithmetic."""

from __future__ import annotations

import math

from horovod_train.config.schema import Job, Train


def for_ranks(job: Job, num_ranks: int) -> Job:
    """Return a job with the accumulation steps that ``train.global_batch_size`` needs on a number of ranks.

    Args:
        job: The job.
        num_ranks: Number of data-parallel ranks.
    """
    if job.train.global_batch_size is None:
        return job
    per_rank = -(-job.train.global_batch_size // num_ranks)
    accumulation_steps = -(-per_rank // job.train.batch_size_per_rank)
    train = job.train.model_copy(update={"accumulation_steps": accumulation_steps})
    return job.model_copy(update={"train": train})


def batch_size_at(train: Train, full_size: int, epochs: float) -> int:
    """Return the samples of the step that begins after a number of epochs.

    Args:
        train: The job's ``train`` section.
        full_size: Global batch after the batch warm-up.
        epochs: Epochs passed, including the fraction of the current epoch.

    >>> train = Train(batch_warmup={"start": 32, "length": 4})
    >>> [batch_size_at(train, 128, epochs) for epochs in (0, 1, 2.5, 4, 9)]
    [32, 56, 92, 128, 128]
    """
    warmup = train.batch_warmup
    if warmup is None or epochs >= warmup.length.epochs:
        return full_size
    return min(full_size, int(warmup.start + (full_size - warmup.start) * epochs / warmup.length.epochs))


def samples_of_growth(start: int, full_size: int, num_steps: float) -> float:
    """Return the samples in which a batch grows, linearly in the samples, if it is to take a number of steps.

    With W samples, a step after x samples advances x by s + (B - s) x / W; the integral of its inverse from 0
    to W is the number of steps: n = W ln(B / s) / (B - s). Batches are whole, so that n is approximate.

    >>> round(samples_of_growth(32, 128, 100)), samples_of_growth(64, 64, 100)
    (6925, 6400)
    """
    if full_size <= start:
        return start * num_steps
    return num_steps * (full_size - start) / math.log(full_size / start)
