"""A strategy whose ranks compute the same in groups, and a codec."""

from __future__ import annotations

from horovod_train.collectives.base import Mesh
from horovod_train.config.schema import Job
from horovod_train.frameworks.torch import codecs
from horovod_train.frameworks.torch.codecs import Codec
from horovod_train.frameworks.torch.strategies.allreduce.strategy import make_allreduce
from horovod_train.frameworks.torch.strategies.base import Strategy


def copies(mesh: Mesh, job: Job, *, copies: int = 1) -> Strategy:
    """Return a strategy that sums gradients over the ranks that read different samples."""
    del copies  # the axes of the mesh are made of it
    return make_allreduce(mesh.data, job.allreduce)


def rounded(*, to: str = "bf16") -> Codec:
    """Return a codec that rounds gradients."""
    codec: Codec = getattr(codecs, to)()
    return codec
