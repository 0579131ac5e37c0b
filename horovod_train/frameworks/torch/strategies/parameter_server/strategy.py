"""Asynchronous training with parameter servers, with bounded staleness.

    worker, each step    weights from the servers -> the gradient of its own samples -> the servers
    server, each message the optimizer's step, with one worker's gradient

A rank waits only for ranks that are more than ``max_staleness`` steps behind. The strategy is for comparison,
because clusters were trained this way before all-reduce. A gradient belongs to weights that other ranks have
changed in the meantime, and results depend on the order of messages. If all ranks are equally fast, a job is
no faster than with all-reduce. Every ``meet_every_steps`` steps, and at the end of an epoch, ranks wait until
all gradients are applied. Weights are then identical on all ranks, for evaluation and checkpoints.

Sources: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; Ho et al.,
"More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

import torch

from horovod_train.collectives.log import Collective
from horovod_train.collectives.mesh import Mesh
from horovod_train.config.schema import Job
from horovod_train.data.planned_step import PlannedStep
from horovod_train.errors import NumericError, UserError
from horovod_train.frameworks.torch.comm.collectives import tensor_communicator
from horovod_train.frameworks.torch.comm.mpi import mpi
from horovod_train.frameworks.torch.state.local_tensors import (
    LocalTensor,
    OptimizedParameter,
    whole_parameters,
)
from horovod_train.frameworks.torch.state.trained import OptimizedParameters
from horovod_train.frameworks.torch.strategies.base import Capabilities, Strategy, log
from horovod_train.frameworks.torch.strategies.parameter_server.server import (
    Layout,
    Server,
    ServerConnection,
    partition,
)


class ParameterServer(Strategy):
    """Strategy that sends gradients to servers, and receives weights from them.

    Clipping, norm and loss are those of each rank's own samples.

    Raises:
        UserError: Several ranks run without MPI.
    """

    capabilities = Capabilities(
        sums=False,
        deferred_results=False,  # gradients are sent by the host
        sharded=True,
        owns_update=True,
        rank_state_kind="parameter_server",
    )

    def __init__(self, mesh: Mesh, job: Job, *, max_staleness: int = 4, meet_every_steps: int = 100) -> None:
        self._ranks = tensor_communicator(mesh.data)
        self._max_staleness = max_staleness
        self._meet_every_steps = meet_every_steps
        self._timeout_s = job.health.stall_shutdown_s
        self._num_made = 0
        self._line: ServerConnection | None = None
        if self._ranks.size > 1 and not self._ranks.is_over_mpi:
            raise UserError(
                "strategy parameter_server: it requires MPI, and this run uses Gloo",
                hint="start them with launch.controller: mpi, or use strategy: allreduce",
            )
        if self._ranks.rank == 0:
            log.warning(
                "strategy parameter_server is for comparison: gradients are of weights that others have "
                "changed meanwhile, and no two runs are alike"
            )

    def bind(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Attach to a model and its optimizer; assign weights to servers."""
        super().bind(model, optimizer)
        trained = OptimizedParameters(model, optimizer).named()
        self._named = {name: p for name, p in trained.items() if p.requires_grad}
        having = partition(self._named, self._ranks.size)
        groups = len(optimizer.param_groups)
        self._layouts = [Layout(n, [self._named[name] for name in n], groups) for n in having]
        self._make_server(having[self._ranks.rank])

    def _make_server(self, names: Sequence[str]) -> None:
        """Create this rank's server, with copies of its weights on the CPU and an optimizer over them."""
        copies: dict[int, Any] = {}
        self._served_by = copy.deepcopy(self._optimizer, copies)
        self._served = {name: copies[id(self._named[name])] for name in names}
        for served in self._served.values():
            served.data = served.data.cpu()
        own = {id(served) for served in self._served.values()}
        for group in self._served_by.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in own]
        layout = self._layouts[self._ranks.rank]
        self._server = Server(layout, self._served, self._served_by, self._ranks.size)

    def _start(self) -> ServerConnection:
        """Start serving the current weights, which must be equal on all ranks; every rank must call it."""
        self._copy_weights_to_server()
        comm = None
        if self._ranks.size > 1:
            comm = mpi().COMM_WORLD.Dup()
            assert comm.rank == self._ranks.rank, "MPI and Horovod number ranks alike"
        connection = ServerConnection(comm, self._ranks.rank, self._layouts, self._server, self._timeout_s)
        self._ranks.call_at_close(connection.close)
        return connection

    @torch.no_grad()
    def _copy_weights_to_server(self) -> None:
        for name, served in self._served.items():
            served.copy_(self._named[name])

    def close(self) -> None:
        """Stop the server."""
        if self._line is not None:
            self._line.close()

    # -- one step

    @torch.no_grad()
    def begin(self, step: PlannedStep) -> None:
        """Receive weights that contain all gradients except those of the last ``max_staleness`` steps."""
        self._step = step
        self._line = self._line or self._start()
        self._take_weights(self._num_made - self._max_staleness)
        self.replicas_identical = self._ranks.size == 1

    def _take_weights(self, at_least: int) -> None:
        assert self._line is not None
        connection = self._line
        size_bytes = sum(layout.size_bytes for layout in self._layouts)
        entry = Collective("parameter_server.weights", size_bytes, monotonic())
        found = self._ranks.wait_in(entry, lambda: connection.pull(at_least))
        for name, weight in found.items():
            self._named[name].copy_(weight)
        self.sent_bytes = size_bytes

    def reduce(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Rescale the gradient to the mean over this rank's samples; return their loss.

        Raises:
            NumericError: The loss is not finite.
        """
        own_share = self._step.share.local_share
        if own_share:
            torch._foreach_div_(self.gradients(), own_share)
        loss = float(weighted_loss) / (own_share or 1.0)
        self._refuse_unless_finite(loss, "the loss")
        return torch.tensor(loss, dtype=torch.float64)

    def update(self, clip_grad_norm: float | None) -> float:
        """Clip the gradient of this rank, which ``after_update`` sends; return its norm before clipping.

        Raises:
            NumericError: The norm is not finite.
        """
        norm = float(self.norm())
        self._refuse_unless_finite(norm, "the norm of the gradient")
        if clip_grad_norm is not None and norm > clip_grad_norm:
            torch._foreach_mul_(self.gradients(), clip_grad_norm / norm)
        return norm

    def _refuse_unless_finite(self, value: float, what: str) -> None:
        if not math.isfinite(value):
            raise NumericError(
                f"{what} of rank {self._ranks.rank} is {value}",
                hint="lower lr.base_lr, or set clip_grad_norm",
            )

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of this rank, after converting sparse ones to dense ones."""
        for parameter in self._named.values():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        return [p.grad for p in self._named.values() if p.grad is not None]

    def after_update(self, *, is_used: torch.Tensor | bool) -> None:
        """Send the gradients; every ``meet_every_steps`` steps, wait for the gradients of all ranks."""
        assert self._line is not None
        gradients = {name: p.grad for name, p in self._named.items()} if is_used else {}
        self._line.push(gradients, [group["lr"] for group in self._optimizer.param_groups])
        sent_bytes = self.sent_bytes + sum(layout.push_bytes for layout in self._layouts)
        self._num_made += 1
        if self._step.is_last or self._num_made % self._meet_every_steps == 0:
            with torch.no_grad():
                self._take_weights(self._num_made)
            sent_bytes += self.sent_bytes
            self._ranks.allgather(b"")  # barrier: all ranks have received the weights
            self.replicas_identical = True
        self.sent_bytes = sent_bytes

    # -- checkpoints

    @property
    def saved_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's server, whose state is written to checkpoints."""
        return self._served_by

    def optimized(self) -> Sequence[OptimizedParameter]:
        """Return the parameters that this rank serves."""
        names = {id(served): name for name, served in self._served.items()}
        groups = self._served_by.param_groups
        return [OptimizedParameter(names[id(p)], LocalTensor(p)) for group in groups for p in group["params"]]

    def numbering(self) -> Sequence[str | int]:
        """Return the names of the whole model's optimized parameters, in the order of its optimizer."""
        return [parameter.name for parameter in whole_parameters(self._model, self._optimizer)]

    def load_rank_states(self, of_ranks: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Copy the loaded weights to this rank's server."""
        super().load_rank_states(of_ranks)
        self._copy_weights_to_server()
