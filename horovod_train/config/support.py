"""What rows of registries declare: arguments, fields of the job that they do not support, and properties.

    StrategySupport, CodecSupport, LauncherSupport, TrackerSupport, FrameworkSupport
                         what a strategy, a codec, a launcher, a tracker or a framework declares
    Axes                 arrangement of ranks along a data, a pipeline and a tensor axis
    Batch, BatchSystem   settings of a batch job, and a batch system
    Sizes, JobSizes      sizes of a job
    estimate, needs      memory that a rank needs, from the sizes of a job

``rules.py`` checks arguments and refuses fields before anything starts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from horovod_train.config.fields import OneLine, Section, is_command
from horovod_train.config.optimization import Scaled
from horovod_train.errors import HorovodTrainError, Problem, UserError
from horovod_train.registry import CODECS, FRAMEWORKS, LAUNCHERS, SCALINGS, STRATEGIES, TRACKERS, Registry

if TYPE_CHECKING:
    from horovod_train.config.schema import Job


@dataclass(frozen=True)
class Axes:
    """Lengths of the axes.

        rank = (data x num_pipeline + pipeline) x num_tensor + tensor

    Consecutive ranks, usually of one host, are along the tensor axis, because it communicates most. The
    next axis is the pipeline axis, the outermost the data axis.

    Attributes:
        data: Number of groups that read different samples.
        pipeline: Number of ranks in a pipeline.
        tensor: Number of ranks among which each layer is sharded.
    """

    data: int
    pipeline: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, world_size: int, *, pipeline: int | None = 1, tensor: int | None = 1) -> Axes:
        """Return the axes of ``world_size`` ranks; with None, an axis has the maximum length.

        >>> Axes.of(8, pipeline=2, tensor=2)
        Axes(data=2, pipeline=2, tensor=2)

        Raises:
            UserError: ``pipeline * tensor`` does not divide the number of ranks.
        """
        tensor = max(1, world_size // (pipeline or 1)) if tensor is None else tensor
        pipeline = max(1, world_size // tensor) if pipeline is None else pipeline
        data, rest = divmod(world_size, pipeline * tensor)
        if rest or not data:
            found = " x ".join(
                f"{length} {name}"
                for name, length in (("stages", pipeline), ("tensor ranks", tensor))
                if length > 1
            )
            raise UserError(
                f"strategy: {found} do not divide {world_size} ranks",
                hint=f"start a multiple of {pipeline * tensor} ranks, or change strategy.args",
            )
        return cls(data, pipeline, tensor)

    def place(self, rank: int) -> tuple[int, int, int]:
        """Return the coordinates of a rank along the axes data, pipeline and tensor.

        >>> Axes(data=2, pipeline=2, tensor=2).place(5)
        (1, 0, 1)
        """
        rest, tensor = divmod(rank, self.tensor)
        data, pipeline = divmod(rest, self.pipeline)
        return data, pipeline, tensor

    def rank(self, data: int, pipeline: int, tensor: int) -> int:
        """Return the rank at these coordinates."""
        return (data * self.pipeline + pipeline) * self.tensor + tensor

    def pipelines(self) -> list[list[int]]:
        """Return the ranks of each pipeline, in the order of stages.

        >>> Axes(data=2, pipeline=2).pipelines()
        [[0, 1], [2, 3]]
        """
        return [
            [self.rank(data, pipeline, tensor) for pipeline in range(self.pipeline)]
            for data in range(self.data)
            for tensor in range(self.tensor)
        ]

    def data_groups(self) -> list[list[int]]:
        """Return the groups of ranks that store the same part of the model and read different samples.

        >>> Axes(data=2, tensor=2).data_groups()
        [[0, 2], [1, 3]]
        """
        return [
            [self.rank(data, pipeline, tensor) for data in range(self.data)]
            for pipeline in range(self.pipeline)
            for tensor in range(self.tensor)
        ]


Support_ = TypeVar("Support_")


@dataclass(frozen=True)
class Refused:
    """Field that a framework, a strategy or a codec does not support.

    Attributes:
        field: Dotted path of the field.
        reason: Reason of the refusal.
        instead: Recommended action.
        values: Refused values; empty: all except the default.
        when: Returns whether a value is refused; None: ``values`` decide.
    """

    field: str
    reason: str
    instead: str
    values: tuple[object, ...] = ()
    when: Callable[[str], bool] | None = None

    def concerns(self, value: object, default: object) -> bool:
        """Return whether a value of the field is refused."""
        if self.when is not None:
            return self.when(str(value))
        return value in self.values if self.values else value != default


class NoArguments(Section):
    """Arguments of what has none."""


@dataclass(frozen=True)
class WithArguments:
    """What a strategy, a codec or a tracker declares.

    Attributes:
        factory: ``module:name`` of the class or function.
        arguments: Model of ``args``, by which they are checked; None: they are not checked. A strategy is
            called with all fields of the model, also defaults; a codec or a tracker with what the job sets.
        refused: Fields that it does not support; those of trackers are not checked.
    """

    factory: str = ""
    arguments: type[Section] | None = NoArguments
    refused: tuple[Refused, ...] = ()

    def arguments_of(self, args: Mapping[str, object]) -> Any:
        """Return the validated model of arguments; without a model, the arguments themselves.

        Raises:
            ValidationError: The arguments do not fit the model.
        """
        return dict(args) if self.arguments is None else self.arguments.model_validate(args)


@dataclass(frozen=True)
class StrategySupport(WithArguments):
    """What a strategy declares.

    Attributes:
        axes: Returns the axes, given the world size and the arguments; None: all ranks are data-parallel.
        lr_follows_rank: The learning rate scales with the batch of a rank, not with the global batch.
        requires_mpi: Ranks communicate over MPI in addition to Horovod.
        is_verified: Its first steps are compared with those of the plain model on the same samples.
        saves_memory: A rank stores less than the whole weights and optimizer state; a message about missing
            memory does not recommend to shard them.
        is_equal_to_accumulation: Ranks train the same weights as fewer ranks with more micro-batches, so that
            a study may run a trial on fewer cores than it has ranks.
        memory: Returns the memory of a rank by the name of a variant, which is empty for the defaults; None:
            it is not known.
    """

    axes: Callable[[int, Any], Axes] | None = None
    lr_follows_rank: bool = False
    requires_mpi: bool = False
    is_verified: bool = False
    saves_memory: bool = False
    is_equal_to_accumulation: bool = False
    memory: Callable[[JobSizes], Mapping[str, MemoryEstimate]] | None = None


@dataclass(frozen=True)
class CodecSupport(WithArguments):
    """What a codec declares.

    Attributes:
        residual_copies: Number of gradient-sized residual buffers per rank, in at least 32 bits. Codecs with
            residuals do not support ``train.precision: fp16``, because the loss scale may change before a
            residual is sent.
    """

    residual_copies: int = 0


@dataclass(frozen=True)
class LauncherSupport:
    """What a launcher declares.

    Attributes:
        factory: ``module:name`` of its class.
        section: Name of the section of its settings in ``launch``.
        settings: Model of the section, all of whose fields have defaults.
        rules: Yields problems of a job, whichever its launcher; it may not import the schema of jobs.
        max_ranks: Maximum number of ranks that it starts; None: any number.
        has_own_image: Ranks run in an image of the launcher, which contains the code of the job.
        examine: ``module:name`` of a function that examines where it starts ranks: of the request of a job,
            whether a job was named, whether to measure, and a function that reports a line of progress. It
            returns the findings and the measured all-reduces.
    """

    factory: str = ""
    section: str = ""
    settings: type[Section] = NoArguments
    rules: Callable[[Job], Iterator[Problem]] | None = None
    max_ranks: int | None = None
    has_own_image: bool = False
    examine: str = ""


class Batch(Section):
    """Settings of a batch job. ``run_dir`` must be on a shared filesystem."""

    requeue: bool = True
    """Save and requeue the job one grace period before its time limit; where the batch system can requeue a
    job itself (not Flux), also allow that after the failure of a node. A drained job is not requeued."""

    setup: list[OneLine] = []
    """Shell commands at the start of the batch script, such as ``module load cuda``."""


@dataclass(frozen=True)
class BatchSystem:
    """A batch system.

    Attributes:
        launcher: Name of the launcher that submits jobs, and of the section of its settings in ``launch``;
            ``launcher``-allocation starts ranks in an allocation.
        title: Name of the batch system in messages.
        settings: Model of the section.
        array: Regular expression of the beginning of an option that submits a job array.
        options: Returns the options in a section, each beginning as on the command line.
        is_split: Options are split into arguments, as a shell does.
        requires_mpi: Only the process managers of MPI start ranks.
    """

    launcher: str
    title: str
    settings: type[Batch]
    array: str
    options: Callable[..., Sequence[str]]
    is_split: bool = False
    requires_mpi: bool = False

    def support(
        self, factory: str, rules: Callable[[Job], Iterator[Problem]] | None = None
    ) -> LauncherSupport:
        """Return what its launcher, ``module:name``, declares, with ``rules`` in place of ``problems``."""
        return LauncherSupport(factory, self.launcher, self.settings, rules or self.problems)

    def problems(self, job: Job) -> Iterator[Problem]:
        """Yield the problems of a job with this batch system."""
        settings = job.launch.settings(self.settings)
        if job.launch.launcher in (self.launcher, f"{self.launcher}-allocation"):
            yield from self._problems_of_launch(job)
        path = f"launch.{self.launcher}.options"
        for option in self.options(settings):
            if self.is_split and not is_command(option):
                yield Problem(path, repr(option), "cannot be split", "close its quotes")
            if re.match(self.array, option):
                yield Problem(
                    path,
                    repr(option),
                    "submits a job array, and each of its jobs would be this run",
                    f"call `horovod-train run --launcher {self.launcher}-allocation` in a batch script of "
                    "yours",
                )

    def _problems_of_launch(self, job: Job) -> Iterator[Problem]:
        if job.launch.elastic is not None:
            yield Problem(
                "launch.elastic",
                "",
                f"is not for {self.title}, whose jobs keep their nodes",
                f"leave it out: launch.{self.launcher}.requeue puts the job back into the queue",
            )
        if self.requires_mpi and job.launch.controller != "mpi":
            yield Problem(
                "launch.controller",
                repr(job.launch.controller),
                f"is not available in {self.title}, where MPI starts the ranks",
                "use mpi",
            )


@dataclass(frozen=True)
class TrackerSupport(WithArguments):
    """What a tracker declares.

    Attributes:
        default_place: File or folder to which it writes without an argument ``path`` or ``uri``, relative to
            the folder of the job's runs; empty: it is not known.
    """

    default_place: str = ""

    def place(self, folder: Path, args: Mapping[str, object]) -> str:
        """Return the file, folder or address to which it writes; if it is not known, its arguments."""
        if isinstance(uri := args.get("uri"), str):
            return uri
        if not self.default_place:
            return ", ".join(f"{key}={value}" for key, value in args.items()) or "(a tracker of its own)"
        return os.path.normpath(folder / str(args.get("path") or self.default_place))


def tracker_support(name: str) -> TrackerSupport:
    """Return what a tracker declares; one without a support object declares nothing."""
    return _support_of(TRACKERS, name, TrackerSupport(arguments=None))


def launchers_with_support() -> Iterator[tuple[str, LauncherSupport]]:
    """Yield the launchers of the registry and what they declare."""
    for name in LAUNCHERS.rows:
        yield name, launcher_support(name)


def launcher_support(name: str) -> LauncherSupport:
    """Return what a launcher declares; one without a support object declares nothing."""
    return _support_of(LAUNCHERS, name, LauncherSupport())


def strategy_support(name: str) -> StrategySupport:
    """Return what a strategy declares; one without a support object declares nothing."""
    return _support_of(STRATEGIES, name, StrategySupport(arguments=None))


def codec_support(name: str) -> CodecSupport:
    """Return what a codec declares; one without a support object declares nothing."""
    return _support_of(CODECS, name, CodecSupport(arguments=None))


def strategies_with_support() -> Iterator[tuple[str, StrategySupport]]:
    """Yield the strategies of the registry and what they declare."""
    for name in STRATEGIES.rows:
        yield name, strategy_support(name)


def _support_of(table: Registry, name: str, default: Support_) -> Support_:
    """Return the support object of a row, which is of the type of ``default``.

    A row without one, or that cannot be imported, has ``default``: ``rules.names_are_known`` reports the
    latter.
    """
    found = table.support_or_none(name)
    return found if isinstance(found, type(default)) else default


def factors_of_rule(rule: str) -> Scaled:
    """Return the factors of a scaling rule at twice the reference batch, which tell what the rule changes.

    A rule that is not in the registry, or that fails, is not called: the policy does, and reports it.
    """
    found = None
    if rule in SCALINGS.rows:
        with suppress(ArithmeticError, HorovodTrainError, TypeError, ValueError):
            found = SCALINGS.load(rule)(2.0)
    return found if isinstance(found, Scaled) else Scaled(rate=1.0)


def follows_gain(rule: str) -> bool:
    """Return whether the rate of a scaling rule follows a gain that is measured in each step."""
    return factors_of_rule(rule).follows_gain


@dataclass(frozen=True)
class RefusedCallback:
    """Reason why a job refuses a class of callbacks, and classes derived from it.

    Attributes:
        reason: Predicate of the error message "the callback NAME ...".
        instead: Hint of the error.
        condition: Returns whether an instance is refused; default: always.
    """

    reason: str
    instead: str
    condition: Callable[[Any], bool] = bool


@dataclass(frozen=True)
class FrameworkSupport:
    """What a framework declares.

    Attributes:
        factory: ``module:name`` of its class.
        distributions: Alternative packages that provide it.
        tested: Version with which tests run.
        loop: Training loop that performs the steps; ours begin with "ours".
        refused: Fields that it does not support.
        note: Further remarks.
        affected_by: Further distributions whose versions affect results.
        modules: Top-level modules of its classes.
        callbacks: Callbacks that a job refuses, by name of the class.
        uses_torch_binding: It all-reduces through Horovod's binding for PyTorch, on the compute stream.
        instrumented: Modules that scripts import, and for each the ``module:name`` of a function that
            instruments it when it has been imported, and takes the meter of the script's steps.
    """

    factory: str = ""
    distributions: tuple[str, ...] = ()
    tested: str = ""
    loop: str = ""
    refused: tuple[Refused, ...] = ()
    note: str = ""
    affected_by: tuple[str, ...] = ()
    modules: frozenset[str] = frozenset()
    callbacks: Mapping[str, RefusedCallback] = field(default_factory=dict)
    uses_torch_binding: bool = False
    instrumented: Mapping[str, str] = field(default_factory=dict)


def framework_support(name: str) -> FrameworkSupport:
    """Return what a framework declares; one without a support object declares nothing."""
    return _support_of(FRAMEWORKS, name, FrameworkSupport())


def frameworks_with_support() -> Iterator[tuple[str, FrameworkSupport]]:
    """Yield the frameworks of the registry and what they declare."""
    for name in FRAMEWORKS.rows:
        yield name, framework_support(name)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a job in one process, in bytes.

    Attributes:
        weights: All parameters.
        trained: Trained parameters; equals the size of their gradients.
        buffers: All buffers.
        optimizer: Optimizer state.
        activations: Other tensors at the peak of forward and backward of a micro-batch.
        gradients_by_then: Gradients at that peak.
        update: Temporary tensors at the peak of the optimizer's step.
        largest: Largest parameter.
        units: Parameters of each FSDP unit.
        process: A process without tensors.
    """

    weights: int
    trained: int
    buffers: int
    optimizer: int
    activations: int
    gradients_by_then: int
    update: int
    largest: int
    units: Sequence[int]
    process: int

    @property
    def gathered(self) -> int:
        """Maximum size of gathered parameters: those outside of units, and the two largest units."""
        return self.weights - sum(self.units) + sum(sorted(self.units)[-2:])


