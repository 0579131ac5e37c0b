"""MXNet (gluon) on Horovod. Legacy: MXNet ended with 1.9.1; this package is maintained, but not extended.

In a script:

    from horovod_train.frameworks.mxnet import DistributedTrainer, broadcast, init
"""

from horovod_train.frameworks.mxnet.trainer import DistributedTrainer, broadcast, init

__all__ = ["DistributedTrainer", "broadcast", "init"]
