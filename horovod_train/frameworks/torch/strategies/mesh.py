"""Several ways to share a model at once: ranks along a data, a pipeline and a tensor axis.

pipeline > 1                 stages along one axis, in each of them layers along the other
pipeline = 1, shard          ``fully_shard`` over ranks that read different samples, of layers that are
                             shared along the tensor axis
pipeline = 1, no shard       tensor parallelism
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from horovod_train.collectives.mesh import Mesh
from horovod_train.config.schema import Job
from horovod_train.frameworks.torch.comm.process_group import set_timeout
from horovod_train.frameworks.torch.strategies.base import DevicePlacement, Strategy
from horovod_train.frameworks.torch.strategies.fsdp import Fsdp
from horovod_train.frameworks.torch.strategies.pipeline.strategy import Pipeline
from horovod_train.frameworks.torch.strategies.tensor_parallel import (
    TensorParallel,
    modules_of_plan,
    plan_of,
    share_layers,
)

LENGTHS = ("pipeline", "tensor", "shard")
"""Arguments that the mesh itself has."""


def mesh(ranks: Mesh, job: Job, *, plan: Mapping[str, str] | None = None, **args: Any) -> Strategy:
    """Return what trains a model that is shared along several axes.

    Args:
        ranks: Arranged along the axes.
        job: The job.
        plan: How layers are shared, by name patterns; None: the model's own plan.
        args: Of ``pipeline``, or of ``fsdp``, and ``shard``.
    """
    of_pipeline = {name: args.pop(name) for name in ("schedule", "chunks_per_rank", "balance")}
    is_sharded = args.pop("shard")
    of_fsdp = {name: value for name, value in args.items() if name not in LENGTHS}
    if ranks.axes.pipeline > 1:
        return Pipeline(ranks, job, plan=plan, **of_pipeline)
    if is_sharded:
        return ShardedLayers(ranks, job, plan=plan, **of_fsdp)
    return TensorParallel(ranks, job, plan=plan)


class ShardedLayers(Fsdp):
    """Shards the parts of layers that ranks along the tensor axis have.

    Args:
        ranks: Arranged along data and tensor axes.
        job: The job.
        plan: How layers are shared.
        args: Those of ``Fsdp``.
    """

    def __init__(self, ranks: Mesh, job: Job, *, plan: Mapping[str, str] | None, **args: Any) -> None:
        super().__init__(ranks, job, **args)
        self._plan = plan
        self._num_tensor = ranks.axes.tensor

    def _device_mesh(self, model: torch.nn.Module, placing: DevicePlacement) -> DeviceMesh:
        """Share layers; return the ranks that share what this one has of them."""
        if self._num_tensor == 1:
            return super()._device_mesh(model, placing)
        axes, names = self._sharding_axes()
        whole = init_device_mesh(
            placing.device.type, (*axes, self._num_tensor), mesh_dim_names=(*names, "tensor")
        )
        for name in (*names, "tensor"):
            set_timeout(whole.get_group(name), self._job.health)
        placed = placing(model) if placing.weights is None else model  # weights have no memory yet
        share_layers(placed, whole["tensor"], modules_of_plan(model, self._plan or plan_of(model)))
        return whole[names]
