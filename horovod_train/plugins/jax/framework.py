"""JAX on Horovod, for jobs and for users' own training loops with optax.

JaxTask             the interface of a task
Exchange            sums of arrays over ranks, in compiled code
init                starts Horovod in a user's training loop
average_over_ranks  averages gradients over ranks in a user's training loop
JaxReplica          training step: a compiled function for both passes and the sum over ranks, and one
                    for the update
JaxFramework        replica, readers and random state of a job
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jax.experimental import io_callback

from horovod_train.checkpoint.arrays import ArrayBlob, ReplicaState
from horovod_train.collectives.base import Communicator, Mesh
from horovod_train.collectives.horovod import connect
from horovod_train.config.schema import Job
from horovod_train.data.shard import MicroBatch, PlannedStep
from horovod_train.errors import UserError
from horovod_train.frameworks import exchange
from horovod_train.frameworks.base import (
    IdenticalReplica,
    StepClock,
    StepOutcome,
    add_metric,
    check_is_one_number,
    eval_data_of,
    load_task,
    make_optimizer,
    report_unused_methods,
    train_data_of,
)
from horovod_train.frameworks.devices import join, own_gpu
from horovod_train.frameworks.plain_data import (
    Array,
    check_fits,
    check_same_layout,
    from_blob,
    from_rank_0,
    to_blob,
)
from horovod_train.frameworks.python_state import PythonState, state_of_task
from horovod_train.frameworks.reader import (
    NumpyReader,
    batch_length,
    load_rng_state,
    mix,
    rng_state,
    sample_seeds,
    start_loader_server,
)
from horovod_train.frameworks.torch.comm.collectives import (
    TensorCollectives,
    TorchCommunicator,
    tensor_communicator,
)
from horovod_train.plugins.frameworks.variables import LossComparison, LossScale
from horovod_train.plugins.jax.in_place import in_place, shapes_of

REQUIRED = ("model", "loss")
OPTIONAL = ("train_data", "eval_data", "metrics")


class JaxTask(Protocol):
    """The required methods of a task.

    A task is a class with these methods. The optional ones are not in the protocol.

        class MyTask:
            def model(self, rng): ...                  initial parameters: any tree of arrays
            def train_data(self): ...                  samples: __len__ and __getitem__, NumPy arrays
            def loss(self, params, batch, rng): ...    mean loss over the samples of a batch
            def eval_data(self): ...                   optional: data for evaluation
            def metrics(self, params, batch): ...      optional: {name: one value per sample}

    ``loss`` and ``metrics`` are compiled with ``jax.jit``. ``rng`` is a new key for each micro-batch of
    each rank; with ``train.randomness: sample``, it contains a key for each sample, shape [samples, 2], for
    ``jax.vmap``. An evaluation without ``metrics`` calls ``loss`` with ``rng=None``.
    """

    def model(self, rng: jax.Array) -> Any:
        """Return the initial parameters."""
        ...

    def train_data(self) -> Any:
        """Return the training samples."""
        ...

    def loss(self, params: Any, batch: Any, rng: jax.Array | None) -> jax.Array:
        """Return the mean loss over a batch, shape []."""
        ...


NARROW = (jnp.bfloat16, jnp.float16)  # summed in float32: Horovod has no bfloat16, and fp16 overflows


@dataclass
class Exchange(exchange.Exchange):
    """Sums lists of JAX arrays over ranks, with or without ``jax.jit``.

    On a CPU, Horovod sums in the memory of XLA's buffers. For each byte of gradient, the host copies one
    byte if the gradient is packed into a bucket (in the compiled function), and none if the gradient is
    sent alone. On other devices, a callback copies gradients to the host and back.

    Callbacks are ordered, because all ranks must call Horovod in the same order; XLA must not merge two of
    them.

    Attributes:
        error: Exception of the last exchange; JAX reports only its text.
    """

    error: Exception | None = field(default=None, init=False)
    _ranks: TensorCollectives = field(init=False)

    def __post_init__(self) -> None:
        self._ranks = tensor_communicator(self.world)  # once: slow compared with a step

    def kind(self, array: jax.Array) -> np.dtype[Any]:
        if array.dtype in NARROW:
            return np.dtype(np.float32)
        return np.dtype((self.wire_dtype or jnp.float32) if array.dtype == jnp.float32 else array.dtype)

    def size_on_wire_bytes(self, array: jax.Array) -> int:
        return int(array.size) * self.kind(array).itemsize

    def pack(self, arrays: Sequence[jax.Array], kind: np.dtype[Any]) -> jax.Array:
        """Return one array in the wire dtype with the elements of all arrays; flat, if there are several."""
        typed = [array.astype(kind) for array in arrays]
        return jnp.concatenate([array.ravel() for array in typed]) if len(typed) > 1 else typed[0]

    def reduce(self, buckets: Iterable[jax.Array], names: Iterable[str]) -> Sequence[jax.Array]:
        """Return the sum of each bucket over ranks."""
        add = partial(self._sum, list(names))
        result: Sequence[jax.Array] = jax.lax.platform_dependent(
            *buckets,
            cpu=lambda *buckets: in_place(add, buckets),
            default=lambda *buckets: io_callback(
                partial(_on_copies, add), shapes_of(buckets), *buckets, ordered=True
            ),
        )
        return result

    def unpack(self, total: jax.Array, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the parts of a summed bucket in the types and shapes of its arrays."""
        ends = np.cumsum([array.size for array in arrays])[:-1]
        parts = jnp.split(total.ravel(), ends) if len(arrays) > 1 else [total]
        return [part.reshape(a.shape).astype(a.dtype) for part, a in zip(parts, arrays, strict=True)]

    def _sum(self, names: Sequence[str], buckets: Sequence[Array]) -> None:
        """Start the all-reduce of all buckets, in place, and wait for them."""
        started = perf_counter()
        try:
            handles = [
                self._ranks.start_allreduce(torch.from_numpy(bucket), name)
                for bucket, name in zip(buckets, names, strict=True)
            ]
            for handle in handles:
                self._ranks.wait(handle)
        except Exception as error:
            self.error = error
            raise
        finally:
            self.seconds += perf_counter() - started


