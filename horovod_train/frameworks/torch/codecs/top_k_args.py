"""Arguments of the codec ``top-k``."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from horovod_train.config.codecs import CodecArguments


class Arguments(CodecArguments):
    """Sends the elements with the largest magnitude."""

    residual_copies: ClassVar[int] = 2

    keep: Annotated[float, Field(gt=0, le=1)]
    """Fraction of a bucket's elements that is sent, such as 0.01; at least one element."""
