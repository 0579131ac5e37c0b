"""TensorFlow on Horovod; ``tape.py`` is for users' own training loops."""

from horovod_train.frameworks.tensorflow.tape import DistributedGradientTape, broadcast, init

__all__ = ["DistributedGradientTape", "broadcast", "init"]