def _on_copies(function: Any, *buckets: Any) -> list[Array]:
    """Return copies of arrays after a function changed them in place."""
    copies = [np.array(bucket) for bucket in buckets]
    function(copies)
    return copies


Tree = TypeVar("Tree")
"""A pytree of arrays."""


def init() -> Communicator:
    """Initialize Horovod, and return the communicator; of one rank, if this process was started alone.

    Raises:
        EngineError: The process is one of several ranks, and Horovod is missing or cannot start.
    """
    return join(TorchCommunicator)


def average_over_ranks(
    world: Communicator, *, bucket_size_mib: float = 8.0, wire_dtype: Any = "float32"
) -> optax.GradientTransformation:
    """Return a transformation that averages gradients over ranks.

    Example::

        import optax
        from horovod_train.plugins.jax.framework import average_over_ranks, init
        ranks = init()
        optimizer = optax.chain(average_over_ranks(ranks), optax.clip_by_global_norm(1.0), optax.adam(1e-3))

    Put ``average_over_ranks`` first in the chain: then all ranks clip and update with the gradient of the
    global batch. It works with or without ``jax.jit``.

    Args:
        world: The communicator.
        bucket_size_mib: Approximate size of a bucket of gradients.
        wire_dtype: Data type in which float32 gradients are sent: float32 or float16.
    """
    exchange = Exchange(world, int(bucket_size_mib * 2**20), wire_dtype)

    def update(
        updates: optax.Updates, state: optax.EmptyState, _params: optax.Params = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        leaves, tree = jax.tree.flatten(updates)
        return jax.tree.unflatten(tree, exchange.mean(leaves)), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def broadcast(world: Communicator, tree: Tree) -> Tree:
    """Return rank 0's arrays. Call this with the parameters before the first step. Collective.

    Raises:
        UserError: Ranks have different pytrees.
    """
    if world.size == 1:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    arrays = {str(number): jax.device_get(leaf) for number, leaf in enumerate(leaves)}
    check_same_layout(world, arrays)
    return jax.tree.unflatten(
        structure, [jax.numpy.asarray(from_rank_0(world, array)) for array in arrays.values()]
    )


Out = TypeVar("Out")

COMPUTE_DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
WIRE_DTYPES = {"fp32": jnp.float32, "fp16": jnp.float16}


class Keys:
    """The random keys of a rank."""

    def __init__(self) -> None:
        self.state = jax.random.PRNGKey(0)

    def of(self, epoch: int, micro_batch: MicroBatch) -> jax.Array:
        """Return a new key for a micro-batch."""
        del epoch, micro_batch
        self.state, key = jax.random.split(self.state)
        return key

    def some(self, seed: int, num_samples: int) -> jax.Array:
        """Return keys for a batch that is not trained."""
        del num_samples
        return jax.random.PRNGKey(seed)


class SampleKeys(Keys):
    """A key for each sample, which does not depend on ranks (``train.randomness: sample``)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def of(self, epoch: int, micro_batch: MicroBatch) -> jax.Array:
        seeds = sample_seeds(self._seed, epoch, range(micro_batch.start, micro_batch.stop))
        halves = np.stack([seeds >> np.uint64(32), seeds & np.uint64(0xFFFFFFFF)], axis=1)
        return jnp.asarray(halves.astype(np.uint32))

    def some(self, seed: int, num_samples: int) -> jax.Array:
        """Return keys for a batch that is not trained, equal for all of its samples."""
        return jnp.broadcast_to(jax.random.PRNGKey(seed), (num_samples, 2))


class JaxReplica(IdenticalReplica):
    """The parameters and the optimizer state of one rank.

    Args:
        params: Pytree of arrays.
        optimizer: Created with ``optax.inject_hyperparams``: its state contains the learning rate.
        world: The communicator.
        job: The job description.
        task: Provides loss and metrics.
        keys: Random keys for the loss.

    Raises:
        UserError: The model has no parameters.
    """

    python_state: PythonState
    one_process: LossComparison | None = None
    batch_norm = ""

    def __init__(
        self,
        *,
        params: optax.Params,
        optimizer: optax.GradientTransformation,
        world: Communicator,
        job: Job,
        task: JaxTask,
        keys: Keys,
    ) -> None:
        self.params = jax.tree.map(jnp.asarray, params)
        self.scale = LossScale(is_enabled=job.train.precision == "fp16")
        self._task = task
        self._optimizer = optimizer
        self._world = world
        self._train = job.train
        self._guard_gradients = job.health.non_finite == "skip"
        self._keys = keys
        leaves = jax.tree.leaves(self.params)
        if not leaves:
            raise UserError("the model has no parameters", hint="model(rng) has to return a tree of arrays")
        self._exchange = Exchange(
            world, int(job.allreduce.bucket_size_mib * 2**20), WIRE_DTYPES[job.allreduce.wire_dtype]
        )
        self._bytes_per_step = self._exchange.bytes_on_wire(leaves)
        self._state = optimizer.init(self.params)
        self._zeros = jax.tree.map(jnp.zeros_like, self.params)
        self._add = jax.jit(self._add_gradients)
        self._reduce = jax.jit(self._reduce_gradients)
        self._reduce_nothing = jax.jit(self._sum)
        self._update = jax.jit(self._apply, static_argnames="looks", donate_argnums=(0, 1))
        self._metrics = jax.jit(self._compute_metrics)
        self._loss_alone = jax.jit(self._loss)

    # -- the step

    def step(self, step: PlannedStep, lr: float, *, want_norm: bool) -> StepOutcome:
        """Perform one optimizer step with this rank's micro-batches. Collective."""
        clock = StepClock()
        gradients, loss = self._zeros, jnp.zeros(())
        for place, (micro_batch, batch) in enumerate(step):
            clock.end_phase("data")
            work = self._reduce if place == len(step) - 1 else self._add
            gradients, loss = self._call(
                work,
                self.params,
                gradients,
                loss,
                batch,
                self._keys.of(step.epoch, micro_batch),
                micro_batch.share,
                self.scale.scale,
            )
            clock.end_phase("compute")
        if not len(step):
            gradients, loss = self._call(self._reduce_nothing, gradients, loss)
        local_loss, whole_loss = (float(value) for value in loss)
        clock.end_phase("compute")
        clock.move("compute", "allreduce_wait", self._take_wait())
        norm, is_finite = self._finish(gradients, whole_loss, lr, want_norm=want_norm)
        clock.end_phase("optimizer")
        return StepOutcome(
            loss=whole_loss,
            local_loss=local_loss,
            is_finite=is_finite,
            numbers={"grad_norm": norm, "sent_bytes": self._bytes_per_step},
            clock=clock,
        )

    def _loss(self, params: optax.Params, batch: object, key: jax.Array | None) -> jax.Array:
        """Return the loss, computed in the precision of the job."""
        dtype = COMPUTE_DTYPES.get(self._train.precision)
        if dtype is not None:
            params, batch = cast_floats(params, dtype), cast_floats(batch, dtype)
        loss = self._task.loss(params, batch, key)
        check_is_one_number(loss.shape)
        return loss.astype(jnp.float32).reshape(())

    def losses_of(self, batches: Sequence[object]) -> tuple[list[float], str]:
        """Return the losses of some batches, and whether they depend on the random key."""

        def loss_of(batch: object, seed: int) -> float:
            keys = self._keys.some(seed, batch_length(batch))
            return float(self._call(self._loss_alone, self.params, batch, keys))

        losses = [loss_of(batch, 0) for batch in batches]
        return losses, "" if loss_of(batches[-1], 1) == losses[-1] else "they are random"

    def _add_gradients(
        self,
        params: optax.Params,
        gradients: optax.Updates,
        loss: jax.Array,
        batch: object,
        key: jax.Array,
        share: jax.Array,
        scale: jax.Array,
    ) -> tuple[optax.Updates, jax.Array]:
        def weighted(params: optax.Params) -> tuple[jax.Array, jax.Array]:
            mine = self._loss(params, batch, key) * share
            return mine * scale, mine

        more, mine = jax.grad(weighted, has_aux=True)(params)
        return jax.tree.map(jnp.add, gradients, more), loss + mine

    def _reduce_gradients(
        self, params: optax.Params, gradients: optax.Updates, loss: jax.Array, *rest: object
    ) -> tuple[object, ...]:
        """Add gradient and loss of the last micro-batch, and sum over ranks."""
        return self._sum(*self._add_gradients(params, gradients, loss, *rest))

    def _sum(
        self, gradients: optax.Updates, loss: jax.Array
    ) -> tuple[optax.Updates, tuple[jax.Array, jax.Array]]:
        """Return the gradients summed over ranks, and the losses of this rank and of all ranks."""
        leaves, tree = jax.tree.flatten(gradients)
        *sums, whole_loss = self._exchange.sum([*leaves, loss])
        return jax.tree.unflatten(tree, sums), (loss, whole_loss)

    def _finish(
        self, gradients: optax.Updates, loss: float, lr: float, *, want_norm: bool
    ) -> tuple[float | None, bool]:
        """Unscale, clip and update. Return the gradient norm, and whether loss and norm are finite.

        Gradients are equal on all ranks here: all ranks make the same decision.
        """
        if not math.isfinite(loss):
            return None, False
        looks = want_norm or self._guard_gradients or self.scale.is_enabled
        looks = looks or self._train.clip_grad_norm is not None
        self.params, self._state, found = self._update(
            self.params, self._state, gradients, lr, 1.0 / self.scale.scale, looks=looks
        )
        norm = float(found) if looks else None
        is_finite = norm is None or math.isfinite(norm)
        self.scale.update(is_finite=is_finite)
        return norm, is_finite

    def _apply(
        self,
        params: optax.Params,
        state: optax.OptState,
        gradients: optax.Updates,
        lr: jax.Array,
        inverse_scale: jax.Array,
        *,
        looks: bool,
    ) -> tuple[optax.Params, optax.OptState, jax.Array]:
        """Update. With ``looks``, compute the norm, and change nothing if it is not finite."""
        state.hyperparams["learning_rate"] = lr
        norm = jnp.zeros(())
        if self.scale.is_enabled:
            gradients = jax.tree.map(lambda g: g * inverse_scale.astype(g.dtype), gradients)
        if looks:
            norm = optax.global_norm(jax.tree.map(lambda g: g.astype(jnp.float32), gradients))
        if (limit := self._train.clip_grad_norm) is not None:
            factor = jnp.where(norm > limit, limit / norm, 1.0)
            gradients = jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)
        try:
            updates, new_state = self._optimizer.update(gradients, state, params)
        except TypeError as error:
            if "keyword-only" not in str(error):
                raise
            raise UserError(
                f"the optimizer needs values of the loss in its update, which steps do not give: {error}",
                hint="use an optimizer that needs gradients alone; for a plateau, use lr.decay: plateau",
            ) from error
        new_params = optax.apply_updates(params, updates)
        if looks:
            keep = partial(jnp.where, jnp.isfinite(norm))
            new_params, new_state = jax.tree.map(keep, (new_params, new_state), (params, state))
        return new_params, new_state, norm

    def _call(self, work: Callable[..., Out], *arguments: object) -> Out:
        """Call compiled code that contains an exchange, and raise the exception of the exchange.

        Raises:
            PeerError: Another rank was lost.
        """
        try:
            return jax.block_until_ready(work(*arguments))
        except jax.errors.JaxRuntimeError as error:
            cause, self._exchange.error = self._exchange.error, None
            if cause is None:
                raise
            raise cause from error

    def _take_wait(self) -> float:
        seconds, self._exchange.seconds = self._exchange.seconds, 0.0
        return seconds

    # -- other methods

    def evaluate(self, batches: Iterable[tuple[MicroBatch, object]]) -> dict[str, tuple[float, int]]:
        """Return (sum, number of samples) of each metric over this rank's batches."""
        sums: dict[str, tuple[float, int]] = {}
        for micro_batch, batch in batches:
            for name, value in self._metrics(self.params, batch).items():
                add_metric(sums, name, value, len(micro_batch))
        return sums

    def _compute_metrics(self, params: optax.Params, batch: object) -> Mapping[str, jax.Array]:
        compute = getattr(self._task, "metrics", None)
        return {"loss": self._loss(params, batch, None)} if compute is None else compute(params, batch)

    def sync_buffers(self) -> None:
        """Do nothing: the model has no buffers."""

    def broadcast(self) -> None:
        """Broadcast parameters from rank 0."""
        self.params = broadcast(self._world, self.params)

    def is_finite(self) -> bool:
        """Return whether all parameters are finite."""
        return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(self.params))

    def state(self, *, copy: bool) -> ReplicaState:
        """Return a copy of the state."""
        return ReplicaState(
            model=blobs_of(self.params),
            optimizer=blobs_of(self._state),
            optimizer_tree={"structure": str(jax.tree.structure(self._state))},
            scaler=self.scale.state(),
        )

    def load_state(self, state: ReplicaState) -> None:
        """Load a state.

        Raises:
            CheckpointError: The state is that of another model or optimizer.
        """
        params = filled(self.params, state.model, "model")
        self._state = filled(self._state, state.optimizer, "optimizer")
        self.params = params
        self.scale.load_state(state.scaler)

    def device_name(self) -> str:
        """Return the names of the model's devices."""
        return ", ".join(sorted(str(device) for device in jax.tree.leaves(self.params)[0].devices()))

    def num_parameters(self) -> int:
        """Return the number of trained parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))


def cast_floats(tree: Tree, dtype: jnp.dtype) -> Tree:
    """Return a pytree with its floating-point arrays converted to a type."""

    def cast(leaf: jax.Array) -> jax.Array:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, tree)


def named_leaves(tree: object) -> dict[str, jax.Array]:
    """Return the leaves of a pytree by path, such as ``layers.0.kernel``."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def blobs_of(tree: object) -> dict[str, ArrayBlob]:
    """Return copies of the arrays of a pytree as bytes, by path."""
    return {name: to_blob(np.array(_numbers(leaf))) for name, leaf in named_leaves(tree).items()}


