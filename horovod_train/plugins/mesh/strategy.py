"""Combined parallelism over a device mesh with a data, a pipeline and a tensor axis.

pipeline > 1                 pipeline parallelism, with tensor parallelism within each stage
pipeline = 1, shard          ``fully_shard`` along the data axis, of layers sharded along the tensor axis
pipeline = 1, no shard       tensor parallelism
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from horovod_train.collectives.base import Mesh
from horovod_train.config.schema import Job
from horovod_train.frameworks.torch.comm.groups import set_timeout
from horovod_train.frameworks.torch.strategies.base import DevicePlacement, Strategy
from horovod_train.frameworks.torch.strategies.fsdp.strategy import Fsdp
from horovod_train.frameworks.torch.strategies.tensor_parallel.strategy import (
    TensorParallel,
    modules_of_plan,
    plan_of,
    shard_layers,
)
from horovod_train.plugins.pipeline.strategy import Pipeline

LENGTHS = ("pipeline_parallel_degree", "tensor_parallel_degree", "shard_data_parallel")
"""Arguments that are not passed to ``Fsdp``."""


def mesh(ranks: Mesh, job: Job, *, plan: Mapping[str, str] | None = None, **args: Any) -> Strategy:
    """Return the strategy for a model that is split along several axes.

    ``plan`` and ``args`` are described in ``Arguments`` of this package.
    """
    of_pipeline = {name: args.pop(name) for name in ("schedule", "virtual_stages_per_rank", "balance")}
    is_sharded = args.pop("shard_data_parallel")
    of_fsdp = {name: value for name, value in args.items() if name not in LENGTHS}
    if ranks.axes.pipeline > 1:
        return Pipeline(ranks, job, plan=plan, **of_pipeline)
    if is_sharded:
        return ShardedLayers(ranks, job, plan=plan, **of_fsdp)
    return TensorParallel(ranks, job, plan=plan)


class ShardedLayers(Fsdp):
    """FSDP along the data axis, of layers that are sharded along the tensor axis."""

    def __init__(self, ranks: Mesh, job: Job, *, plan: Mapping[str, str] | None, **args: Any) -> None:
        super().__init__(ranks, job, **args)
        self._plan = plan
        self._num_tensor = ranks.axes.tensor

    def _device_mesh(self, model: torch.nn.Module, move_to_device: DevicePlacement) -> DeviceMesh:
        if self._num_tensor == 1:
            return super()._device_mesh(model, move_to_device)
        axes, names = self._sharding_axes()
        whole = init_device_mesh(
            move_to_device.device.type, (*axes, self._num_tensor), mesh_dim_names=(*names, "tensor")
        )
        for name in (*names, "tensor"):
            set_timeout(whole.get_group(name), self._job.health)
        placed = (
            move_to_device(model) if move_to_device.weights is None else model
        )  # else: a model on the meta device
        shard_layers(placed, whole["tensor"], modules_of_plan(model, self._plan or plan_of(model)))
        return whole[names]
