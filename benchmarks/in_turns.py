"""Our training steps and those of a loop by hand in one process, in turns of a few steps.

Two processes that do the same differ by several percent on a shared machine; neighbouring steps of one
process do not. Both use the same Horovod, with its fusion, which a loop by hand needs: so this compares
models whose gradients fit into one of our buckets.
usage: as ``python -m horovod_train worker --events JOB``, with JOB alone
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from horovod_train import worker
from horovod_train.training import loop
from horovod_train.training.run import Run

BLOCK_STEPS = 6


def is_ours(step: int) -> bool | None:
    """Whether the step of that number, counted from 0, is ours; None: the first of a turn, cold caches."""
    return None if step % BLOCK_STEPS == 0 else step // BLOCK_STEPS % 2 == 0


class ByHand:
    """What a careful user writes with Horovod alone, for the task of a run."""

    def __init__(self, run: Run) -> None:
        self._task: Any = run.replica.task  # type: ignore[attr-defined]
        self._hvd: Any = run.world.hvd  # type: ignore[attr-defined]
        self._model = self._task.model()
        plain = torch.optim.SGD(self._model.parameters(), lr=0.01 * run.world.size, momentum=0.9)
        self._optimizer = self._hvd.DistributedOptimizer(plain, self._model.named_parameters())
        self._hvd.broadcast_parameters(self._model.state_dict(), root_rank=0)
        self._batches = self._endless_batches(run)
        self._model.train()

    def _endless_batches(self, run: Run) -> Iterator[Any]:
        dataset = self._task.train_data()
        sampler: Any = DistributedSampler(dataset, run.world.size, run.world.rank)
        loader: Any = DataLoader(dataset, run.job.train.batch_size_per_rank, sampler=sampler)
        for epoch in count():
            sampler.set_epoch(epoch)
            yield from loader

    def step(self) -> None:
        """Train on one batch."""
        batch = next(self._batches)
        self._optimizer.zero_grad()
        loss = self._task.loss(self._model, batch)
        loss.backward()
        self._optimizer.step()
        loss.item()


def train_in_turns(run: Run) -> None:
    """Train as ``loop.train`` does, and by hand in between."""
    by_hand = ByHand(run)
    loop.begin(run)
    while run.num_steps_left != 0:
        for step in loop.rest_of_epoch(run):
            lr = run.policy.at(run.progress.epochs_passed)
            outcome = run.replica.step(step, lr, want_norm=run.wants_norm)
            loop.after_step(run, step, outcome, lr)
            if run.progress.step % BLOCK_STEPS == 0:
                for _ in range(BLOCK_STEPS):
                    by_hand.step()
        if run.is_epoch_complete:
            loop.after_epoch(run, evaluated=loop.finish_epoch(run))
    loop.end(run)


if __name__ == "__main__":
    worker.train = train_in_turns
    sys.exit(worker.main(worker.WorkerOptions(Path(sys.argv[1]), as_events=True)))
