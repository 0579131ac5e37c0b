"""What each strategy offers: its arguments, and what of the job description it cannot honour.

The strategies themselves are PyTorch's (``frameworks/torch/strategies/``); here is what can be known, and
refused, before anything starts.
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
    """It has none."""


class OuterArguments(Section):
    """The mean of what ranks have moved is a gradient of an outer optimizer: SGD."""

    lr: Annotated[float, Field(gt=0)] = 0.7
    """Its learning rate; 1 without momentum is the mean itself."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Its momentum."""

    nesterov: bool = True
    """Nesterov's momentum."""


class LocalSgdArguments(Section):
    """Ranks train by themselves, and average now and then."""

    every_steps: Count
    """So many steps are made between two means."""

    allreduce_steps: Annotated[int, Field(ge=0)] = 0
    """So many steps at the start are made as with allreduce, and ranks train by themselves after that."""

    outer: OuterArguments | None = None
    """An outer optimizer (DiLoCo); null: weights become their mean. {}: as DiLoCo has it."""


class ZeroArguments(Section):
    """Each rank updates a part of the weights, and has the optimizer's state of that part alone."""

    stage: Literal[1, 2] = 2
    """1: gradients of all weights are kept while micro-batches add up; 2: those of the rank's own part."""


class DdpArguments(Section):
    """PyTorch's DistributedDataParallel."""

    find_unused_parameters: bool | None = None
    """Some parameters have no gradient in some steps: look for them in each; null: if that is so in the
    first."""

    static_graph: bool = False
    """The same parameters are used in the same order in each step."""


Pattern = Annotated[str, StringConstraints(min_length=1)]
Width = Literal["fp32", "bf16", "fp16"]
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
    """Layers are shared between ranks, with PyTorch's DTensor."""

    degree: Count | None = None
    """So many ranks share each layer; null: all."""

    plan: dict[Pattern, TensorStyle] | None = None
    """How modules are shared, by name patterns; null: the model's own plan, or that of a known kind."""


class ParameterServerArguments(Section):
    """Ranks send gradients to servers, each of which has a part of the weights, and do not wait."""

    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 4
    """A rank may be so many steps ahead of the slowest."""

    meet_every_steps: Count = 100
    """After so many steps all gradients are waited for, so that weights can be saved and evaluated."""


class StageArguments(Section):
    """Layers are spread over ranks, and micro-batches pass from rank to rank."""

    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """gpipe: all forward passes first; 1f1b: each backward pass as soon as it can be, which keeps fewer
    activations; interleaved: 1f1b with several stages for each rank, which stands idle for less time."""

    chunks_per_rank: Annotated[int, Field(ge=1, le=64)] = 1
    """So many stages each rank has; with interleaved at least 2."""

    balance: Literal["parameters", "time"] = "parameters"
    """Cut so that stages have as many parameters, or take as long for an example."""

    @model_validator(mode="after")
    def _chunks_are_interleaved(self) -> Self:
        if (self.chunks_per_rank > 1) != (self.schedule == "interleaved"):
            raise ValueError(
                f"schedule: {self.schedule} and chunks_per_rank: {self.chunks_per_rank} do not go together; "
                "several stages for each rank are interleaved, and interleaved needs at least 2"
            )
        return self


class PipelineArguments(StageArguments):
    """Layers are spread over ranks, and micro-batches pass from rank to rank."""

    stages: Count | None = None
    """So many ranks have the model together; null: all."""


class FsdpArguments(Section):
    """PyTorch's fully_shard."""

    units: list[Pattern] | None = None
    """Name patterns of modules that are gathered as one, such as ``layers.*``; null: the model's layers."""

    param_dtype: Width | None = None
    """Data type of gathered weights; null: that of the parameters."""

    reduce_dtype: Width | None = None
    """Type of gradients on their way; null: that of weights in use."""

    reshard_after_forward: bool = True
    """Give a unit back after its forward pass, and gather it again for backward."""

    reduce_each: bool = True
    """Reduce gradients of each micro-batch; false: they add up, whole, until the last."""

    prefetch_units: Annotated[int, Field(ge=1, le=64)] = 1
    """So many units are gathered ahead."""

    offload: bool = False
    """On GPUs: keep weights, gradients and optimizer state in the memory of the host."""

    shard_ranks: Count | Literal["host"] | None = None
    """So many ranks next to each other share the model, and groups of them have copies; host: those of a
    host; null: all."""


