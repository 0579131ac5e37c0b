"""The training step: forward and backward passes by gluon, sum over ranks, update."""

from __future__ import annotations

import math
from collections.abc import Iterable

import mxnet as mx
import numpy as np
from mxnet import gluon

from horovod_train.checkpoint.arrays import ReplicaState
from horovod_train.checkpoint.tree import pack_tree, unpack_tree
from horovod_train.collectives.base import Communicator
from horovod_train.collectives.horovod import HorovodCommunicator
from horovod_train.config.schema import Job
from horovod_train.data.planned_step import PlannedStep
from horovod_train.data.shard import MicroBatch
from horovod_train.errors import UserError
from horovod_train.frameworks import arrays
from horovod_train.frameworks.base import IdenticalReplica, StepClock, StepOutcome, add_metric
from horovod_train.frameworks.mxnet.exchange import Exchange, to_arrays
from horovod_train.frameworks.mxnet.task import MxnetTask
from horovod_train.frameworks.randomness import mix


class Seeds:
    """Seeds of a rank, one per step: MXNet does not expose the state of its generators."""

    def __init__(self) -> None:
        self.state = (0, 0)

    def seed_step(self) -> None:
        """Seed MXNet's generators for the next step."""
        seed, number = self.state
        mx.random.seed(mix(seed, number, 0) % 2**31)
        self.state = (seed, number + 1)


