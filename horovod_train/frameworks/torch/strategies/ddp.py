"""PyTorch's ``DistributedDataParallel``: replicas are identical, and PyTorch sums their gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from horovod_train.collectives.mesh import Mesh
from horovod_train.config.schema import Job
from horovod_train.frameworks.torch.strategies.torch_distributed import TorchDistributed


class Ddp(TorchDistributed):
    """Sums gradients with PyTorch's reducer.

    Args:
        mesh: Of the ranks.
        job: Says how large buckets are.
        find_unused_parameters: Some parameters have no gradient in some steps.
        static_graph: The same parameters are used in the same order in each step.
    """

    def __init__(
        self,
        mesh: Mesh,
        job: Job,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
    ) -> None:
        super().__init__(mesh, job)
        self._find_unused = find_unused_parameters
        self._static_graph = static_graph
        self._called: DistributedDataParallel | None = None

    def called(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return what the task calls in the model's place."""
        self._called = DistributedDataParallel(
            module,
            bucket_cap_mb=self._job.allreduce.bucket_size_mib,
            forward_sync_buffers=False,  # running statistics are averaged
            find_unused_parameters=self._find_unused,
            static_graph=self._static_graph,
            gradient_as_bucket_view=True,
        )
        self._called.register_comm_hook(None, lambda _, bucket: _sum(bucket))
        return self._called

    def _expect(self, *, is_last: bool) -> None:
        assert self._called is not None
        # What ``no_sync`` sets; it is a context around both passes, and a step has several.
        self._called.require_backward_grad_sync = is_last

    def reduce(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of the whole step: gradients are summed by now."""
        self.bytes_per_step = sum(gradient.nbytes for gradient in self.gradients())
        return super().reduce(weighted_loss)


def _sum(bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket: losses are weighted, so that a sum over ranks is the gradient of the joint batch."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
