"""Arguments of each strategy, and fields of the job description that it does not support.

They are checked without importing PyTorch. ``frameworks/torch/strategies/`` implements the strategies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from horovod_train.config.axes import Axes
from horovod_train.config.fields import Count, Section
from horovod_train.config.schema import Job, Strategy
from horovod_train.config.support import Refused


class NoArguments(Section):
    """Arguments of a strategy without arguments."""


class OuterArguments(Section):
    """Outer optimizer (SGD) of local SGD. Its gradient is the update of the weights averaged over ranks."""

    lr: Annotated[float, Field(gt=0)] = 0.7
    """Learning rate; 1 without momentum equals averaging."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum."""

    nesterov: bool = True
    """Use Nesterov momentum."""


class LocalSgdArguments(Section):
    """Arguments of local SGD: ranks train independently, and average their weights periodically."""

    every_steps: Count
    """Interval of averaging, in steps."""

    allreduce_steps: Annotated[int, Field(ge=0)] = 0
    """Number of steps at the start that all-reduce gradients, before ranks train independently."""

    outer: OuterArguments | None = None
    """Outer optimizer; null: weights are averaged; {}: the outer optimizer of DiLoCo."""


class ZeroArguments(Section):
    """Arguments of ZeRO: each rank updates a part of the weights, and stores its optimizer state only."""

    stage: Literal[1, 2] = 2
    """1: while micro-batches accumulate, ranks store all gradients; 2: those of their part only."""


class DdpArguments(Section):
    """Arguments of PyTorch's DistributedDataParallel."""

    find_unused_parameters: bool | None = None
    """Find parameters without a gradient in each step; null: only if the first step has such parameters."""

    static_graph: bool = False
    """Assume that each step uses the same parameters in the same order."""


Pattern = Annotated[str, StringConstraints(min_length=1)]
DType = Literal["fp32", "bf16", "fp16"]
TensorStyle = Literal[
    "colwise",
    "rowwise",
    "colwise_gather",
    "embedding",
    "sequence",
    "sequence_begins",
    "sequence_ends",
    "colwise_sequence",
    "rowwise_sequence",
]


class TensorParallelArguments(Section):
    """Arguments of tensor parallelism, which shards layers over ranks with PyTorch's DTensor."""

    degree: Count | None = None
    """Number of ranks among which each layer is sharded; null: all ranks."""

    plan: dict[Pattern, TensorStyle] | None = None
    """Sharding style by module name pattern; null: the model's plan, or the plan of a known module type."""


class ParameterServerArguments(Section):
    """Arguments of asynchronous training: ranks send gradients to servers that store parts of the weights."""

    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 4
    """Maximum number of steps that a rank is ahead of the slowest."""

    meet_every_steps: Count = 100
    """Interval in steps at which all gradients are waited for, so that weights can be saved and evaluated."""