class MxnetReplica(IdenticalReplica):
    """The block and optimizer of one rank.

    Args:
        model: A gluon block whose parameters have shapes.
        optimizer: An MXNet optimizer.
        world: The communicator.
        job: The job description.
        task: Provides loss and metrics.
        context: Device of the block.
        seeds: Seeds of the steps.

    Raises:
        UserError: The block has no trained parameters.
    """

    def __init__(
        self,
        *,
        model: gluon.Block,
        optimizer: mx.optimizer.Optimizer,
        world: Communicator,
        job: Job,
        task: MxnetTask,
        context: mx.Context,
        seeds: Seeds,
    ) -> None:
        self.model = model
        self._params: dict[str, gluon.Parameter] = dict(model._collect_params_with_prefix())  # noqa: SLF001  (as save_parameters)
        self._trained = {name: p for name, p in self._params.items() if p.grad_req != "null"}
        if not self._trained:
            raise UserError("the model trains nothing", hint="does any parameter have grad_req 'write'?")
        for param in self._trained.values():
            param.grad_req = "add"  # accumulates over micro-batches; zeroed before each step
        self._optimizer = optimizer
        self._updater = mx.optimizer.get_updater(optimizer)
        self._world = world
        self._train = job.train
        self._guard_gradients = job.health.non_finite == "skip"
        self._task = task
        self._context = context
        self._seeds = seeds
        self._exchange = Exchange(world, int(job.allreduce.bucket_size_mib * 2**20))
        self._bytes_per_step = self._exchange.bytes_on_wire([p.data() for p in self._trained.values()])

    # -- the step

    def step(self, step: PlannedStep, lr: float, *, want_norm: bool) -> StepOutcome:
        """Perform one optimizer step with this rank's micro-batches. Collective."""
        clock = StepClock()
        self._seeds.seed_step()
        for param in self._trained.values():
            param.zero_grad()
        statistics = self._copied_statistics()
        local_loss = 0.0
        for micro_batch, read in step:
            batch = to_arrays(read, self._context)
            clock.lap("data")
            with mx.autograd.record():
                weighted = self._task.loss(self.model, batch).mean() * micro_batch.share
            weighted.backward()
            local_loss += float(weighted.asscalar())
            clock.lap("compute")
        gradients = [param.grad() for param in self._trained.values()]
        extra = mx.nd.array([local_loss], dtype="float64")
        loss = self._summed([*gradients, extra])
        clock.lap("allreduce_wait")
        norm, is_finite = self._finish(gradients, loss, lr, want_norm=want_norm)
        if not is_finite:
            for param, before in statistics:
                param.set_data(before)
        clock.lap("optimizer")
        return StepOutcome(
            loss=loss,
            local_loss=local_loss,
            is_finite=is_finite,
            numbers={"grad_norm": norm, "sent_bytes": self._bytes_per_step},
            clock=clock,
        )

    def _summed(self, values: list[mx.nd.NDArray]) -> float:
        """Sum gradients and loss over ranks, in place; return the loss, which is the last value."""

        def exchange() -> float:
            self._exchange.sum(values)
            mx.nd.waitall()
            return float(values[-1].asscalar())

        world = self._world
        if not isinstance(world, HorovodCommunicator):
            return exchange()
        return world.call(exchange, "the gradients of a step", self._bytes_per_step)

    def _finish(
        self, gradients: list[mx.nd.NDArray], loss: float, lr: float, *, want_norm: bool
    ) -> tuple[float | None, bool]:
        """Clip and update. Return the gradient norm, if computed, and whether loss and norm are finite."""
        norm = None
        limit = self._train.clip_grad_norm
        if want_norm or self._guard_gradients or limit is not None:
            norm = math.sqrt(sum(float((g.astype("float64") ** 2).sum().asscalar()) for g in gradients))
        if not math.isfinite(loss) or (norm is not None and not math.isfinite(norm)):
            return norm, False
        if limit is not None and norm is not None and norm > limit:
            for gradient in gradients:
                gradient[:] = gradient * (limit / norm)
        self._optimizer.set_learning_rate(lr)
        for number, param in enumerate(self._trained.values()):
            self._updater(number, param.grad(), param.data())
        mx.nd.waitall()
        return norm, True

    def _copied_statistics(self) -> list[tuple[mx.nd.NDArray, mx.nd.NDArray]]:
        if not self._guard_gradients:
            return []
        return [(p, p.data().copy()) for name, p in self._params.items() if name not in self._trained]

    # -- other methods

    def evaluate(self, batches: Iterable[tuple[MicroBatch, object]]) -> dict[str, tuple[float, int]]:
        """Return (sum, number of samples) of each metric over this rank's batches."""
        sums: dict[str, tuple[float, int]] = {}
        compute = getattr(self._task, "metrics", None)
        for micro_batch, batch in batches:
            found = to_arrays(batch, self._context)
            values = (
                compute(self.model, found)
                if compute is not None
                else {"loss": self._task.loss(self.model, found).mean().asscalar()}
            )
            for name, value in values.items():
                plain = value.asnumpy() if isinstance(value, mx.nd.NDArray) else value
                add_metric(sums, name, plain, len(micro_batch))
        return sums

    def sync_buffers(self) -> None:
        """Average running statistics over ranks."""
        if self._world.size == 1:
            return
        for name, param in self._params.items():
            if name not in self._trained:
                mean = arrays.mean_over_ranks(self._world, param.data().asnumpy())
                param.set_data(mx.nd.array(mean, dtype=param.dtype))

    def broadcast(self) -> None:
        """Broadcast weights and statistics from rank 0.

        Raises:
            UserError: Ranks have created different models.
        """
        if self._world.size == 1:
            return
        arrays.check_same_layout(self._world, {n: p.data().asnumpy() for n, p in self._params.items()})
        for param in self._params.values():
            value = arrays.from_rank_0(self._world, param.data().asnumpy())
            param.set_data(mx.nd.array(value, dtype=param.dtype))

    def is_finite(self) -> bool:
        """Return whether all weights are finite."""
        return all(bool(np.isfinite(p.data().asnumpy()).all()) for p in self._params.values())

    def state(self, *, copy: bool) -> ReplicaState:
        """Return a copy of the state."""
        tree, found = pack_tree(
            {"slots": self._updater.states, "counts": self._optimizer._index_update_count},  # noqa: SLF001
            lambda leaf: isinstance(leaf, mx.nd.NDArray),
        )
        return ReplicaState(
            model={name: arrays.to_blob(p.data().asnumpy()) for name, p in self._params.items()},
            optimizer={name: arrays.to_blob(array.asnumpy()) for name, array in found.items()},
            optimizer_tree={"class": type(self._optimizer).__name__, "state": tree},
            scaler={},
        )

    def load_state(self, state: ReplicaState) -> None:
        """Load a state.

        Raises:
            CheckpointError: The state is that of another model or optimizer.
        """
        arrays.check_same_optimizer(state, self._optimizer)
        arrays.check_fits({name: tuple(p.shape) for name, p in self._params.items()}, state.model, "model")
        for name, param in self._params.items():
            param.set_data(mx.nd.array(arrays.from_blob(state.model[name]), dtype=param.dtype))
        slots = {
            name: mx.nd.array(arrays.from_blob(blob), ctx=self._context, dtype=blob.dtype)
            for name, blob in state.optimizer.items()
        }
        own = unpack_tree(state.optimizer_tree["state"], slots)
        self._updater.states = own["slots"]
        self._updater.states_synced = dict.fromkeys(own["slots"], True)
        self._optimizer._index_update_count.update(own["counts"])  # noqa: SLF001  (Adam's number of steps)
        self._optimizer.num_update = max(own["counts"].values(), default=0)

    def device_name(self) -> str:
        """Return the name of the model's device."""
        return str(self._context)

    def num_parameters(self) -> int:
        """Return the number of trained parameters."""
        return sum(int(np.prod(p.shape)) for p in self._trained.values())
