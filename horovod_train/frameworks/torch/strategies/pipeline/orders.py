"""Pipeline schedules: the order of a rank's forward and backward passes, and its idle time.

A model is split into stages, one or several per rank. Rank ``rank`` runs the stages ``chunk x num_ranks +
rank``. With p ranks, m micro-batches and v stages per rank:

    gpipe        all forward passes, then all backward passes; stores m activations
    1f1b         each backward pass as early as possible; stores p - rank activations
    interleaved  1f1b with v stages per rank; shorter stages shorten fill and drain of the pipeline

The fraction of time in which a rank is idle (the bubble) is (p - 1) / (m + p - 1) for gpipe and 1f1b, and
(p - 1) / (v m + p - 1) for interleaved, if all passes have the same duration.

Sources: Huang et al., "GPipe", arXiv:1811.06965; Narayanan et al., "PipeDream-Flush" and the interleaved
schedule in "Efficient Large-Scale Language Model Training on GPU Clusters", arXiv:2104.04473.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Pass:
    """Forward or backward pass of a micro-batch through the stage ``chunk`` of this rank."""

    kind: Literal["forward", "backward"]
    chunk: int
    micro_batch: int


def order_of(
    schedule: str, *, rank: int, num_ranks: int, num_chunks: int, num_micro_batches: int
) -> list[Pass]:
    """Return the ordered passes of a rank.

    Because messages are sent asynchronously, ranks do not deadlock if their orders respect the dependencies.
    ``num_chunks``, the number of stages per rank, may be larger than 1 only with interleaved.
    """
    # Interleaved stages alternate after num_ranks micro-batches; passes of surplus ones are removed below.
    rounded = num_micro_batches if num_chunks == 1 else -(-num_micro_batches // num_ranks) * num_ranks
    width = rounded if num_chunks == 1 else num_ranks
    groups = [range(first, first + width) for first in range(0, rounded, width)]
    chunks = range(num_chunks)
    forward = [Pass("forward", chunk, at) for group in groups for chunk in chunks for at in group]
    backward = [Pass("backward", chunk, at) for group in groups for chunk in reversed(chunks) for at in group]
    if schedule == "gpipe":
        num_ahead = len(forward)
    elif num_chunks == 1:
        num_ahead = num_ranks - rank - 1
    else:
        num_ahead = (num_chunks - 1) * num_ranks + 2 * (num_ranks - rank - 1)
    num_ahead = min(num_ahead, len(forward))
    order = forward[:num_ahead]
    for at in range(len(forward) - num_ahead):
        order += [forward[num_ahead + at], backward[at]]
    order += backward[len(forward) - num_ahead :]
    return [each for each in order if each.micro_batch < num_micro_batches]


def bubble(num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> float:
    """Return the fraction of time in which a rank is idle.

    >>> bubble(4, 8)
    0.2727272727272727
    >>> bubble(4, 8, num_chunks=2)
    0.15789473684210525
    """
    return (num_ranks - 1) / (num_chunks * num_micro_batches + num_ranks - 1)
