"""Horovod's bindings: it has a library of its own for each of three frameworks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from horovod_train.horovod.cuda import torch_build


@dataclass(frozen=True)
class Binding:
    """A binding.

    Attributes:
        distributions: Alternative packages that provide the framework.
        variable: Name of the framework in the variables of Horovod's build, such as ``HOROVOD_WITH_...``.
        sum_of_ones: Statements that set ``total`` to the sum of three ones over ranks, with the binding as
            ``hvd``.
    """

    distributions: tuple[str, ...]
    variable: str
    sum_of_ones: str


BINDINGS: Mapping[str, Binding] = {
    "torch": Binding(
        ("torch",),
        "PYTORCH",
        'import torch; total = hvd.allreduce(torch.ones(3), op=hvd.Sum, name="check")',
    ),
    "tensorflow": Binding(
        ("tensorflow", "tensorflow-cpu"),
        "TENSORFLOW",
        "import tensorflow as tf; total = hvd.allreduce(tf.ones(3), op=hvd.Sum).numpy()",
    ),
    "mxnet": Binding(
        ("mxnet",),
        "MXNET",
        "import mxnet as mx; total = hvd.allreduce(mx.nd.ones(3), average=False).asnumpy()",
    ),
}


def framework_version(name: str) -> str | None:
    """Return the version of an installed framework; of PyTorch with its local version (2.13.0+cu130)."""
    if name == "torch":
        torch = torch_build()
        return None if torch is None else torch.version
    for distribution in BINDINGS[name].distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None
