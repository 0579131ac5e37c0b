"""Exchange of a bucket under the strategy ``zero``: a reduce-scatter that returns this rank's part."""

from __future__ import annotations

import torch

from horovod_train.frameworks.torch.codecs.base import BucketExchange, BucketLayout, Rounds
from horovod_train.frameworks.torch.comm.collectives import TensorCollectives
from horovod_train.frameworks.torch.comm.exchange import wide_type


class ScatteredMessage(BucketExchange):
    """Gradients of a bucket; each rank receives its part of their sum, in at least 32 bits.

    Attributes:
        own: This rank's part of the sum over ranks, and over micro-batches since the last ``clear``.
        begin: Position of the part in the bucket; the last parts may extend beyond the end of the bucket.
        keeps_memory: ``body`` stays allocated between exchanges.
    """

    def __init__(self, layout: BucketLayout, ranks: TensorCollectives) -> None:
        length, dtype = sum(layout.lengths), wide_type(layout.dtype)
        part = -(-length // ranks.size)
        self.begin = ranks.rank * part
        self._whole = torch.zeros(part * ranks.size, dtype=dtype, device=layout.device)
        self.body = self._whole[:length]
        self.own = torch.zeros(part, dtype=dtype, device=layout.device)
        self.size_bytes = self._whole.untyped_storage().nbytes()
        self.keeps_memory = True
        self._is_clear = True

    def allocate(self) -> None:
        """Allocate ``body``, if it was released."""
        storage = self._whole.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.size_bytes)
            self._whole[self.body.numel() :].zero_()

    def release(self) -> None:
        """Free the memory of ``body``, unless ``keeps_memory``."""
        if not self.keeps_memory:
            self._whole.untyped_storage().resize_(0)

    def clear(self) -> None:
        """Make the next exchange overwrite ``own`` instead of adding to it."""
        self._is_clear = True

    def exchange(self, ranks: TensorCollectives, name: str) -> Rounds:
        """Sum ``body`` over ranks, and add this rank's part to ``own``."""
        into = self.own if self._is_clear else torch.empty_like(self.own)
        part = yield ranks.start_reduce_scatter(self._whole, into, name)
        if part is not self.own:
            self.own += part
        self._is_clear = False
        self.release()