class StageArguments(Section):
    """Arguments of pipeline stages."""

    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """gpipe: all forward passes first; 1f1b: each backward pass as early as possible, which stores fewer
    activations; interleaved: 1f1b with several stages per rank, which reduces idle time."""

    chunks_per_rank: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of stages per rank; with interleaved at least 2."""

    balance: Literal["parameters", "time"] = "parameters"
    """Balance stages by number of parameters, or by the time measured for a sample batch."""

    @model_validator(mode="after")
    def _chunks_are_interleaved(self) -> Self:
        if (self.chunks_per_rank > 1) != (self.schedule == "interleaved"):
            raise ValueError(
                f"schedule: {self.schedule} and chunks_per_rank: {self.chunks_per_rank} do not go together; "
                "several stages for each rank are interleaved, and interleaved needs at least 2"
            )
        return self


class PipelineArguments(StageArguments):
    """Arguments of pipeline parallelism: layers are distributed over ranks."""

    stages: Count | None = None
    """Number of ranks of a pipeline; null: all ranks."""


class FsdpArguments(Section):
    """Arguments of PyTorch's fully_shard."""

    units: list[Pattern] | None = None
    """Name patterns of modules, each of which is one unit, such as ``layers.*``; null: the model's layers."""

    param_dtype: DType | None = None
    """Data type of gathered weights; null: that of the parameters."""

    reduce_dtype: DType | None = None
    """Data type of gradients in the reduce-scatter; null: that of gathered weights."""

    reshard_after_forward: bool = True
    """Free a unit after its forward pass, and gather it again for backward."""

    reduce_each: bool = True
    """Reduce gradients of each micro-batch; false: accumulate whole gradients, and reduce them once."""

    prefetch_units: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of units that are gathered in advance."""

    offload: bool = False
    """On GPUs: store weights, gradients and optimizer state in host memory."""

    shard_ranks: Count | Literal["host"] | None = None
    """Number of consecutive ranks among which the model is sharded; groups of such ranks are replicas. host:
    the ranks of a host; null: all ranks."""


class DeepSpeedArguments(Section):
    """Arguments of DeepSpeed's ZeRO."""

    stage: Literal[1, 2, 3] = 3
    """1: shard optimizer state; 2: also gradients; 3: also weights."""

    offload_optimizer: Literal["cpu", "nvme"] | None = None
    """cpu: store and update optimizer state in host memory; nvme: store it on a disk."""

    offload_parameters: Literal["cpu"] | None = None
    """With stage 3: store weights that are not in use in host memory."""

    nvme_path: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Folder on a disk, for nvme."""

    zero_optimization: dict[str, Any] = Field(default_factory=dict)
    """Further settings of DeepSpeed's section of that name."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        both = sorted(self.zero_optimization.keys() & {"stage", "offload_optimizer", "offload_param"})
        if both:
            raise ValueError(f"zero_optimization: {both[0]} is a separate field: set that one")
        if self.offload_parameters is not None and self.stage != 3:
            raise ValueError(f"offload_parameters needs stage: 3, and this is stage: {self.stage}")
        on_disk = self.offload_optimizer == "nvme"
        if on_disk and self.stage != 3:
            raise ValueError(f"nvme needs stage: 3, and this is stage: {self.stage}")
        if on_disk != (self.nvme_path is not None):
            raise ValueError("nvme_path and offload_optimizer: nvme require each other")
        return self


class MeshArguments(StageArguments, FsdpArguments):
    """Arguments of a mesh of ranks with a data, a pipeline and a tensor axis."""

    pipeline: Count = 1
    """Number of ranks of a pipeline."""

    tensor: Count = 1
    """Number of ranks among which each layer is sharded."""

    plan: dict[Pattern, TensorStyle] | None = None
    """Sharding style by module name pattern; null: the model's plan, or the plan of a known module type."""

    shard: bool = False
    """Shard weights over data-parallel ranks, as under fsdp and with its arguments."""

    @model_validator(mode="after")
    def _has_one_way(self) -> Self:
        if self.shard and self.pipeline > 1:
            raise ValueError(
                "shard: true needs pipeline: 1, for stages keep whole layers; leave one of them out"
            )
        given = self.model_fields_set
        unused = (given & set(FsdpArguments.model_fields) if not self.shard else set()) | (
            given & set(StageArguments.model_fields) if self.pipeline == 1 else set()
        )
        if unused:
            raise ValueError(
                f"{', '.join(sorted(unused))} would have no effect: arguments of fsdp need shard: true, and "
                "those of stages need pipeline: 2 or more"
            )
        return self


@dataclass(frozen=True)
class StrategySupport:
    """Properties of a strategy.

    Attributes:
        arguments: Model of ``strategy.args``.
        refused: Fields that it does not support.
        axes: Returns the axes, given the world size and the arguments; None: all ranks are data-parallel.
        lr_follows_rank: Whether the learning rate scales with the batch of a rank, not with the global batch.
        requires_mpi: Whether ranks communicate over MPI in addition to Horovod.
    """

    arguments: type[Section] = NoArguments
    refused: tuple[Refused, ...] = ()
    axes: Callable[[int, Any], Axes] | None = None
    lr_follows_rank: bool = False
    requires_mpi: bool = False


