"""The framework TensorFlow: replica, readers and random state of a job."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial

import keras
import numpy as np
import tensorflow as tf

from horovod_train.checkpoint.arrays import ArrayBlob
from horovod_train.collectives.base import Communicator
from horovod_train.collectives.horovod import connect
from horovod_train.collectives.mesh import Mesh
from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.frameworks import variables
from horovod_train.frameworks.devices import own_gpu
from horovod_train.frameworks.loss_comparison import LossComparison
from horovod_train.frameworks.optimizers import make_optimizer
from horovod_train.frameworks.python_state import state_of_task
from horovod_train.frameworks.randomness import load_rng_state, mix, rng_state
from horovod_train.frameworks.reader import NumpyReader, start_loader_server
from horovod_train.frameworks.task import load_task, report_unused_methods
from horovod_train.frameworks.tensorflow.collectives import TensorflowCommunicator
from horovod_train.frameworks.tensorflow.replica import TensorflowReplica
from horovod_train.frameworks.tensorflow.task import OPTIONAL, REQUIRED

POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp16": "mixed_float16"}


class TensorflowFramework:
    """TensorFlow, for one job in one process."""

    def __init__(self) -> None:
        self._seeds: list[tf.Variable] = []

    def connect(self, job: Job) -> Communicator:
        """Initialize Horovod, and return the communicator; of one rank, if this process was started alone."""
        if keras.backend.backend() != "tensorflow":
            raise UserError(
                f"Keras uses the back end {keras.backend.backend()}, but the job's framework is tensorflow",
                hint="unset KERAS_BACKEND",
            )
        if job.launch.threads_per_rank is not None:
            tf.config.threading.set_intra_op_parallelism_threads(job.launch.threads_per_rank)
        if job.data.num_workers:
            start_loader_server("horovod_train.frameworks.reader")
        return connect(TensorflowCommunicator, job)

    def prepare(self, job: Job, mesh: Mesh) -> tuple[TensorflowReplica, NumpyReader, NumpyReader | None]:
        """Return this rank's replica and the readers of training and evaluation data."""
        world = mesh.data
        if job.train.deterministic:
            tf.config.experimental.enable_op_determinism()
        choose_device(job, mesh.world)
        keras.utils.clear_session()  # layer names, which checkpoints contain, are numbered from 1
        keras.config.set_dtype_policy(POLICIES[job.train.precision])
        keras.utils.set_random_seed(mix(job.train.seed, 0, 0) % 2**32)
        task = load_task(job.task, job.task_args, REQUIRED)
        report_unused_methods(task, (*REQUIRED, *OPTIONAL), world)
        read = partial(NumpyReader, data=job.data, seed=job.train.seed, task=job.task)
        train_reader = read(task.train_data())
        eval_data = getattr(task, "eval_data", None)
        model = task.model()
        if isinstance(model, keras.Layer) and not model.built:
            task.loss(model, train_reader.first(), training=False)
        self._seeds = variables.seed_states(model)
        replica = TensorflowReplica(
            model=model,
            optimizer=make_optimizer(
                job, world.size, lambda factory, args: factory(learning_rate=job.lr.base_lr, **args)
            ),
            world=world,
            job=job,
            task=task,
        )
        eval_reader = read(eval_data()) if eval_data else None
        replica.python_state = state_of_task(mesh, task, [train_reader, eval_reader])
        replica.one_process = LossComparison(world, train_reader, replica, job)
        return replica, train_reader, eval_reader

    def rng_state(self) -> tuple[object, Mapping[str, ArrayBlob]]:
        """Return the state of Python's, NumPy's, TensorFlow's and the model's generators."""
        state = tf.random.get_global_generator().state.numpy()
        return rng_state({"tensorflow": state, "model": [v.numpy() for v in self._seeds]})

    def load_rng_state(self, tree: object, arrays: Mapping[str, ArrayBlob]) -> None:
        """Load the state of all random generators."""
        own = load_rng_state(tree, arrays)
        tf.random.get_global_generator().state.assign(own["tensorflow"])
        for variable, value in zip(self._seeds, own["model"], strict=True):
            variable.assign(value)

    def seed(self, seed: int, rank: int, epoch: int) -> None:
        """Seed all random generators of this rank."""
        mixed = mix(seed, rank, epoch)
        random.seed(mixed)
        np.random.seed(mixed % 2**32)
        tf.random.set_seed(mixed % 2**32)
        tf.random.get_global_generator().reset_from_seed(mixed % 2**63)
        variables.seed(self._seeds, mixed)


def choose_device(job: Job, world: Communicator) -> None:
    """Make only the rank's GPU visible to TensorFlow, or none.

    Raises:
        UserError: The job requires a GPU, and this rank has none.
    """
    gpus = tf.config.list_physical_devices("GPU")
    own = own_gpu(job, world, len(gpus))
    if own is None:
        tf.config.set_visible_devices([], "GPU")
        return
    tf.config.set_visible_devices(gpus[own], "GPU")
    tf.config.experimental.set_memory_growth(gpus[own], enable=True)
