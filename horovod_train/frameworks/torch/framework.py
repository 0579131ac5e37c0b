"""Creates the components of a job for PyTorch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from horovod_train.checkpoint.arrays import StoredArrays
from horovod_train.checkpoint.inspect import open_weights
from horovod_train.collectives.base import Communicator, Mesh
from horovod_train.collectives.horovod import connect
from horovod_train.config.schema import Allreduce, Compile, Job, Train
from horovod_train.config.support import follows_gain, strategy_support
from horovod_train.errors import HorovodTrainError, UnknownNameError
from horovod_train.frameworks.base import eval_data_of, load_task, report_unused_methods, train_data_of
from horovod_train.frameworks.devices import own_gpu
from horovod_train.frameworks.python_state import Root, state_of_task
from horovod_train.frameworks.reader import start_loader_server
from horovod_train.frameworks.torch.comm.collectives import (
    TorchCommunicator,
    mpi,
    sum_over,
    tensor_communicator,
)
from horovod_train.frameworks.torch.comm.groups import (
    explain_distributed,
    explain_second_derivative,
    explain_unused,
)
from horovod_train.frameworks.torch.comm.sync_batch_norm import Sum, synchronize_batch_norm
from horovod_train.frameworks.torch.device import TorchBased
from horovod_train.frameworks.torch.sizes import (
    FlopCounter,
    layers_to_recompute,
    recompute_activations,
    saved_activations,
)
from horovod_train.frameworks.torch.state.local import load_initial, meta_parameters, whole_model
from horovod_train.frameworks.torch.state.model import (
    batch_of,
    fake_step_errors,
    loss_of,
    meta_model,
    to_fake_tensor,
)
from horovod_train.frameworks.torch.state.optimizer import explain_closure, optimizer_over
from horovod_train.frameworks.torch.state.rank_state import load_rng_state, rng_state, seed_generators
from horovod_train.frameworks.torch.step.averages import averaging_of
from horovod_train.frameworks.torch.step.deferred import NoiseMeter
from horovod_train.frameworks.torch.step.gradient_hooks import defer_hooks_after_accumulation
from horovod_train.frameworks.torch.step.graphs import CudaRecorder, Recorder
from horovod_train.frameworks.torch.step.random import install
from horovod_train.frameworks.torch.step.replica import TorchReplica
from horovod_train.frameworks.torch.strategies.allreduce.strategy import make_allreduce
from horovod_train.frameworks.torch.strategies.base import DevicePlacement, Strategy, make_strategy
from horovod_train.frameworks.torch.task import OPTIONAL, REQUIRED, Placement, TorchReader, TorchTask
from horovod_train.frameworks.torch.verify.one_process import OneProcess, has_room
from horovod_train.frameworks.torch.verify.verification import (
    StrategyVerifier,
    check_model,
    copy_of_task,
    copy_of_value,
    generators_of,
    refuse_repeated_parameters,
    refused,
)

log = logging.getLogger(__name__)


class TorchFramework(TorchBased):
    """The framework PyTorch, for one job in one process."""

    def connect(self, job: Job) -> Communicator:
        """Return the communicator of all ranks of the run; it has one rank if the process runs alone."""
        if job.launch.threads_per_rank is not None:
            torch.set_num_threads(job.launch.threads_per_rank)
        if job.data.num_workers:
            start_loader_server("horovod_train.frameworks.torch.task")
        if strategy_support(job.strategy.name).requires_mpi:
            mpi()  # mpi4py must initialize MPI: Horovod would finalize it while it is in use
        return connect(TorchCommunicator, job)

    def prepare(self, job: Job, mesh: Mesh) -> tuple[TorchReplica, TorchReader, TorchReader | None]:
        """Return this rank's replica and the readers of training and evaluation data."""
        set_global_options(job)
        if job.train.randomness == "sample":
            install()  # before the task imports names of these functions
        device = choose_device(job, mesh.world)
        recorder = recorder_of(job, device)
        seed_generators(job.train.seed, 0, 0)
        task = load_task(job.task, job.task_args, REQUIRED)
        report_unused_methods(task, (*REQUIRED, *OPTIONAL), mesh.world)
        recomputed = layers_recomputed(job, copy_of_task(task), mesh.world)
        strategy = make_strategy(job, mesh)
        weights = initial_weights(job)
        plain_task = copy_of_task(task)
        model = make_model(task, strategy, weights)
        check_model(model)
        defer_hooks_after_accumulation(model)
        self.synchronize(model, job, mesh, strategy.sum_in_pass)
        recompute_activations(model, recomputed)
        read = reader_factory(job, device)
        before = dict(vars(task))
        reader = read(train_data_of(job, task))
        eval_data = eval_data_of(job, task)
        eval_reader = None if eval_data is None else read(eval_data)
        vars(plain_task).update(changed_attributes(task, before))

        def is_explained(error: Exception) -> bool:
            return self.explain(error, job, mesh.world.rank) is not None

        move_to_device = DevicePlacement(
            device,
            job.train,
            task,
            partial(reader.first, 2),
            weights,
            partial(another_model, job, plain_task),
        )
        with refused(job, is_explained) if is_verified(job) else nullcontext():
            model = strategy.wrap(model, move_to_device)
            optimizer = optimizer_of(job, task, model, mesh.data.size)
            strategy.noise = noise_meter_of(job, optimizer, device, strategy)
            strategy.bind(model, optimizer)
            forward_model: torch.nn.Module = model
            if job.train.compile is not None:
                forward_model = compiled(model, job.train.compile)
            forward_model = strategy.forward_module(forward_model)
        replica = TorchReplica(
            task=task,
            model=model,
            forward_model=forward_model,
            optimizer=optimizer,
            strategy=strategy,
            data_ranks=mesh.data,
            all_ranks=mesh.world,
            train=job.train,
            flops=FlopCounter(is_enabled=wants_flops(job, device.type)),
            health=job.health,
            averaging=averaging_of(job, mesh.data.size),
            noise=strategy.noise,
        )
        if is_verified(job) and can_be_copied(task, mesh) and has_room(model, strategy, device, mesh.world):
            reference = reference_replica(job, mesh, plain_task, device)
            replica.first_steps.verifier = StrategyVerifier(job, reference, replica, mesh.world, is_explained)
        replica.python_state = state_of_task(
            mesh,
            task,
            [reader, eval_reader],
            Root("model", model, frozenset(vars(torch.nn.Module())), is_trained=True),
        )
        if strategy.capabilities.sums_gradients and (mesh.data.size > 1 or job.train.accumulation_steps > 1):
            replica.one_process = OneProcess(replica, reader, mesh, job)
        if recorder is not None:
            replica.record_steps(recorder, only_if_faster=job.train.cuda_graph == "auto")
        return replica, reader, eval_reader

    @staticmethod
    def synchronize(
        model: torch.nn.Module, job: Job, mesh: Mesh, own_sum: Sum | None = None, prefix: str = "batch_norm"
    ) -> None:
        """Make batch normalization use the statistics of all ranks, if the job or a layer requests it."""
        total = own_sum or partial(sum_over, tensor_communicator(mesh.data))
        synchronize_batch_norm(
            model, total, every=job.train.sync_batch_norm, prefix=f"horovod_train.{prefix}"
        )

    def explain(self, error: Exception, job: Job, rank: int) -> HorovodTrainError | None:
        """Return this package's error for an error of PyTorch; None: it is another error."""
        of_others = explain_distributed(error, job.health) or explain_unused(error)
        of_others = of_others or explain_second_derivative(error) or explain_closure(error, job)
        return of_others or super().explain(error, job, rank)


