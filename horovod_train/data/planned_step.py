"""One optimizer step of one rank: the samples that it reads, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from horovod_train.data.shard import MicroBatch, StepShare


@dataclass(frozen=True)
class PlannedStep:
    """The samples of one step, for any training loop.

    All steps of an epoch read from one stream, so a loop must run them in order, each once.

    Attributes:
        share: This rank's part of the step's samples.
        is_last: Whether this is the last step of the epoch, or of the job.
        epoch: Number of the epoch, from 0.
    """

    share: StepShare
    _stream: Iterator[Any]
    is_last: bool = False
    epoch: int = 0

    def __len__(self) -> int:
        """Return the number of micro-batches; 0 is possible in a short step."""
        return len(self.share.micro_batches)

    def __iter__(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield each micro-batch with its batch."""
        for micro_batch in self.share.micro_batches:
            yield micro_batch, next(self._stream)

    def share_at(self, place: int) -> float:
        """Return the part of the step's samples that is in a micro-batch; 0: there is no such micro-batch."""
        micro_batches = self.share.micro_batches
        return micro_batches[place].share if place < len(micro_batches) else 0.0

    def padded(self, num_micro_batches: int, spare: Callable[[], object]) -> Iterator[tuple[float, Any]]:
        """Yield batches, and ``spare()`` for missing ones, for loops that require equal numbers on all ranks.

        Yields:
            The part of the step's samples that is in the batch (0 for a spare batch), and the batch.
        """
        for place in range(num_micro_batches):
            share = self.share_at(place)
            yield share, next(self._stream) if share else spare()


def planned_steps(
    shares: Iterable[StepShare], read: Callable[[list[MicroBatch]], Iterator[Any]], epoch: int = 0
) -> list[PlannedStep]:
    """Return the steps of a rank; ``read`` returns the stream of batches of the given micro-batches."""
    shares = list(shares)
    stream = read([micro_batch for share in shares for micro_batch in share.micro_batches])
    last = len(shares) - 1
    return [PlannedStep(share, stream, place == last, epoch) for place, share in enumerate(shares)]
