"""TensorFlow on Horovod.

framework.py   makes everything for a job
collectives.py the ranks, through Horovod
exchange.py    gradients, summed over ranks inside the graph
replica.py     the training step
task.py        what a user brings
tape.py        for users with their own loop
"""

from horovod_train.frameworks.tensorflow.tape import DistributedGradientTape, broadcast, init

__all__ = ["DistributedGradientTape", "broadcast", "init"]
