"""PyTorch's ``DistributedDataParallel``: replicas are identical, and PyTorch sums their gradients.

TorchDistributed   base of strategies that use PyTorch's collectives
Ddp                the strategy ``ddp``
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from horovod_train.collectives.base import Mesh
from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.comm.collectives import tensor_communicator
from horovod_train.frameworks.torch.comm.groups import init_process_group, new_subgroup
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
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for group in self._optimizer.param_groups for parameter in group["params"])


class Ddp(TorchDistributed):
    """Strategy that sums gradients with PyTorch's reducer, in buckets of the job's ``allreduce`` section.

    The arguments are described in ``Arguments`` of this package.
    """

    measures_local_gradients = True
    capabilities = Capabilities(collective_passes=True, sums_gradients=True)

    def __init__(
        self,
        mesh: Mesh,
        job: Job,
        *,
        find_unused_parameters: bool | None = None,
        static_graph: bool = False,
    ) -> None:
        super().__init__(mesh, job)
        self._find_unused = find_unused_parameters
        self._static_graph = static_graph
        self._called: CalledByTask | None = None
        self._has_summed_all = False

    def forward_module(self, module: torch.nn.Module) -> torch.nn.Module:
        self._called = CalledByTask(module, self._wrapped)
        return self._called

    def _wrapped(self, module: torch.nn.Module) -> DistributedDataParallel:
        wrapped = DistributedDataParallel(
            module,
            bucket_cap_mb=self._job.allreduce.bucket_size_mib,
            forward_sync_buffers=False,  # running statistics are averaged
            find_unused_parameters=bool(self._find_unused),
            static_graph=self._static_graph,
            gradient_as_bucket_view=True,
        )
        wrapped.register_comm_hook(None, lambda _, bucket: self._sum(bucket))
        return wrapped

    def report_unused_parameters(self, names: Sequence[str]) -> None:
        """Enable ``find_unused_parameters`` if it is None and the reference model has unused parameters."""
        if self._find_unused is None:
            self._find_unused = bool(names)

    def prepare_backward(self, *, is_last: bool) -> None:
        """Let PyTorch sum gradients during the next backward pass, if it is the last of this step."""
        assert self._called is not None
        self._has_summed_all = False
        self._is_last = is_last
        # ``no_sync`` sets this attribute, but is a context around both passes of a micro-batch.
        self._called.wrapped.require_backward_grad_sync = is_last

    def backward(self, weighted_loss: torch.Tensor) -> None:
        """Prepare the reducer, and run the backward pass of a micro-batch.

        PyTorch prepares the reducer when the model is called. This is not sufficient, because the loss may
        use only some outputs of the model, and may call parts of the model.
        """
        assert self._called is not None
        if self._is_last and not self._static_graph:
            unused_in = [weighted_loss] if self._called.wrapped.find_unused_parameters else []
            self._called.wrapped.reducer.prepare_for_backward(unused_in)
        super().backward(weighted_loss)

    def reduce(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Convert sparse gradients to dense ones; return the loss of the global batch.

        Raises:
            UserError: A parameter has no gradient, so that the reducer has not summed all buckets.
        """
        if not self._has_summed_all:
            raise UserError(
                "strategy ddp: a parameter has no gradient in the last micro-batch of this step on rank "
                f"{self._ranks.rank}",
                hint="set strategy.args.find_unused_parameters: true, or use strategy: allreduce",
            )
        for parameter in self._parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        self.sent_bytes = sum(gradient.nbytes for gradient in self.gradients())
        return super().reduce(weighted_loss)

    def _sum(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Sum a bucket over ranks, without averaging, because losses are weighted by samples."""
        self._has_summed_all = bucket.is_last()  # the reducer sums buckets in order
        if self.noise is not None and self.noise.is_due:
            self.noise.add_gradients(bucket.parameters(), bucket.gradients(), bucket.buffer())
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])


class CalledByTask(torch.nn.Module):
    """Module that wraps a model at its first use, when ``find_unused_parameters`` is determined."""

    def __init__(
        self, module: torch.nn.Module, wrap: Callable[[torch.nn.Module], DistributedDataParallel]
    ) -> None:
        super().__init__()
        self.module = module
        self._wrap = wrap

    @cached_property
    def wrapped(self) -> DistributedDataParallel:
        """The wrapped model."""
        return self._wrap(self.module)

    def forward(self, *args: Any, **more: Any) -> Any:
        """Call the wrapped model."""
        return self.wrapped(*args, **more)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """Return a copy of the model without the wrapper, which sums gradients of the trained model only."""
        return copy.deepcopy(self.module, memo)
