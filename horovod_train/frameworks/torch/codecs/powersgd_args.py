"""Arguments of the codec ``powersgd``."""

from __future__ import annotations

from typing import ClassVar

from horovod_train.config.codecs import CodecArguments
from horovod_train.config.fields import Count


class Arguments(CodecArguments):
    """Codec that sends a low-rank approximation of each gradient matrix."""

    residual_copies: ClassVar[int] = 2

    rank: Count = 2
    """Rank of the approximation: a matrix of n by m elements costs rank * (n + m) elements."""
