"""PyTorch on Horovod.

framework.py   creates the components of a job
task.py        the interface of a user's task; batches from a dataset
device.py      the rank's GPU, and random generators
memory.py      estimates of memory
sizes.py       units of a model, counts of FLOPs, and choice of the layers that recompute activations
comm/          communication between ranks
codecs.py      gradient codecs
strategies/    parallelism strategies
step/          the training step
state/         weights, buffers and optimizer state as arrays of a checkpoint
verify/        comparison of a strategy's steps with those of the plain model
"""

from __future__ import annotations

from horovod_train.config.support import FrameworkSupport

SUPPORT = FrameworkSupport(
    f"{__name__}.framework:TorchFramework",
    ("torch",),
    "2.13.0",
    "ours",
    affected_by=("pytorch-optimizer", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
    modules=frozenset({"torch"}),
    uses_torch_binding=True,
    instrumented={
        "torch": "horovod_train.scripts.torch_hooks:watch_torch",
        "horovod.torch": "horovod_train.scripts.torch_hooks:watch_horovod_torch",
    },
)
