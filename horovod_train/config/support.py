"""What rows of registries declare: arguments, fields of the job that they do not support, and properties.

``rules.py`` checks arguments and refuses fields before anything starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from horovod_train.config.axes import Axes
from horovod_train.config.fields import Section
from horovod_train.config.optimization import Scaled
from horovod_train.errors import HorovodTrainError, Problem
from horovod_train.registry import CODECS, FRAMEWORKS, LAUNCHERS, SCALINGS, STRATEGIES, TRACKERS, Registry

if TYPE_CHECKING:
    from horovod_train.config.memory import JobSizes, MemoryEstimate
    from horovod_train.config.schema import Job

Support_ = TypeVar("Support_")


@dataclass(frozen=True)
class Refused:
    """Field that a framework or a strategy does not support.

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
    """What a strategy or a codec declares.

    Attributes:
        factory: ``module:name`` of the class or function.
        arguments: Model of ``args``; None: arguments are passed to the factory as they are.
        refused: Fields that it does not support.
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
        is_sharded: A rank has only a part of the weights or of the optimizer's state.
        is_equal_to_accumulation: Ranks may be replaced by micro-batches of fewer ranks.
        memory: Returns the memory of a rank by the name of a variant, which is empty for the defaults; None:
            it is not known.
    """

    axes: Callable[[int, Any], Axes] | None = None
    lr_follows_rank: bool = False
    requires_mpi: bool = False
    is_verified: bool = False
    is_sharded: bool = False
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
        has_own_image: Ranks run in an image of the launcher, which contains the code of the job.
    """

    factory: str = ""
    section: str = ""
    settings: type[Section] = NoArguments
    rules: Callable[[Job], Iterator[Problem]] | None = None
    has_own_image: bool = False


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


def launcher_sections() -> Iterator[tuple[str, str, type[Section]]]:
    """Yield the sections of launchers in ``launch``: the name, the launcher's name and the model."""
    for name, support in launchers_with_support():
        yield support.section, name, support.settings


def launchers_with_support() -> Iterator[tuple[str, LauncherSupport]]:
    """Yield the launchers that declare anything, with what they declare."""
    for name in LAUNCHERS.rows:
        support = launcher_support(name)
        if support.section:
            yield name, support


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
    try:
        found = table.support(name)
    except HorovodTrainError:
        return default
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
        loop: Training loop that performs the steps.
        refused: Fields that it does not support.
        note: Further remarks.
        affected_by: Further distributions whose versions affect results.
        modules: Top-level modules of its classes.
        callbacks: Callbacks that a job refuses, by name of the class.
        uses_torch_binding: It all-reduces through Horovod's binding for PyTorch, on the compute stream.
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


def framework_support(name: str) -> FrameworkSupport:
    """Return what a framework declares; one without a support object declares nothing."""
    return _support_of(FRAMEWORKS, name, FrameworkSupport())


def frameworks_with_support() -> Iterator[tuple[str, FrameworkSupport]]:
    """Yield the frameworks of the registry and what they declare."""
    for name in FRAMEWORKS.rows:
        yield name, framework_support(name)
