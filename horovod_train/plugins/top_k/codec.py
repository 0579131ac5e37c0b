"""Top-k sparsification: a step sends the elements of a gradient with the largest magnitude.

A rank adds its residual to the gradients of a bucket, sends the ``keep`` fraction of elements with the
largest magnitude and their indices, and stores the others as its new residual (error feedback). Each rank
adds up the elements of all ranks in rank order, so the sums are bitwise equal. Residuals differ between ranks
and are written to checkpoints.

A sent element costs 8 bytes (32-bit value, 32-bit index), or 12 bytes if it is float64. In the all-gather, a
rank receives ``size`` (number of ranks) times the bytes that it sends. The codec suits slow networks and few
ranks.

Source: Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", arXiv:1809.07599.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch

from horovod_train.frameworks.torch.codecs import (
    BucketExchange,
    BucketLayout,
    Codec,
    Rounds,
    replace_if_used,
)
from horovod_train.frameworks.torch.comm.collectives import TensorCollectives
from horovod_train.frameworks.torch.state.rank_state import RESIDUAL, Rule, StateKey
from horovod_train.plugins.top_k import Arguments

INDEX = torch.int32


class TopK(Codec):
    """Codec that sends the elements with the largest magnitude.

    Args:
        keep: Fraction of a bucket's elements that is sent per step, 0 < keep <= 1; rounded up.

    Raises:
        ValueError: ``keep`` is out of range.
    """

    rules = MappingProxyType({RESIDUAL: Rule.SUM})

    def __init__(self, *, keep: float) -> None:
        self._keep = Arguments(keep=keep).keep

    def message(self, layout: BucketLayout) -> BucketExchange:
        return TopKMessage(layout, self._keep)


class TopKMessage(BucketExchange):
    """BucketExchange that gathers one tensor of bytes: elements, their indices and the trailer."""

    def __init__(self, layout: BucketLayout, keep: float) -> None:
        dtype = torch.float64 if layout.dtype == torch.float64 else torch.float32
        length = sum(layout.lengths)
        self._layout = layout
        self.body = torch.zeros(length, dtype=dtype, device=layout.device)
        self.trailer = torch.zeros(layout.trailer_length, dtype=dtype, device=layout.device)
        self._residual = torch.zeros_like(self.body)
        self._new_residual = torch.zeros_like(self.body)  # at a fixed address, for CUDA graphs
        self._has_exchanged = False
        self._num_sent = math.ceil(keep * length)
        sizes = [self._num_sent * dtype.itemsize, self._num_sent * INDEX.itemsize, self.trailer.nbytes]
        self._sizes_bytes, self.size_bytes = sizes, sum(sizes)

    def exchange(self, ranks: TensorCollectives, name: str) -> Rounds:
        """Gather the elements with the largest magnitude of all ranks, and add them up."""
        assert self.trailer is not None
        self.body.add_(self._residual)
        indices = self.body.abs().topk(self._num_sent, sorted=False).indices
        parts = (self.body[indices], indices.to(INDEX), self.trailer)
        self._new_residual.copy_(self.body)
        self._new_residual[indices] = 0
        self._has_exchanged = True
        gathered = yield ranks.start_allgather(torch.cat([part.view(torch.uint8) for part in parts]), name)
        self.body.zero_()
        self.trailer.zero_()
        for sent in torch.split(gathered, self.size_bytes):
            # Cloned, because ``view`` requires elements to be aligned to their size.
            values, places, trailer = (part.clone() for part in torch.split(sent, self._sizes_bytes))
            self.body.index_add_(0, places.view(INDEX), values.view(self.body.dtype))
            self.trailer.add_(trailer.view(self.trailer.dtype))

    def state(self) -> Mapping[StateKey, torch.Tensor]:
        return {(name, RESIDUAL): part for name, part in self._layout.split(self._residual).items()}

    def commit(self, *, is_used: torch.Tensor | bool) -> None:
        """Store the new residual if the step is used."""
        if self._has_exchanged:
            replace_if_used(self._residual, self._new_residual, is_used)
