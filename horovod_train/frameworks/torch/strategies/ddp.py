"""PyTorch's ``DistributedDataParallel``: replicas are identical, and PyTorch sums their gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from horovod_train.collectives.mesh import Mesh
from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.strategies.torch_distributed import TorchDistributed


class Ddp(TorchDistributed):
    """Sums gradients with PyTorch's reducer.

    Args:
        mesh: Of the ranks.
        job: Says how large buckets are.
        find_unused_parameters: Some parameters have no gradient in some steps; None: if that is so in the
            first.
        static_graph: The same parameters are used in the same order in each step.
    """

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
        """Return what the task calls in the model's place."""
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
        """Look for unused parameters in each step, if the plain model leaves some out in the first."""
        if self._find_unused is None:
            self._find_unused = bool(names)

    def set_requires_sync(self, *, is_last: bool) -> None:
        """Let PyTorch sum gradients during the next backward pass, if it is the last of this step."""
        assert self._called is not None
        self._has_summed_all = False
        self._is_last = is_last
        # What ``no_sync`` sets; it is a context around both passes, and a step has several.
        self._called.wrapped.require_backward_grad_sync = is_last

    def backward(self, weighted_loss: torch.Tensor) -> None:
        """Make the backward pass of a micro-batch.

        The reducer is prepared here, and not only when the model was called: the loss may use some of its
        outputs, and may be computed with parts of the model.
        """
        assert self._called is not None
        if self._is_last and not self._static_graph:
            unused_in = [weighted_loss] if self._called.wrapped.find_unused_parameters else []
            self._called.wrapped.reducer.prepare_for_backward(unused_in)
        super().backward(weighted_loss)

    def reduce(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of the whole step: gradients are summed by now.

        Raises:
            UserError: A parameter has no gradient, which ranks wait for.
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
        """Sum a bucket: losses are weighted, so that a sum over ranks is the gradient of the joint batch."""
        self._has_summed_all = bucket.is_last()  # they are summed in their order
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])


class CalledByTask(torch.nn.Module):
    """Wraps a model when it is first used: only then it is known whether all its parameters are.

    Args:
        module: The model.
        wrap: Returns the module that is called instead.
    """

    def __init__(
        self, module: torch.nn.Module, wrap: Callable[[torch.nn.Module], DistributedDataParallel]
    ) -> None:
        super().__init__()
        self.module = module
        self._wrap = wrap

    @cached_property
    def wrapped(self) -> DistributedDataParallel:
        """What is called in the model's place."""
        return self._wrap(self.module)

    def forward(self, *args: Any, **more: Any) -> Any:
        """Call the model."""
        return self.wrapped(*args, **more)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        """Return a copy of the model: what sums gradients belongs to the one that is trained."""
        return copy.deepcopy(self.module, memo)
