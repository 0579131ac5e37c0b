"""MXNet with gluon on Horovod, for jobs and for users' own training loops.

MxnetTask           the interface of a task
MxnetCommunicator   communicator that uses Horovod's MXNet binding
Exchange            sums of arrays over ranks
MxnetReplica        training step: forward and backward passes by gluon, sum over ranks, update
MxnetFramework      replica, readers and random state of a job
init                starts Horovod in a user's training loop
DistributedTrainer  gluon Trainer that averages gradients over ranks, for users' own training loops
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import mxnet as mx
import numpy as np
from mxnet import gluon

from horovod_train.checkpoint.arrays import ArrayBlob, ReplicaState, pack_tree, unpack_tree
from horovod_train.collectives.base import Communicator, Mesh
from horovod_train.collectives.horovod import Array, HorovodCommunicator, connect
from horovod_train.config.schema import Job
from horovod_train.data.shard import MicroBatch, PlannedStep
from horovod_train.errors import UserError
from horovod_train.frameworks import exchange, plain_data
from horovod_train.frameworks.base import (
    IdenticalReplica,
    StepClock,
    StepOutcome,
    add_metric,
    eval_data_of,
    load_task,
    make_optimizer,
    report_unused_methods,
    train_data_of,
)
from horovod_train.frameworks.devices import join, own_gpu
from horovod_train.frameworks.plain_data import check_same_layout, from_rank_0
from horovod_train.frameworks.python_state import state_of_task
from horovod_train.frameworks.reader import NumpyReader, load_rng_state, mix, rng_state, start_loader_server

REQUIRED = ("model", "loss")
OPTIONAL = ("train_data", "eval_data", "metrics")


class MxnetTask(Protocol):
    """The required methods of a task.

    A task is a class with these methods. The optional ones are not in the protocol.

        class MyTask:
            def model(self): ...                a gluon Block, initialized
            def train_data(self): ...           samples: __len__ and __getitem__, NumPy arrays
            def loss(self, model, batch): ...   mean loss over the samples of a batch
            def eval_data(self): ...            optional: data for evaluation
            def metrics(self, model, batch): .. optional: {name: one value per sample}
    """

    def model(self) -> Any:
        """Return a new block."""
        ...

    def train_data(self) -> Any:
        """Return the training samples."""
        ...

    def loss(self, model: Any, batch: Any) -> Any:
        """Return the mean loss over a batch."""
        ...


class MxnetCommunicator(HorovodCommunicator):
    """Communicator for MXNet."""

    BINDING = "mxnet"

    def __init__(self, settings: Mapping[str, str]) -> None:
        super().__init__(settings)
        # MXNet's engine runs collectives asynchronously, and raises their errors as MXNetError.
        self.lost = (*self.lost, mx.base.MXNetError)

    def allreduce_array(self, array: Array, name: str) -> Array:
        sent = mx.nd.array(array, dtype=array.dtype)
        total: Array = self.hvd.allreduce(sent, average=False, name=name).asnumpy()
        return total

    def allgather_arrays(self, array: Array, name: str) -> Array:
        """Return the concatenated arrays of all ranks, by rank."""
        joined: Array = self.hvd.allgather(mx.nd.array(array, dtype=array.dtype), name=name).asnumpy()
        return joined


class Exchange(exchange.Exchange):
    """Sums lists of MXNet arrays over ranks, in place.

    ``sum`` returns before the sums are available, as all operations of MXNet do; ``seconds`` is 0. Arrays are
    sent in their own types.
    """

    def kind(self, array: mx.nd.NDArray) -> type:
        dtype: type = array.dtype
        return dtype

    def size_on_wire_bytes(self, array: mx.nd.NDArray) -> int:
        return int(array.size * np.dtype(array.dtype).itemsize)

    def pack(self, arrays: Sequence[mx.nd.NDArray], kind: type) -> mx.nd.NDArray:
        """Return the array itself, or one flat array with the elements of several."""
        return mx.nd.concat(*[a.reshape(-1) for a in arrays], dim=0) if len(arrays) > 1 else arrays[0]

    def reduce(self, buckets: Iterable[mx.nd.NDArray], names: Iterable[str]) -> Iterator[mx.nd.NDArray]:
        """Yield each bucket, which Horovod sums in place; the first has the highest priority."""
        assert isinstance(self.world, MxnetCommunicator)
        for number, (bucket, name) in enumerate(zip(buckets, names, strict=False)):
            self.world.hvd.allreduce_(bucket, average=False, name=name, priority=-number)
            yield bucket

    def unpack(self, total: mx.nd.NDArray, arrays: Sequence[mx.nd.NDArray]) -> Sequence[mx.nd.NDArray]:
        """Write the parts of a summed bucket into its arrays, and return these."""
        ends = np.cumsum([array.size for array in arrays]).tolist()
        if len(arrays) > 1:
            for array, end in zip(arrays, ends, strict=True):
                array[:] = total[end - array.size : end].reshape(array.shape)
        return arrays


def to_arrays(batch: object, context: mx.Context) -> object:
    """Return a batch with NumPy arrays converted to MXNet arrays."""
    if isinstance(batch, np.ndarray):
        return mx.nd.array(batch, ctx=context, dtype=batch.dtype)
    if isinstance(batch, dict):
        return {key: to_arrays(value, context) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(to_arrays(value, context) for value in batch)
    return batch


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
            clock.end_phase("data")
            with mx.autograd.record():
                weighted = self._task.loss(self.model, batch).mean() * micro_batch.share
            weighted.backward()
            local_loss += float(weighted.asscalar())
            clock.end_phase("compute")
        gradients = [param.grad() for param in self._trained.values()]
        extra = mx.nd.array([local_loss], dtype="float64")
        loss = self._summed([*gradients, extra])
        clock.end_phase("allreduce_wait")
        norm, is_finite = self._finish(gradients, loss, lr, want_norm=want_norm)
        if not is_finite:
            for param, before in statistics:
                param.set_data(before)
        clock.end_phase("optimizer")
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
                mean = plain_data.mean_over_ranks(self._world, param.data().asnumpy())
                param.set_data(mx.nd.array(mean, dtype=param.dtype))

    def broadcast(self) -> None:
        """Broadcast weights and statistics from rank 0.

        Raises:
            UserError: Ranks have created different models.
        """
        if self._world.size == 1:
            return
        plain_data.check_same_layout(self._world, {n: p.data().asnumpy() for n, p in self._params.items()})
        for param in self._params.values():
            value = plain_data.from_rank_0(self._world, param.data().asnumpy())
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
            model={name: plain_data.to_blob(p.data().asnumpy()) for name, p in self._params.items()},
            optimizer={name: plain_data.to_blob(array.asnumpy()) for name, array in found.items()},
            optimizer_tree={"class": type(self._optimizer).__name__, "state": tree},
            scaler={},
        )

    def load_state(self, state: ReplicaState) -> None:
        """Load a state.

        Raises:
            CheckpointError: The state is that of another model or optimizer.
        """
        plain_data.check_same_optimizer(state, self._optimizer)
        plain_data.check_fits(
            {name: tuple(p.shape) for name, p in self._params.items()}, state.model, "model"
        )
        for name, param in self._params.items():
            param.set_data(mx.nd.array(plain_data.from_blob(state.model[name]), dtype=param.dtype))
        slots = {
            name: mx.nd.array(plain_data.from_blob(blob), ctx=self._context, dtype=blob.dtype)
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


class MxnetFramework:
    """MXNet with gluon, for one job in one process."""

    def __init__(self) -> None:
        self._seeds = Seeds()

    def connect(self, job: Job) -> Communicator:
        """Initialize Horovod, and return the communicator; of one rank, if this process was started alone."""
        if job.data.num_workers:
            start_loader_server("horovod_train.frameworks.reader")
        return connect(MxnetCommunicator, job)

    def prepare(self, job: Job, mesh: Mesh) -> tuple[MxnetReplica, NumpyReader, NumpyReader | None]:
        """Return this rank's replica and the readers of training and evaluation data."""
        world = mesh.data
        context = choose_context(job, mesh.world)
        mx.random.seed(mix(job.train.seed, 0, 0) % 2**31)
        task = load_task(job.task, job.task_args, REQUIRED)
        report_unused_methods(task, (*REQUIRED, *OPTIONAL), world)
        read = partial(NumpyReader, data=job.data, seed=job.train.seed, task=job.task)
        train_reader = read(train_data_of(job, task))
        eval_data = eval_data_of(job, task)
        with context:
            model = task.model()
        model.collect_params().reset_ctx(context)
        if any(not param.shape or 0 in param.shape for param in model.collect_params().values()):
            task.loss(model, to_arrays(train_reader.first(), context))  # initializes shapes
        optimizer = make_optimizer(
            job, world.size, lambda factory, args: factory(learning_rate=job.lr.base_lr, **args)
        )
        replica = MxnetReplica(
            model=model,
            optimizer=optimizer,
            world=world,
            job=job,
            task=task,
            context=context,
            seeds=self._seeds,
        )
        eval_reader = None if eval_data is None else read(eval_data)
        replica.python_state = state_of_task(mesh, task, [train_reader, eval_reader])
        return replica, train_reader, eval_reader

    def rng_state(self) -> tuple[object, Mapping[str, ArrayBlob]]:
        """Return the state of the generators of Python and NumPy, and the seeds of steps."""
        return rng_state({"mxnet": list(self._seeds.state)})

    def load_rng_state(self, tree: object, arrays: Mapping[str, ArrayBlob]) -> None:
        """Load the state of all random generators."""
        seed, number = load_rng_state(tree, arrays)["mxnet"]
        self._seeds.state = (seed, number)

    def seed(self, seed: int, rank: int, epoch: int) -> None:
        """Seed all random generators of this rank."""
        mixed = mix(seed, rank, epoch)
        random.seed(mixed)
        np.random.seed(mixed % 2**32)
        self._seeds.state = (mixed % 2**31, 0)


