"""The framework JAX: replica, readers and random state of a job."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from functools import partial

import jax
import numpy as np
import optax

from horovod_train.checkpoint.arrays import ArrayBlob
from horovod_train.collectives.base import Communicator
from horovod_train.collectives.horovod import connect
from horovod_train.collectives.mesh import Mesh
from horovod_train.config.schema import Job
from horovod_train.frameworks.devices import own_gpu
from horovod_train.frameworks.jax.replica import JaxReplica, Keys, SampleKeys
from horovod_train.frameworks.jax.task import OPTIONAL, REQUIRED
from horovod_train.frameworks.loss_comparison import LossComparison
from horovod_train.frameworks.optimizers import make_optimizer
from horovod_train.frameworks.python_state import state_of_task
from horovod_train.frameworks.randomness import load_rng_state, mix, rng_state
from horovod_train.frameworks.reader import NumpyReader, start_loader_server
from horovod_train.frameworks.task import load_task, report_unused_methods
from horovod_train.frameworks.torch.comm.collectives import TorchCommunicator


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
        train_reader = read(task.train_data())
        eval_data = getattr(task, "eval_data", None)
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
        eval_reader = read(eval_data()) if eval_data else None
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
