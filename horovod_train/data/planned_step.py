"""One optimizer step as one rank makes it: which samples it reads, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from horovod_train.data.shard import MicroBatch, StepShare


@dataclass(frozen=True)
class PlannedStep:
    """The samples of one step, for any training loop.

    The steps of an epoch read from one stream, so they are made in their order, each of them once.

    Attributes:
        share: This rank's part of the step's samples.
        is_last: No other step follows before the end of the epoch, or of the job.
    """

    share: StepShare
    _stream: Iterator[Any]
    is_last: bool = False

    def __len__(self) -> int:
        """Return the number of micro-batches; 0 when there are fewer samples than ranks."""
        return len(self.share.micro_batches)

    def __iter__(self) -> Iterator[tuple[MicroBatch, Any]]:
        """Read the micro-batches, each with its batch."""
        for micro_batch in self.share.micro_batches:
            yield micro_batch, next(self._stream)

    def share_at(self, place: int) -> float:
        """Return the part of the step's samples that is in a micro-batch; 0 where there is none."""
        micro_batches = self.share.micro_batches
        return micro_batches[place].share if place < len(micro_batches) else 0.0

    def padded(self, num_micro_batches: int, spare: Callable[[], object]) -> Iterator[tuple[float, Any]]:
        """Read as many micro-batches as every rank reads, for loops that want the same number of each.

        Args:
            num_micro_batches: How many.
            spare: Gives a batch where this rank has none.

        Yields:
            The part of the step's samples that is in the batch, 0 for a spare one, and the batch.
        """
        for place in range(num_micro_batches):
            share = self.share_at(place)
            yield share, next(self._stream) if share else spare()


def planned_steps(
    shares: Iterable[StepShare], read: Callable[[list[MicroBatch]], Iterator[Any]]
) -> list[PlannedStep]:
    """Return steps with these shares.

    Args:
        shares: A rank's part of each step, in order.
        read: Returns the stream of the batches of all these micro-batches.
    """
    shares = list(shares)
    stream = read([micro_batch for share in shares for micro_batch in share.micro_batches])
    last = len(shares) - 1
    return [PlannedStep(share, stream, place == last) for place, share in enumerate(shares)]