def choose_context(job: Job, world: Communicator) -> mx.Context:
    """Return the context of the rank's GPU, or of the CPU.

    Raises:
        UserError: The job requires a GPU, and this rank has none.
    """
    gpu = own_gpu(job, world, mx.context.num_gpus())
    return mx.cpu() if gpu is None else mx.gpu(gpu)


def init() -> Communicator:
    """Initialize Horovod, and return the communicator; of one rank, if this process was started alone.

    Raises:
        EngineError: The process is one of several ranks, and Horovod is missing or cannot start.
    """
    return join(MxnetCommunicator)


class DistributedTrainer(mx.gluon.Trainer):
    """A ``gluon.Trainer`` that averages gradients over ranks; ``step`` receives this rank's batch size.

    The arguments are those of ``gluon.Trainer``, the communicator, and the approximate size of a bucket of
    gradients.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        world: Communicator,
        optimizer_params: dict[str, Any] | None = None,
        *,
        bucket_size_mib: float = 8.0,
    ) -> None:
        super().__init__(params, optimizer, optimizer_params=optimizer_params, kvstore=None)
        self._exchange = Exchange(world, int(bucket_size_mib * 2**20))
        self._scale /= world.size

    def _allreduce_grads(self) -> None:
        self._exchange.sum([p.grad() for p in self._params if p.grad_req != "null"])


def broadcast(world: Communicator, params: Any) -> None:
    """Assign rank 0's values to parameters. Call this before the first step, when all shapes are known.

    Raises:
        UserError: Ranks have different parameters.
    """
    if world.size == 1:
        return
    by_name = {str(number): param for number, param in enumerate(params.values())}
    check_same_layout(world, {name: param.data().asnumpy() for name, param in by_name.items()})
    for param in by_name.values():
        param.set_data(mx.nd.array(from_rank_0(world, param.data().asnumpy()), dtype=param.dtype))
