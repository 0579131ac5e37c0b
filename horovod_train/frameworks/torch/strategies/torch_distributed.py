"""What strategies have in common whose collectives are PyTorch's own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from horovod_train.collectives.mesh import Mesh
from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.comm.collectives import with_tensors
from horovod_train.frameworks.torch.comm.process_group import group_among, start_process_group
from horovod_train.frameworks.torch.strategies.base import DevicePlacement, Strategy


class TorchDistributed(Strategy):
    """Ranks whose gradients PyTorch sums in its backward pass.

    Args:
        mesh: Of the ranks.
        job: The job.
    """

    passes_are_collective = True

    def __init__(self, mesh: Mesh, job: Job) -> None:
        self._mesh = mesh
        self._ranks = with_tensors(mesh.world)
        self._data = with_tensors(mesh.data)
        self._job = job

    def wrap(self, model: torch.nn.Module, placing: DevicePlacement) -> torch.nn.Module:
        """Start PyTorch's process group; return the model where it is trained."""
        self._start_groups(placing.device)
        return placing(model)

    def _start_groups(self, device: torch.device) -> None:
        """Start PyTorch's process group, and that of the ranks that read different samples."""
        start_process_group(self._ranks, device, self._job.health)
        self._group = group_among(self._mesh.axes.data_groups(), self._job.health)

    def sum_in_pass(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return a tensor's sum over the ranks that share samples."""
        dist.all_reduce(tensor, group=self._group)
        return tensor

    def bind(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Attach to a model and its optimizer."""
        super().bind(model, optimizer)
        # A list: to walk through all modules in each step takes a millisecond.
        self._all = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def expect_more(self) -> None:
        """The next forward and backward pass is not the last of this step."""
        self._expect(is_last=False)

    def expect_last(self) -> None:
        """The next forward and backward pass is the last of this step."""
        self._expect(is_last=True)

    def _expect(self, *, is_last: bool) -> None:
        """Tell what sums gradients whether they are complete after the next backward pass."""
        raise NotImplementedError

    def reduce(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of the whole step: gradients are summed by now."""
        if any(parameter.requires_grad != before for parameter, before in self._all):
            raise UserError(
                f"what is trained has changed, which strategy {self._job.strategy.name} does not support",
                hint="freeze parameters before training begins, or use strategy: allreduce",
            )
        loss = weighted_loss.detach().clone()
        # Not through Horovod: its threads in addition to PyTorch's would cost a millisecond per step.
        dist.all_reduce(loss, group=self._group)
        return loss

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients here."""
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for group in self._optimizer.param_groups for parameter in group["params"])
