"""Base of strategies that split a model over ranks, and sum gradients of data-parallel ranks with Horovod."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from horovod_train.collectives.mesh import Mesh
from horovod_train.config.schema import Job
from horovod_train.frameworks.torch.comm.buckets import to_local
from horovod_train.frameworks.torch.comm.collectives import tensor_communicator
from horovod_train.frameworks.torch.state.local_tensors import OptimizedParameter
from horovod_train.frameworks.torch.state.shards import (
    disable_foreach_for_mixed_groups,
    num_copies,
    optimized_parameters,
    squares_of,
)
from horovod_train.frameworks.torch.strategies.allreduce.strategy import summed_gradients
from horovod_train.frameworks.torch.strategies.base import Capabilities, Strategy


class ModelParallel(Strategy):
    """Base of strategies with a part of the model on each rank; data-parallel ranks store the same part."""

    capabilities = Capabilities(sharded=True, whole_weights=False, sums_gradients=True)

    def __init__(self, mesh: Mesh, job: Job) -> None:
        self._job = job
        self._world = tensor_communicator(mesh.world)
        self._axes = mesh.axes
        self._data = summed_gradients(mesh.data, job.allreduce)

    def bind(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Attach to a model and its optimizer."""
        super().bind(model, optimizer)
        self._data.bind(model, optimizer)
        disable_foreach_for_mixed_groups(optimizer)

    def defer_results(self) -> None:
        """Require that, from the next step on, the host does not wait for the device within a step."""
        super().defer_results()
        self._data.defer_results()

    def close(self) -> None:
        """Detach all hooks from the parameters."""
        self._data.close()

    def optimized(self) -> Sequence[OptimizedParameter]:
        """Return this rank's shards of the optimizer's parameters, in its order."""
        return optimized_parameters(self._model, self._optimizer)

    def reduce(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Sum gradients over the ranks that store the same part of the model; return the loss."""
        loss = self._data.reduce(weighted_loss)
        self.sent_bytes, self.layout_version = self._data.sent_bytes, self._data.layout_version
        if self._axes.tensor == 1 or self.capabilities.owns_schedule:
            return loss
        # Tensor-parallel ranks compute the same loss. They must agree on whether it is finite, also if it is
        # finite only on some of them.
        mean = (loss / self._axes.tensor / self._axes.data).reshape(1)
        return self._world.wait(self._world.start_allreduce(mean, "horovod_train.loss"))[0]

    def gradients(self) -> list[torch.Tensor]:
        """Return the local shards of the gradients."""
        return [to_local(gradient) for gradient in self._data.gradients()]

    def norm(self) -> torch.Tensor:
        """Return the L2 norm of the whole gradient; each shard is counted once."""
        squares = squares_of(self._trained(), self._num_copies)
        return self._world.wait(self._world.start_allreduce(squares, "horovod_train.norm")).sqrt()[0]

    def _num_copies(self, parameter: torch.nn.Parameter) -> int:
        """Return the number of ranks that store the same shard of a parameter."""
        return num_copies(parameter, self._axes.data * self._axes.tensor)

    def _trained(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for group in self._optimizer.param_groups for parameter in group["params"])
