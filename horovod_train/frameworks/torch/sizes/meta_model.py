"""Run a task's step with fake tensors, which have shape and dtype but no memory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_map

from horovod_train.config.schema import Data, Job
from horovod_train.data.shard import MicroBatch
from horovod_train.errors import UserError, result_of, translated
from horovod_train.frameworks.torch.reader import Placement, TorchReader
from horovod_train.frameworks.torch.state.local_model import AUTOCAST_DTYPES
from horovod_train.frameworks.torch.task import TorchTask, checked_loss


def meta_model(task: TorchTask) -> torch.nn.Module:
    """Create the task's model with fake tensors. Must be called in a ``FakeTensorMode``."""

    def on_meta_device() -> torch.nn.Module:
        with torch.device("meta"):
            return task.model()

    model, _ = result_of(on_meta_device)
    if model is None:  # some models read numbers from tensors in their constructors
        with unset_fake_temporarily():
            model = task.model()
    empty: dict[torch.Tensor, torch.Tensor] = {}  # shared weights remain shared
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in empty:
                fake = torch.nn.Parameter(empty_like(parameter), parameter.requires_grad)
                empty[parameter] = fake
            setattr(module, name, empty[parameter])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, empty.setdefault(buffer, empty_like(buffer)))
    return model


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized CPU tensor of the same shape and dtype."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def batch_of(job: Job, task: TorchTask) -> Any:
    """Read a micro-batch of a task, as real tensors."""
    reader = TorchReader(task.train_data(), Data(), job.train.seed, Placement(torch.device("cpu")))
    length = min(job.train.batch_size_per_rank, len(reader))
    return next(iter(reader.read(0, np.arange(length), [MicroBatch(0, length, share=1.0)])))


def to_fake_tensor(batch: Any) -> Any:
    """Replace the tensors of a batch by fake tensors. Must be called in a ``FakeTensorMode``."""
    return tree_map(lambda leaf: empty_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)


def loss_of(job: Job, task: TorchTask, model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of a batch, computed in the job's precision."""
    dtype = AUTOCAST_DTYPES.get(job.train.precision)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        return checked_loss(task.loss(model, batch))


def explained(job: Job) -> AbstractContextManager[None]:
    """Return a context that replaces exceptions by a ``UserError``: the step cannot run with fake tensors."""
    return translated(
        lambda error: UserError(
            f"a step of {job.task} cannot run with fake tensors: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            hint="does the model read numbers from tensors (item(), an if about one), or load weights? "
            "watch horovod_train_resident_memory_peak_bytes of a run instead",
        )
    )