def is_verified(job: Job) -> bool:
    """Return whether the first steps under the job's strategy are compared with those of the plain model."""
    return job.health.verify_strategy and strategy_support(job.strategy.name).is_verified


def noise_meter_of(
    job: Job, optimizer: torch.optim.Optimizer, device: torch.device, strategy: Strategy
) -> NoiseMeter | None:
    """Return the meter of the gradient noise scale; None: the job does not measure it."""
    if job.metrics.noise_scale_every_steps is None and not follows_gain(job.lr.scaling):
        return None
    return NoiseMeter(
        optimizer,
        by_group=job.metrics.noise_scale_groups,
        device=device,
        has_parts=strategy.measures_local_gradients,
    )


def can_be_copied(task: TorchTask, mesh: Mesh) -> bool:
    """Return whether a task can be copied for the plain model; log a warning if not."""
    generators = generators_of(task)
    if generators and mesh.world.rank == 0:
        log.warning(
            "the strategy is not compared with the plain model: %s of the task is a generator, which cannot "
            "be copied",
            ", ".join(generators),
        )
    return not generators


def changed_attributes(task: TorchTask, before: Mapping[str, object]) -> dict[str, object]:
    """Return copies of the attributes that a task has set since ``before`` was recorded."""
    memo: dict[int, object] = {}
    return {
        name: copy_of_value(value, memo)
        for name, value in vars(task).items()
        if before.get(name, task) is not value
    }


def another_model(job: Job, task: TorchTask) -> torch.nn.Module:
    """Return a new model of a task, on the CPU; the task is not changed."""
    with seeded_as_at_the_start(job):
        return copy_of_task(task).model()


@contextmanager
def seeded_as_at_the_start(job: Job) -> Iterator[None]:
    """Seed generators as for the job's model in the block, and restore their state afterwards."""
    random_state = rng_state()
    seed_generators(job.train.seed, 0, 0)
    try:
        yield
    finally:
        load_rng_state(*random_state)


def reference_replica(job: Job, mesh: Mesh, task: TorchTask, device: torch.device) -> TorchReplica:
    """Return a replica of the task's plain model under ``allreduce``, for the strategy's verification."""
    strategy = make_allreduce(mesh.data, Allreduce(), name="verify")
    with seeded_as_at_the_start(job):
        plain = make_model(task, strategy, initial_weights(job))
        defer_hooks_after_accumulation(plain)
        TorchFramework.synchronize(plain, job, mesh, prefix="verify.batch_norm")
        model = DevicePlacement(device, job.train)(plain)
        optimizer = optimizer_of(job, task, model, mesh.data.size)
        strategy.bind(model, optimizer)
    return TorchReplica(
        task=task,
        model=model,
        optimizer=optimizer,
        strategy=strategy,
        data_ranks=mesh.data,
        train=job.train,
        health=job.health,
        lag_steps=0,
    )


