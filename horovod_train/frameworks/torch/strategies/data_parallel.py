"""One process that shares each batch among several GPUs, with PyTorch's ``DataParallel``.

Copies of the model are made in each step, and one Python thread starts the work of all GPUs. It is there for
comparison, and for code that cannot have several processes.
"""

from __future__ import annotations

import torch

from horovod_train.collectives.mesh import Mesh
from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.strategies.allreduce import SingleRankStrategy
from horovod_train.frameworks.torch.strategies.base import DevicePlacement


class DataParallel(SingleRankStrategy):
    """Gives the task the wrapper in the model's place.

    Args:
        mesh: Of one rank.
        job: The job.

    Raises:
        UserError: There are several ranks.
    """

    def __init__(self, mesh: Mesh, job: Job) -> None:  # (all are made with a job)
        if mesh.world.size > 1:
            raise UserError(
                f"strategy data_parallel: it is one process with several GPUs, and {mesh.world.size} ranks "
                "were started",
                hint="start one rank (-n 1), or use strategy: allreduce with a rank for each GPU",
            )

    def wrap(self, model: torch.nn.Module, placing: DevicePlacement) -> torch.nn.Module:
        """Return the model on the first GPU.

        Raises:
            UserError: There are fewer than two GPUs.
        """
        num_gpus = torch.cuda.device_count() if placing.device.type == "cuda" else 0
        if num_gpus < 2:
            raise UserError(
                f"strategy data_parallel: it shares batches among GPUs, and this process sees {num_gpus}",
                hint="use strategy: allreduce",
            )
        return placing(model)

    def forward_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return the wrapper."""
        return torch.nn.DataParallel(module)
