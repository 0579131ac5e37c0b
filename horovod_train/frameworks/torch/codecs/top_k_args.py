"""Arguments of the codec ``top-k``."""

from __future__ import annotations

from typing import ClassVar

from horovod_train.config.codecs import CodecArguments
from horovod_train.config.fields import Fraction


class Arguments(CodecArguments):
    """Codec that sends the elements with the largest magnitude."""

    residual_copies: ClassVar[int] = 2

    keep: Fraction
    """Fraction of a bucket's elements that is sent per step, such as 0.01; at least one element is sent."""
