"""MXNet (gluon) on Horovod. Legacy: MXNet ended with 1.9.1; this package is maintained, but not extended.

In a script:

    from horovod_train.plugins.mxnet import DistributedTrainer, broadcast, init
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from horovod_train.config.support import FrameworkSupport, Refused
from horovod_train.plugins.frameworks import attributes_in, compiles_itself

if TYPE_CHECKING:
    from horovod_train.plugins.mxnet.framework import DistributedTrainer, broadcast, init


__all__ = ["DistributedTrainer", "broadcast", "init"]
__getattr__ = attributes_in(
    __name__,
    {"DistributedTrainer": "framework", "broadcast": "framework", "init": "framework"},
)

SUPPORT = FrameworkSupport(
    f"{__name__}.framework:MxnetFramework",
    ("mxnet",),
    "1.9.1",
    "ours, with gluon",
    (
        *compiles_itself("MXNet"),
        Refused(
            "train.precision", "mixed precision of MXNet is not supported (legacy framework)", "use fp32"
        ),
        Refused(
            "lr.momentum_correction",
            "momentum of MXNet is not corrected (legacy framework)",
            "leave it out",
        ),
        Refused("train.deterministic", "MXNet has no such setting", "leave it out"),
        Refused(
            "allreduce.wire_dtype", "gradients of MXNet are not compressed (legacy framework)", "use fp32"
        ),
        Refused("launch.threads_per_rank", "MXNet reads OMP_NUM_THREADS only", "set it in launch.env"),
    ),
    note="legacy, frozen: requires its own environment with numpy < 1.24",
    modules=frozenset({"mxnet"}),
)