def strategy_requires_mpi(strategy: Strategy) -> bool:
    """Return whether ranks communicate over MPI in addition to Horovod."""
    support = STRATEGY_SUPPORT.get(strategy.name)
    return support is not None and support.requires_mpi


def batch_size_of_lr(job: Job, num_data_ranks: int) -> int:
    """Return the batch size with which the learning rate scales: that of all ranks, or of one rank."""
    support = STRATEGY_SUPPORT.get(job.strategy.name)
    if support is None or not support.lr_follows_rank:
        return job.global_batch_size(num_data_ranks)
    return -(-job.global_batch_size(num_data_ranks) // num_data_ranks)


def axes_of(strategy: Strategy, world_size: int) -> Axes:
    """Return the axes of the ranks of a job.

    Raises:
        UserError: The strategy does not support this number of ranks.
    """
    support = STRATEGY_SUPPORT.get(strategy.name)
    if support is None or support.axes is None:
        return Axes(world_size)
    return support.axes(world_size, support.arguments.model_validate(strategy.args))


def has_model_parallel_ranks(strategy: Strategy) -> bool:
    """Return whether the strategy has pipeline or tensor-parallel ranks, which read the same samples."""
    support = STRATEGY_SUPPORT.get(strategy.name)
    return support is not None and support.axes is not None


NO_SAMPLES = Refused(
    "train.randomness",
    "random numbers by sample need a model that each rank calls with whole samples",
    "leave it out, or use allreduce, zero, ddp or fsdp",
)


def no_noise_scale(reason: str) -> tuple[Refused, ...]:
    """Return the fields that need the gradient of each rank before it is summed."""
    return (
        Refused("lr.scaling", f"adascale: {reason}", "use another rule", values=("adascale",)),
        Refused("metrics.noise_scale_every_steps", reason, "leave it out, or use allreduce, zero or ddp"),
    )


NO_GRAPHS = Refused(
    "train.cuda_graph", "collectives of torch.distributed are not captured in CUDA graphs", "leave it out"
)
OWN_SUMS = "PyTorch all-reduces uncompressed gradients"
PYTORCH_SUMS = (
    Refused("allreduce.wire_dtype", OWN_SUMS, "use fp32"),
    Refused("allreduce.codec", OWN_SUMS, "leave it out"),
    NO_GRAPHS,
)
SUMMED_IN_PROCESS = (
    *no_noise_scale("PyTorch sums the gradients of replicas during the backward pass"),
    NO_SAMPLES,
    Refused("allreduce.wire_dtype", "a single process sends no gradients", "use fp32"),
    Refused("allreduce.codec", "a single process sends no gradients", "leave it out"),
    Refused("train.compile", "the model is replicated in each step", "leave it out"),
)
NO_FP16 = Refused(
    "train.precision", "fp16: ranks would have unequal loss scales", "use bf16 or fp32", values=("fp16",)
)
STAGES_CANNOT = (
    NO_FP16,
    *no_noise_scale("a rank has a part of the gradient only"),
    NO_SAMPLES,
    Refused("train.channels_last", "stages exchange contiguous tensors", "leave it out"),
    Refused("train.compile", "the strategy calls the stages, not the compiled model", "leave it out"),
    NO_GRAPHS,
    Refused(
        "allreduce.codec",
        "residuals (unsent parts of gradients) are stored only for whole weights",
        "leave it out",
    ),
)

STRATEGY_SUPPORT: Mapping[str, StrategySupport] = {
    "allreduce": StrategySupport(),
    "adasum": StrategySupport(
        NoArguments,
        (
            NO_FP16,
            Refused("allreduce.wire_dtype", "updates are combined uncompressed", "use fp32"),
            Refused("allreduce.codec", "updates are combined uncompressed", "leave it out"),
            Refused("train.cuda_graph", "ranks exchange their losses in each step", "leave it out"),
            *no_noise_scale("ranks combine updates, not gradients"),
            NO_SAMPLES,
        ),
        lr_follows_rank=True,
    ),
    "local_sgd": StrategySupport(
        LocalSgdArguments,
        (
            NO_FP16,
            Refused("allreduce.wire_dtype", "it would round the weights", "use fp32"),
            Refused("allreduce.codec", "it sends no gradients", "leave it out"),
            *no_noise_scale("ranks do not sum gradients in each step"),
            NO_SAMPLES,
        ),
    ),
    "data_parallel": StrategySupport(NoArguments, (NO_GRAPHS, *SUMMED_IN_PROCESS)),
    "ddp": StrategySupport(DdpArguments, PYTORCH_SUMS),
    "fsdp": StrategySupport(
        FsdpArguments,
        (
            *PYTORCH_SUMS,
            NO_FP16,
            *no_noise_scale("PyTorch reduce-scatters gradients during the backward pass"),
            Refused("train.channels_last", "units are gathered as contiguous tensors", "leave it out"),
        ),
    ),
    "deepspeed": StrategySupport(
        DeepSpeedArguments,
        (
            Refused("allreduce.wire_dtype", "DeepSpeed reduces uncompressed gradients", "use fp32"),
            Refused("allreduce.codec", "DeepSpeed reduces uncompressed gradients", "leave it out"),
            NO_GRAPHS,
            Refused("train.compile", "DeepSpeed calls the model, and has hooks in it", "leave it out"),
            NO_FP16,
            Refused("train.channels_last", "weights are gathered as contiguous tensors", "leave it out"),
            *no_noise_scale("DeepSpeed reduces gradients during the backward pass"),
            NO_SAMPLES,
            Refused("optimizer.schedules", "DeepSpeed updates with its own optimizer", "leave it out"),
        ),
    ),
    "tensor_parallel": StrategySupport(
        TensorParallelArguments,
        (
            NO_FP16,
            Refused("train.channels_last", "weights are sharded as contiguous tensors", "leave it out"),
            NO_GRAPHS,
            *no_noise_scale("a rank has a part of the gradient only"),
            NO_SAMPLES,
            Refused(
                "allreduce.codec",
                "residuals (unsent parts of gradients) are stored only for whole weights",
                "leave it out",
            ),
        ),
        axes=lambda world_size, arguments: Axes.of(world_size, tensor=arguments.degree),
    ),
    "parameter_server": StrategySupport(
        ParameterServerArguments,
        (
            NO_FP16,
            Refused(
                "health.non_finite", "ranks do not synchronize in each step", "use stop", values=("skip",)
            ),
            Refused("allreduce.wire_dtype", "gradients are sent uncompressed", "use fp32"),
            Refused("allreduce.codec", "gradients are sent uncompressed", "leave it out"),
            Refused("train.cuda_graph", "gradients are sent by the host", "leave it out"),
            *no_noise_scale("ranks do not synchronize in each step"),
            NO_SAMPLES,
            Refused("optimizer.schedules", "servers update the weights", "leave it out"),
        ),
        lr_follows_rank=True,
        requires_mpi=True,
    ),
    "pipeline": StrategySupport(
        PipelineArguments,
        STAGES_CANNOT,
        axes=lambda world_size, arguments: Axes.of(world_size, pipeline=arguments.stages),
    ),
    "mesh": StrategySupport(
        MeshArguments,
        (
            *STAGES_CANNOT,
            Refused("allreduce.wire_dtype", "sums between data-parallel ranks are uncompressed", "use fp32"),
        ),
        axes=lambda world_size, arguments: Axes.of(
            world_size, pipeline=arguments.pipeline, tensor=arguments.tensor
        ),
    ),
    "zero": StrategySupport(
        ZeroArguments,
        (
            NO_FP16,
            Refused("allreduce.wire_dtype", "gradients are reduce-scattered uncompressed", "use fp32"),
            Refused("allreduce.codec", "gradients are reduce-scattered uncompressed", "leave it out"),
            Refused("train.channels_last", "shards are contiguous", "leave it out"),
            Refused("train.cuda_graph", "a CUDA graph keeps all gradients allocated", "leave it out"),
        ),
    ),
}
