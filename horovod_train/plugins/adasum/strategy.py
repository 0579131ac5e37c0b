"""Adasum: weight updates of ranks are added if they are orthogonal, and averaged if they are equal.

Each rank performs the optimizer's step with the gradient of its own samples. For updates a and b of two
ranks, the combined update of a parameter is

    (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b

which is a + b if they are orthogonal, and their mean if they are equal. 2^k ranks are combined pairwise in
k levels. Horovod computes the combined update of each parameter over MPI. The optimizer's state of each rank
depends on the gradients of this rank, as with ``horovod.torch.DistributedOptimizer(op=hvd.Adasum)``.

The learning rate must suit the batch of one rank, because Adasum determines the length of the combined
update. Horovod's guide advises 2 to 2.5 times the best rate of one rank, for any number of ranks.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", arXiv:2006.02924.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from horovod_train.collectives.base import Mesh, allgather_json
from horovod_train.config.schema import Job
from horovod_train.data.shard import PlannedStep
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.comm.collectives import tensor_communicator, wide_type
from horovod_train.frameworks.torch.state.local import OptimizedParameters, check_same_trained
from horovod_train.frameworks.torch.strategies.base import Capabilities, Strategy


class Adasum(Strategy):
    """Strategy that combines the weight updates of ranks with Horovod's Adasum.

    Clipping applies to each rank's own gradient. A rank without samples in a step contributes no update.

    Raises:
        UserError: The number of ranks is not a power of two, or several ranks run without MPI.
    """

    def __init__(self, mesh: Mesh, job: Job) -> None:
        self._ranks = tensor_communicator(mesh.data)
        size = self._ranks.size
        if size & (size - 1):
            raise UserError(
                f"strategy adasum: the number of ranks must be a power of two, and is {size}",
                hint=f"start {1 << size.bit_length() - 1} or {1 << size.bit_length()} ranks",
            )
        if size > 1 and not self._ranks.is_over_mpi:
            raise UserError(
                "strategy adasum: Horovod supports Adasum only over MPI, and this run uses Gloo",
                hint="start them with launch.controller: mpi, or use strategy: allreduce",
            )
        self.capabilities = Capabilities(
            sum_and_count_loss=False,
            deferred_results=False,  # ranks exchange their losses in each step
            sharded=True,  # each rank has its own optimizer state
            checkpoints_optimizer=self._ranks.rank == 0,
            rank_state_kind="adasum",
        )

    def bind(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Attach to a model and its optimizer.

        Raises:
            UserError: Ranks train different parameters.
        """
        super().bind(model, optimizer)
        self._trains = OptimizedParameters(model, optimizer)
        self._record_trained()

    def _record_trained(self) -> None:
        self._named = dict(self._trains.named())
        self._num_taken_up = self._trains.count()
        layout = [[name, str(list(p.shape)), str(p.dtype)] for name, p in self._trained().items()]
        check_same_trained([("", each) for each in allgather_json(self._ranks, layout)])

    def begin(self, step: PlannedStep) -> None:
        """Record this rank's samples and the current weights, which are equal on all ranks."""
        self._step = step
        if self._trains.count() != self._num_taken_up:
            self._record_trained()
        self._before = {name: p.detach().clone() for name, p in self._trained().items()}

    def reduce(self, weighted_loss: torch.Tensor) -> torch.Tensor:
        """Rescale the gradient to the mean over this rank's samples; return the loss of the global batch."""
        own_share = self._step.share.local_share
        for parameter in self._named.values():
            if not own_share:
                parameter.grad = None  # the optimizer skips parameters without a gradient
            elif parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        if own_share:
            torch._foreach_div_(self.gradients(), own_share)
        (loss,) = self._ranks.allreduce_sum([float(weighted_loss)])
        return torch.tensor(loss, dtype=torch.float64)

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._named.values() if p.grad is not None]

    def is_finite(self, norm: float) -> bool:
        """Return whether the gradients of all ranks are finite; otherwise, all ranks skip the step."""
        return self._ranks.allreduce_sum([float(not math.isfinite(norm))])[0] == 0

    @torch.no_grad()
    def after_update(self, *, is_used: torch.Tensor | bool) -> None:
        """Replace this rank's weight updates by the combined updates of all ranks."""
        before, self._before = self._before, {}
        if not is_used or self._ranks.size == 1:
            return
        waiting = []
        self.sent_bytes = 8
        for number, (name, old) in enumerate(before.items()):
            wide = wide_type(old.dtype)
            change = (self._named[name].to(wide) - old.to(wide)).cpu().contiguous()
            self.sent_bytes += change.nbytes
            handle = self._ranks.start_adasum(change, f"horovod_train.adasum.{number}")
            waiting.append((name, old, handle))
        for name, old, handle in waiting:
            joint = self._ranks.wait(handle)
            self._named[name].copy_(old.to(joint.dtype) + joint.to(old.device))

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self._named.items() if p.requires_grad}

    # -- the state of this rank's optimizer

    def rank_state(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's optimizer state; empty on rank 0, whose state is saved as that of the job."""
        if self.capabilities.checkpoints_optimizer:
            return {}
        return {
            f"{name}/{key}": value
            for name, parameter in self._named.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }

    def load_rank_states(self, of_ranks: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Load this rank's optimizer state; a rank without a saved state keeps that of rank 0."""
        own = of_ranks[self._ranks.rank] if self._ranks.rank < len(of_ranks) else {}
        for path, value in own.items():
            name, _, key = path.rpartition("/")
            if name not in self._named:
                continue  # saved by another strategy
            entry = self._optimizer.state[self._named[name]]
            entry[key] = value.to(entry[key].device) if key in entry else value
