"""The framework MXNet: replica, readers and random state of a job."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial

import mxnet as mx
import numpy as np

from horovod_train.checkpoint.arrays import ArrayBlob
from horovod_train.collectives.base import Communicator
from horovod_train.collectives.horovod import connect
from horovod_train.collectives.mesh import Mesh
from horovod_train.config.schema import Job
from horovod_train.frameworks.devices import own_gpu
from horovod_train.frameworks.mxnet.collectives import MxnetCommunicator
from horovod_train.frameworks.mxnet.exchange import to_arrays
from horovod_train.frameworks.mxnet.replica import MxnetReplica, Seeds
from horovod_train.frameworks.mxnet.task import OPTIONAL, REQUIRED
from horovod_train.frameworks.optimizers import make_optimizer
from horovod_train.frameworks.python_state import state_of_task
from horovod_train.frameworks.randomness import load_rng_state, mix, rng_state
from horovod_train.frameworks.reader import NumpyReader, start_loader_server
from horovod_train.frameworks.task import load_task, report_unused_methods


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
        train_reader = read(task.train_data())
        eval_data = getattr(task, "eval_data", None)
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
        eval_reader = read(eval_data()) if eval_data else None
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