class DeepSpeedArguments(Section):
    """DeepSpeed's ZeRO."""

    stage: Literal[1, 2, 3] = 3
    """1: ranks share the optimizer's state; 2: gradients, too; 3: weights, too."""

    offload_optimizer: Literal["cpu", "nvme"] | None = None
    """Keep the optimizer's state, and update, in the memory of the host, or on a disk."""

    offload_parameters: Literal["cpu"] | None = None
    """With stage 3: keep weights that are not in use in the memory of the host."""

    nvme_path: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Folder for what is kept on a disk."""

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
            raise ValueError("nvme_path goes with offload_optimizer: nvme, and this with it")
        return self


class MeshArguments(StageArguments, FsdpArguments):
    """Ranks along a data, a pipeline and a tensor axis."""

    pipeline: Count = 1
    """So many stages, one after the other."""

    tensor: Count = 1
    """So many ranks share each layer."""

    plan: dict[Pattern, TensorStyle] | None = None
    """How layers are shared, by name patterns; null: the model's own plan, or that of a known kind."""

    shard: bool = False
    """Ranks that read different samples share weights, as with fsdp; the arguments are those of fsdp."""

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
    """One strategy.

    Attributes:
        arguments: What ``strategy.args`` may hold.
        refused: What it cannot honour.
        axes: Returns how so many ranks are arranged, given the arguments; None: all read different samples.
        lr_follows_rank: The learning rate follows the batch of one rank, and not that of all.
        has_own_messages: Ranks talk over MPI besides Horovod.
    """

    arguments: type[Section] = NoArguments
    refused: tuple[Refused, ...] = ()
    axes: Callable[[int, Any], Axes] | None = None
    lr_follows_rank: bool = False
    has_own_messages: bool = False


def needs_own_messages(strategy: Strategy) -> bool:
    """Whether ranks talk over MPI besides Horovod."""
    support = STRATEGY_SUPPORT.get(strategy.name)
    return support is not None and support.has_own_messages


def batch_size_of_lr(job: Job, num_data_ranks: int) -> int:
    """Return the batch that the learning rate of a job follows: that of all ranks, or of one."""
    support = STRATEGY_SUPPORT.get(job.strategy.name)
    return job.global_batch_size(1 if support is not None and support.lr_follows_rank else num_data_ranks)


def axes_of(strategy: Strategy, world_size: int) -> Axes:
    """Return how the ranks of a job are arranged.

    Raises:
        UserError: The strategy cannot arrange so many.
    """
    support = STRATEGY_SUPPORT.get(strategy.name)
    if support is None or support.axes is None:
        return Axes(world_size)
    return support.axes(world_size, support.arguments.model_validate(strategy.args))


def splits_ranks(strategy: Strategy) -> bool:
    """Whether not all ranks of a job read different samples."""
    support = STRATEGY_SUPPORT.get(strategy.name)
    return support is not None and support.axes is not None


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
    Refused("allreduce.wire_dtype", "a single process sends no gradients", "use fp32"),
    Refused("allreduce.codec", "a single process sends no gradients", "leave it out"),
    Refused("train.compile", "the model is replicated in each step", "leave it out"),
)
NO_FP16 = Refused(
    "train.precision", "fp16: ranks would have unequal loss scales", "use bf16 or fp32", values=("fp16",)
)
STAGES_CANNOT = (
    NO_FP16,
    Refused("train.channels_last", "stages exchange contiguous tensors", "leave it out"),
    Refused("train.compile", "the strategy calls the stages, not the compiled model", "leave it out"),
    NO_GRAPHS,
    Refused("allreduce.codec", "residuals are stored for whole weights", "leave it out"),
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
        ),
        lr_follows_rank=True,
    ),
    "local_sgd": StrategySupport(
        LocalSgdArguments,
        (
            NO_FP16,
            Refused("allreduce.wire_dtype", "it would round the weights", "use fp32"),
            Refused("allreduce.codec", "it sends no gradients", "leave it out"),
        ),
    ),
    "data_parallel": StrategySupport(NoArguments, (NO_GRAPHS, *SUMMED_IN_PROCESS)),
    "ddp": StrategySupport(DdpArguments, PYTORCH_SUMS),
    "fsdp": StrategySupport(
        FsdpArguments,
        (
            *PYTORCH_SUMS,
            NO_FP16,
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
        ),
    ),
    "tensor_parallel": StrategySupport(
        TensorParallelArguments,
        (
            NO_FP16,
            Refused("train.channels_last", "weights are sharded as contiguous tensors", "leave it out"),
            NO_GRAPHS,
            Refused("allreduce.codec", "residuals are stored for whole weights", "leave it out"),
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
        ),
        lr_follows_rank=True,
        has_own_messages=True,
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
