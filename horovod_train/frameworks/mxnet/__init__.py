"""MXNet (gluon) on Horovod: legacy. MXNet ended with 1.9.1; this room is kept working and gains nothing.

collectives.py the ranks, through Horovod
exchange.py    gradients, summed over ranks
trainer.py     for users with their own gluon loop
framework.py   makes everything for a job
replica.py     the training step
task.py        what a user brings

    from horovod_train.frameworks.mxnet import DistributedTrainer, broadcast, init
"""

from horovod_train.frameworks.mxnet.trainer import DistributedTrainer, broadcast, init

__all__ = ["DistributedTrainer", "broadcast", "init"]
