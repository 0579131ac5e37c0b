"""Codec ``powersgd``: sends a low-rank approximation of each gradient matrix."""

from __future__ import annotations

from horovod_train.config.fields import Count, Section
from horovod_train.config.support import CodecSupport


class Arguments(Section):
    """Codec that sends a low-rank approximation of each gradient matrix."""

    rank: Count = 2
    """Rank of the approximation: a matrix of n by m elements costs rank * (n + m) elements."""


SUPPORT = CodecSupport(f"{__name__}.codec:PowerSgd", Arguments, residual_copies=2)
