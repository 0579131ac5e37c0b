"""Arguments and properties of codecs that can be read without importing PyTorch.

A codec in module ``NAME.py`` declares both as a class ``Arguments`` in ``NAME_args.py``, in the same folder.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import ClassVar

from horovod_train.config.fields import Section
from horovod_train.registry import CODECS


class CodecArguments(Section):
    """Arguments of a codec.

    Attributes:
        residual_copies: Number of gradient-sized residual buffers per rank, in at least 32 bits. Codecs with
            residuals do not support ``train.precision: fp16``, because the loss scale may change before a
            residual is sent.
    """

    residual_copies: ClassVar[int] = 0


def arguments_of(name: str) -> type[CodecArguments] | None:
    """Return the ``Arguments`` of a codec, or None if it declares none or is named as ``module:Class``."""
    if name not in CODECS.rows:
        return None
    module = f"{CODECS.location(name).partition(':')[0]}_args"
    try:
        if find_spec(module) is None:
            return None
    except ImportError:
        return None
    declared: type[CodecArguments] = import_module(module).Arguments
    return declared
