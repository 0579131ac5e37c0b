"""In which order a rank of a pipeline makes its forward and backward passes, and how long it stands idle.

A model is cut into stages, one or several for each rank: stage ``chunk x num_ranks + rank`` is a rank's. With
p ranks, m micro-batches and v stages for each rank:

    gpipe        all forward passes, then all backward passes; keeps m activations
    1f1b         each backward pass as soon as it can be made; keeps p - rank activations
    interleaved  1f1b with v stages for each rank: shorter stages, a shorter way in and out

The part of the time in which a rank stands idle (the bubble) is (p - 1) / (m + p - 1) for the first two and
(p - 1) / (v m + p - 1) for the last, if all passes take as long.

Sources: Huang et al., "GPipe", arXiv:1811.06965; Narayanan et al., "PipeDream-Flush" and the interleaved
schedule in "Efficient Large-Scale Language Model Training on GPU Clusters", arXiv:2104.04473.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward or backward pass of one stage.

    Attributes:
        kind: Which of the two.
        chunk: Which of the rank's stages.
        micro_batch: Of which micro-batch.
    """

    kind: Literal["forward", "backward"]
    chunk: int
    micro_batch: int


def order_of(
    schedule: str, *, rank: int, num_ranks: int, num_chunks: int, num_micro_batches: int
) -> list[Pass]:
    """Return the passes of a rank in their order.

    Messages are sent as soon as they can be, so that ranks cannot wait for each other for ever as long as
    their orders do not contradict what depends on what.

    Args:
        schedule: gpipe, 1f1b or interleaved.
        rank: Place in the pipeline.
        num_ranks: Of the pipeline.
        num_chunks: Stages of each rank; more than 1 only with interleaved.
        num_micro_batches: Of the step.
    """
    # Interleaved stages take turns in groups of num_ranks; what the last group lacks is left out below.
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
    """Return the part of the time in which a rank stands idle.

    >>> bubble(4, 8)
    0.2727272727272727
    >>> bubble(4, 8, num_chunks=2)
    0.15789473684210525
    """
    return (num_ranks - 1) / (num_chunks * num_micro_batches + num_ranks - 1)
