"""PyTorch's ``DataParallel``: one process splits each batch among several GPUs.

``DataParallel`` copies the model to all GPUs in each step, and runs one Python thread per GPU. This strategy
is for comparison, and for code that cannot run in several processes.
"""

from __future__ import annotations

import torch

from horovod_train.collectives.base import Mesh
from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.strategies.allreduce.strategy import SingleRankStrategy
from horovod_train.frameworks.torch.strategies.base import DevicePlacement


class DataParallel(SingleRankStrategy):
    """Strategy that passes the model, wrapped in ``torch.nn.DataParallel``, to the task.

    Raises:
        UserError: There are several ranks.
    """

    def __init__(self, mesh: Mesh, job: Job) -> None:  # (the registry passes a job to each strategy)
        if mesh.world.size > 1:
            raise UserError(
                f"strategy data_parallel: it is one process with several GPUs, and {mesh.world.size} ranks "
                "were started",
                hint="start one rank (-n 1), or use strategy: allreduce with a rank for each GPU",
            )

    def wrap(self, model: torch.nn.Module, move_to_device: DevicePlacement) -> torch.nn.Module:
        """Return the model on the first GPU.

        Raises:
            UserError: There are fewer than two GPUs.
        """
        num_gpus = torch.cuda.device_count() if move_to_device.device.type == "cuda" else 0
        if num_gpus < 2:
            raise UserError(
                f"strategy data_parallel: it shares batches among GPUs, and this process sees {num_gpus}",
                hint="use strategy: allreduce",
            )
        return move_to_device(model)

    def forward_module(self, module: torch.nn.Module) -> torch.nn.Module:
        return torch.nn.DataParallel(module)
