"""Base of strategies that use PyTorch's collectives."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from horovod_train.collectives.mesh import Mesh
from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.comm.collectives import tensor_communicator
from horovod_train.frameworks.torch.comm.process_group import init_process_group, new_subgroup
from horovod_train.frameworks.torch.strategies.base import Capabilities, DevicePlacement, Strategy


class TorchDistributed(Strategy):
    """Base of strategies whose gradients PyTorch or DeepSpeed sums during the backward pass."""

    capabilities = Capabilities(collective_passes=True)

    def __init__(self, mesh: Mesh, job: Job) -> None:
        self._mesh = mesh
        self._ranks = tensor_communicator(mesh.world)
        self._data = tensor_communicator(mesh.data)
        self._job = job

    def wrap(self, model: torch.nn.Module, move_to_device: DevicePlacement) -> torch.nn.Module:
        """Start PyTorch's process group; return the model on its device."""
        self._start_groups(move_to_device.device)
        return move_to_device(model)

    def _start_groups(self, device: torch.device) -> None:
        """Start PyTorch's process group, and the group of data-parallel ranks."""
        init_process_group(self._ranks, device, self._job.health)
        self._group = new_subgroup(self._mesh.axes.data_groups(), self._job.health)

    def sum_in_pass(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return a tensor's sum over the data-parallel ranks."""
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def bind(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Attach to a model and its optimizer."""
        super().bind(model, optimizer)
        # A list, because iterating over all modules takes a millisecond in each step.
        self._all = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def reduce(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of the global batch; gradients were summed during the backward pass."""
        if any(parameter.requires_grad != before for parameter, before in self._all):
            raise UserError(
                f"strategy {self._job.strategy.name}: the set of trained parameters has changed",
                hint="freeze parameters before training begins, or use strategy: allreduce",
            )
        # Not with Horovod, whose threads in addition to PyTorch's would cost a millisecond per step.
        if self.noise is None or not self.noise.is_due:
            loss = weighted_loss.detach().clone()
            dist.all_reduce(loss, group=self._group)
            return loss
        self.noise.end_part()
        numbers = torch.cat([weighted_loss.detach().reshape(1), self.noise.local.to(weighted_loss.dtype)])
        dist.all_reduce(numbers, group=self._group)
        self.noise.receive(numbers[1:])
        return numbers[0]

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of this rank."""
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for group in self._optimizer.param_groups for parameter in group["params"])