def wants_flops(job: Job, device: str) -> bool:
    """Return whether FLOPs are counted: a peak may be available, and the model is not compiled."""
    is_compared = device != "cpu" or job.metrics.device_peak_flops is not None
    return job.metrics.enabled and is_compared and job.train.compile is None


def set_global_options(job: Job) -> None:
    """Set PyTorch's global options; must be called before the first use of a GPU."""
    if job.train.deterministic:
        # cuBLAS is deterministic only with a fixed workspace.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision(job.train.matmul_precision)


def compiled(model: torch.nn.Module, how: Compile) -> torch.nn.Module:
    """Return the compiled model.

    Raises:
        UnknownNameError: Unknown backend.
    """
    backends = torch.compiler.list_backends(exclude_tags=())
    if how.backend not in backends:
        raise UnknownNameError("train.compile.backend", how.backend, backends)
    mode = None if how.mode == "default" else how.mode
    made = torch.compile(model, backend=how.backend, mode=mode, dynamic=how.dynamic)
    return cast("torch.nn.Module", made)


def recorder_of(job: Job, device: torch.device) -> Recorder | None:
    """Return the recorder of CUDA graphs, if the job enables them; must precede the creation of the model."""
    if job.train.cuda_graph is False:
        return None
    if device.type == "cuda":
        return CudaRecorder()
    log.warning("train.cuda_graph has no effect on a CPU")
    return None


def placement(device: torch.device, train: Train) -> Placement:
    """Return the device and memory format of batches."""
    return Placement(device, torch.channels_last if train.channels_last else torch.preserve_format)


def reader_factory(job: Job, device: torch.device, **more: Any) -> Callable[..., TorchReader]:
    """Return a function that creates the reader of a dataset; ``more`` are further arguments of readers."""
    return partial(
        TorchReader,
        data=job.data,
        seed=job.train.seed,
        placed=placement(device, job.train),
        task=job.task,
        by_sample=job.train.randomness == "sample",
        **more,
    )


def choose_device(job: Job, world: Communicator) -> torch.device:
    """Return the rank's own GPU, or the CPU.

    Raises:
        UserError: A GPU is required, and this rank has none.
    """
    is_for_cpus = torch.version.cuda is None
    why_none = f"PyTorch {torch.__version__} is built for CPUs alone: install one with CUDA"
    gpu = own_gpu(job, world, torch.cuda.device_count(), why_none=why_none if is_for_cpus else "")
    if gpu is None:
        return torch.device("cpu")
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    return device


def layers_recomputed(job: Job, task: TorchTask, world: Communicator) -> Sequence[str]:
    """Return the names, or patterns, of the layers that recompute their activations.

    Raises:
        UserError: The activations exceed the budget, or their size cannot be determined.
    """
    budget_mib = job.train.activation_memory_mib
    if budget_mib is None:
        return job.train.activation_checkpointing
    batch = batch_of(job, task)
    with FakeTensorMode(allow_non_fake_inputs=True), fake_step_errors(job):
        model, fake = meta_model(task).train(), to_fake_tensor(batch)
        layers = layers_to_recompute(
            saved_activations(model, lambda: loss_of(job, task, model, fake)), budget_mib
        )
    seed_generators(job.train.seed, 0, 0)  # the initial weights do not depend on this computation
    if world.rank == 0:
        log.info("train.activation_memory_mib: %d layers recompute activations: %s", len(layers), layers)
    return layers


def initial_weights(job: Job) -> StoredArrays | None:
    """Return the weights from which training starts; None: those that the task creates.

    Raises:
        UserError: The file is missing or damaged.
    """
    path = job.train.initial_weights
    return None if path is None else open_weights(Path(path))


def make_model(task: TorchTask, strategy: Strategy, weights: StoredArrays | None) -> torch.nn.Module:
    """Return the task's model with ``weights``, or on the meta device if the strategy loads the weights.

    Raises:
        UserError: The weights belong to another model.
    """
    if weights is None:
        return task.model()
    if strategy.capabilities.meta_model:
        with meta_parameters():
            return task.model()
    model = task.model()
    load_initial(model, whole_model(model), weights)
    return model


def optimizer_of(
    job: Job, task: TorchTask, model: torch.nn.Module, num_data_ranks: int
) -> torch.optim.Optimizer:
    """Return the job's optimizer of the model's parameters, or of the task's parameter groups.

    Raises:
        UserError: Unknown optimizer, or invalid arguments.
    """
    groups_of = getattr(task, "param_groups", None)
    if groups_of is None:
        return optimizer_over(job, [p for p in model.parameters() if p.requires_grad], num_data_ranks)
    groups = list(groups_of(model))
    refuse_repeated_parameters(model, groups)
    return optimizer_over(job, groups, num_data_ranks)