@dataclass(frozen=True)
class JobSizes:
    """What the memory of a rank depends on.

    Attributes:
        job: The job.
        num_ranks: Number of ranks that share the model.
        whole: Sizes of the job in one process.
        of_tensor_rank: Sizes of a tensor-parallel rank; None: one rank, or its layers cannot be cut.
    """

    job: Job
    num_ranks: int
    whole: Sizes
    of_tensor_rank: Sizes | None = None

    @cached_property
    def bucket(self) -> float:
        """Gradients in transit: one just computed, a bucket being filled, three being sent, in bytes."""
        bucket_bytes = self.job.allreduce.bucket_size_mib * 2**20
        return min(5 * max(bucket_bytes, self.whole.largest), self.whole.trained)


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory that a rank needs, in bytes.

        resident  weights, buffers and optimizer state, which are allocated between steps
        passes    resident + activations and gradients at the peak of forward and backward
        update    resident + gradients + temporary tensors at the peak of the optimizer's step
        peak      the larger of passes and update

    A strategy divides some of these sizes by the number of ranks that shard them, and adds copies of its
    own: its row declares how (``StrategySupport.memory``).

    Attributes:
        weights: Parameters and buffers.
        gradients: All gradients.
        optimizer: Optimizer state.
        peak: Peak of all tensors.
        process: Approximate peak of the process.
        order: Place among strategies that fit, which orders them by bytes sent and by overlap of
            communication with computation: 0 (allreduce), 10 and 20 (zero), 30 and 40 (fsdp),
            50 (deepspeed), 60 (tensor_parallel), 70 (pipeline). A strategy of another package chooses a
            number between those of two others, or above all.
    """

    weights: float
    gradients: float
    optimizer: float
    peak: float
    process: float
    order: int


def estimate(
    sizes: Sizes,
    *,
    order: int,
    weight_shards: float = 1,
    gradient_shards: float = 1,
    optimizer_shards: float = 1,
    activation_shards: float = 1,
    extra: float = 0,
    keeps_gradients: bool = False,
) -> MemoryEstimate:
    """Return the memory of a rank, which has one of so many shards of weights, gradients and so on.

    ``extra`` is additional memory in the passes, in bytes. With ``keeps_gradients``, gradients are stored in
    buckets, which stay allocated between steps.
    """
    whole = sizes.weights / weight_shards + sizes.buffers
    state = sizes.optimizer / optimizer_shards
    by_then = sizes.trained if keeps_gradients else sizes.gradients_by_then
    at_peak = whole + state + sizes.activations / activation_shards + by_then / gradient_shards + extra
    in_update = whole + state + sizes.trained / gradient_shards + sizes.update / optimizer_shards
    peak = max(at_peak, in_update)
    # Each process first creates the whole model, then shards it.
    process = max(peak, sizes.weights) + sizes.process
    return MemoryEstimate(whole, sizes.trained / gradient_shards, state, peak, process, order)


def needs(sizes: JobSizes) -> dict[str, MemoryEstimate]:
    """Return the memory that a rank needs under each strategy, with the model sharded over all ranks."""
    return dict(_needs(sizes))


def _needs(sizes: JobSizes) -> Iterator[tuple[str, MemoryEstimate]]:
    for name, support in strategies_with_support():
        variants: Mapping[str, MemoryEstimate] = support.memory(sizes) if support.memory else {}
        for variant, found in variants.items():
            yield f"{name} {variant}".strip(), found


def first_that_fits(found: Mapping[str, MemoryEstimate], limit_bytes: float) -> str | None:
    """Return the first strategy by ``order`` whose process memory is within the limit, or None."""
    fitting = [(each.order, name) for name, each in found.items() if each.process <= limit_bytes]
    return min(fitting)[1] if fitting else None
