"""What rows of registries declare: arguments, fields of the job that they do not support, and properties.

``rules.py`` checks arguments and refuses fields before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from horovod_train.config.axes import Axes
from horovod_train.config.fields import Section
from horovod_train.config.optimization import Scaled
from horovod_train.errors import HorovodTrainError
from horovod_train.registry import CODECS, SCALINGS, STRATEGIES, Registry

if TYPE_CHECKING:
    from horovod_train.config.memory import JobSizes, MemoryEstimate

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
    """Return the support object of a row.

    A row that cannot be imported has that of ``default``: ``rules.names_are_known`` reports it.
    """
    try:
        found: Support_ | None = table.support(name)
    except HorovodTrainError:
        return default
    return default if found is None else found


def scaled_at_twice_the_batch(rule: str) -> Scaled:
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
    return scaled_at_twice_the_batch(rule).follows_gain


@dataclass(frozen=True)
class Support:
    """Properties of a framework.

    Attributes:
        distributions: Alternative packages that provide it.
        tested: Version with which tests run.
        loop: Training loop that performs the steps.
        refused: Fields that it does not support.
        note: Further remarks.
    """

    distributions: tuple[str, ...]
    tested: str
    loop: str
    refused: tuple[Refused, ...] = ()
    note: str = ""


NO_SAMPLE_RANDOMNESS = Refused(
    "train.randomness",
    "random numbers by sample are available only with framework: torch and framework: jax",
    "leave it out, or use framework: torch",
)


def _only_torch(*, has_sample_randomness: bool = False) -> tuple[Refused, ...]:
    """Return the fields that only the replica of the framework torch implements."""
    return (
        Refused(
            "lr.scaling",
            "adascale needs the gradients of each rank, which only framework: torch measures",
            "use another rule, or framework: torch",
            when=follows_gain,
        ),
        Refused(
            "metrics.noise_scale_every_steps",
            "the noise scale needs the gradients of each rank, which only framework: torch measures",
            "leave it out, or use framework: torch",
        ),
        Refused(
            "optimizer.schedules",
            "schedules of arguments are available only with framework: torch",
            "leave it out, or use framework: torch",
        ),
        *(() if has_sample_randomness else (NO_SAMPLE_RANDOMNESS,)),
        Refused(
            "train.batch_warmup",
            "the growth of the batch is available only with framework: torch",
            "leave it out, or use framework: torch",
        ),
        Refused("ema", "averaging of weights is available only with framework: torch", "leave it out"),
        Refused(
            "train.average_buffers",
            "averaging of buffers is available only with framework: torch",
            "leave it out, or use framework: torch",
        ),
    )


def _compiles_itself(framework: str, *, has_sample_randomness: bool = False) -> tuple[Refused, ...]:
    """Return the fields that apply only to PyTorch."""
    return (
        *_only_torch(has_sample_randomness=has_sample_randomness),
        Refused(
            "train.compile",
            f"applies torch.compile; {framework} compiles steps by itself",
            "leave it out",
        ),
        Refused("train.cuda_graph", f"is PyTorch's; {framework} compiles steps by itself", "leave it out"),
        Refused(
            "train.sync_batch_norm",
            "batch normalization is synchronized only in PyTorch",
            "leave it out, or use framework: torch",
        ),
        Refused(
            "train.matmul_precision",
            f"is PyTorch's; {framework} has its own setting",
            "set it in the task, or use framework: torch",
        ),
        Refused(
            "train.channels_last",
            f"is PyTorch's; {framework} lays out memory by itself",
            "leave it out, or use framework: torch",
        ),
        Refused(
            "train.activation_checkpointing",
            "selects modules of PyTorch",
            "recompute inside of the task's model, or use framework: torch",
        ),
        Refused(
            "train.activations_mib",
            "is a limit for activations in PyTorch",
            "recompute inside of the task's model, or use framework: torch",
        ),
        Refused(
            "train.initial_weights", "contains names of a PyTorch model", "load weights in the task's model()"
        ),
    )


def _keeps_its_model(framework: str) -> tuple[Refused, ...]:
    """Return the fields that do not apply because the framework's own training loop calls the model."""
    return (
        *_only_torch(),
        Refused(
            "train.compile",
            f"has no effect, because the model is called by {framework} and not by the job",
            "call torch.compile in the task's model()",
        ),
        Refused(
            "train.cuda_graph",
            f"{framework}'s own training loop cannot be captured",
            "leave it out, or use framework: torch",
        ),
        Refused(
            "train.activation_checkpointing",
            f"has no effect, because the model is called by {framework} and not by the job",
            "switch it on in the task's model()",
        ),
        Refused(
            "train.activations_mib",
            f"has no effect, because the model is called by {framework} and not by the job",
            "switch recomputation on in the task's model()",
        ),
        Refused(
            "train.initial_weights",
            f"has no effect, because the model is called by {framework} and not by the job",
            "load weights in the task's model()",
        ),
    )


def _updates_at_once(framework: str) -> Refused:
    return Refused(
        "health.non_finite",
        f"a step cannot be undone: {framework} updates the weights before the loss is checked",
        "use non_finite: stop; fp16's loss scale skips overflows by itself",
    )


SUPPORT: Mapping[str, Support] = {
    "torch": Support(("torch",), "2.13.0", "ours"),
    "tensorflow": Support(
        ("tensorflow", "tensorflow-cpu"), "2.21.0", "ours, in tf.function", _compiles_itself("TensorFlow")
    ),
    "keras": Support(
        ("keras",),
        "3.15.1",
        "model.fit",
        (*_compiles_itself("Keras"), _updates_at_once("Keras")),
        note="on the tensorflow, torch and jax back ends (KERAS_BACKEND); no gradient norm",
    ),
    "jax": Support(
        ("jax",), "0.10.2", "ours, in jax.jit", _compiles_itself("JAX", has_sample_randomness=True)
    ),
    "lightning": Support(
        ("lightning",),
        "2.6.6",
        "Trainer.fit",
        (*_keeps_its_model("Lightning"), _updates_at_once("Lightning")),
    ),
    "transformers": Support(
        ("transformers",),
        "5.23.0",
        "Trainer.train",
        (*_keeps_its_model("Transformers"), _updates_at_once("Transformers")),
        note="no fp16 on a CPU",
    ),
    "mxnet": Support(
        ("mxnet",),
        "1.9.1",
        "ours, with gluon",
        (
            *_compiles_itself("MXNet"),
            Refused(
                "train.precision", "mixed precision of MXNet is not supported (legacy framework)", "use fp32"
            ),
            Refused(
                "lr.momentum_correction",
                "momentum of MXNet is not corrected (legacy framework)",
                "leave it out",
            ),
            Refused("train.deterministic", "MXNet has no such setting", "leave it out"),
            Refused(
                "allreduce.wire_dtype", "gradients of MXNet are not compressed (legacy framework)", "use fp32"
            ),
            Refused("launch.threads_per_rank", "MXNet reads OMP_NUM_THREADS only", "set it in launch.env"),
        ),
        note="legacy, frozen: requires its own environment with numpy < 1.24",
    ),
}