def _numbers(leaf: jax.Array) -> jax.Array:
    """Return an array, or the numbers of a random key, which NumPy does not have."""
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _is_key(leaf: jax.Array) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key)


def _like(leaf: jax.Array, numbers: np.ndarray) -> jax.Array:
    """Return stored numbers in the form of a leaf."""
    found = jnp.asarray(numbers)
    return jax.random.wrap_key_data(found, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else found


def filled(tree: Tree, blobs: Mapping[str, ArrayBlob], what: str) -> Tree:
    """Return a pytree of the same structure with the arrays of a checkpoint.

    Raises:
        CheckpointError: Paths or shapes differ.
    """
    by_name = named_leaves(tree)
    check_fits({name: tuple(np.shape(_numbers(leaf))) for name, leaf in by_name.items()}, blobs, what)
    return jax.tree.unflatten(
        jax.tree.structure(tree), [_like(leaf, from_blob(blobs[name])) for name, leaf in by_name.items()]
    )


class JaxFramework:
    """JAX with optax, for one job in one process."""

    def __init__(self) -> None:
        self._keys: Keys | None = None

    def connect(self, job: Job) -> Communicator:
        """Initialize Horovod, and return the communicator; of one rank, if this process was started alone."""
        if job.launch.threads_per_rank is not None:
            # The callback blocks one thread while it waits for other ranks.
            os.environ.setdefault("NPROC", str(max(2, job.launch.threads_per_rank)))
        if job.train.deterministic:
            be_deterministic()
        if job.data.num_workers:
            start_loader_server("horovod_train.frameworks.reader")
        return connect(TorchCommunicator, job)

    def prepare(self, job: Job, mesh: Mesh) -> tuple[JaxReplica, NumpyReader, NumpyReader | None]:
        """Return this rank's replica and the readers of training and evaluation data."""
        world = mesh.data
        choose_device(job, mesh.world)
        by_sample = job.train.randomness == "sample"
        self._keys = SampleKeys(job.train.seed) if by_sample else Keys()
        task = load_task(job.task, job.task_args, REQUIRED)
        report_unused_methods(task, (*REQUIRED, *OPTIONAL), world)
        read = partial(NumpyReader, data=job.data, seed=job.train.seed, task=job.task, by_sample=by_sample)
        train_reader = read(train_data_of(job, task))
        eval_data = eval_data_of(job, task)
        optimizer = make_optimizer(
            job,
            world.size,
            lambda factory, args: optax.inject_hyperparams(factory, static_args=tuple(args))(
                learning_rate=job.lr.base_lr, **args
            ),
        )
        replica = JaxReplica(
            params=task.model(jax.random.PRNGKey(job.train.seed)),
            optimizer=optimizer,
            world=world,
            job=job,
            task=task,
            keys=self._keys,
        )
        eval_reader = None if eval_data is None else read(eval_data)
        replica.python_state = state_of_task(mesh, task, [train_reader, eval_reader])
        replica.one_process = LossComparison(world, train_reader, replica, job)
        return replica, train_reader, eval_reader

    def rng_state(self) -> tuple[object, Mapping[str, ArrayBlob]]:
        """Return the state of the generators of Python and NumPy, and the rank's key."""
        assert self._keys is not None
        return rng_state({"jax": np.array(self._keys.state)})

    def load_rng_state(self, tree: object, arrays: Mapping[str, ArrayBlob]) -> None:
        """Load the state of all random generators."""
        assert self._keys is not None
        self._keys.state = jax.numpy.asarray(load_rng_state(tree, arrays)["jax"])

    def seed(self, seed: int, rank: int, epoch: int) -> None:
        """Seed all random generators of this rank."""
        assert self._keys is not None
        mixed = mix(seed, rank, epoch)
        random.seed(mixed)
        np.random.seed(mixed % 2**32)
        self._keys.state = jax.random.PRNGKey(mixed % 2**31)


def be_deterministic() -> None:
    """Make XLA use deterministic operations on GPUs, as on CPUs. Call this before JAX is used."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()


def choose_device(job: Job, world: Communicator) -> None:
    """Set JAX's default device to the rank's GPU, or to the CPU.

    Raises:
        UserError: The job requires a GPU, and this rank has none.
    """
    # JAX preallocates three quarters of the memory of all visible GPUs, including those of other ranks.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    own = own_gpu(job, world, len(gpus))
    jax.config.update("jax_default_device", jax.devices("cpu")[0] if own is None else gpus[own])
