"""Codec ``top-k``: sends the elements with the largest magnitude."""

from __future__ import annotations

from horovod_train.config.fields import Fraction, Section
from horovod_train.config.support import CodecSupport


class Arguments(Section):
    """Codec that sends the elements with the largest magnitude."""

    keep: Fraction
    """Fraction of a bucket's elements that is sent per step, such as 0.01; at least one element is sent."""


SUPPORT = CodecSupport(f"{__name__}.codec:TopK", Arguments, residual_copies=2)
