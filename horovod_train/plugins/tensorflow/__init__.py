"""TensorFlow on Horovod: jobs, and a gradient tape for users' own training loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from horovod_train.config.support import FrameworkSupport
from horovod_train.plugins.frameworks import attributes_in, compiles_itself, lacks_bfloat16

if TYPE_CHECKING:
    from horovod_train.plugins.tensorflow.framework import DistributedGradientTape, broadcast, init


__all__ = ["DistributedGradientTape", "broadcast", "init"]
__getattr__ = attributes_in(
    __name__,
    {"DistributedGradientTape": "framework", "broadcast": "framework", "init": "framework"},
)

SUPPORT = FrameworkSupport(
    f"{__name__}.framework:TensorflowFramework",
    ("tensorflow", "tensorflow-cpu"),
    "2.21.0",
    "ours, in tf.function",
    (*compiles_itself("TensorFlow"), lacks_bfloat16("TensorFlow")),
    modules=frozenset({"tensorflow"}),
    instrumented={
        "tensorflow": f"{__name__}.script_hooks:watch_tensorflow",
        "horovod.tensorflow": f"{__name__}.script_hooks:watch_horovod_tensorflow",
        "keras.src.optimizers.base_optimizer": f"{__name__}.script_hooks:watch_optimizers",
    },
)
