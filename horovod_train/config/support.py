"""Fields of the job description that each framework does not support, with reasons.

``rules.py`` refuses these fields before anything starts. ``horovod-train frameworks`` prints this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Refused:
    """Field that a framework or a strategy does not support.

    Attributes:
        field: Dotted path of the field.
        reason: Reason of the refusal.
        instead: Recommended action.
        values: Refused values; empty: all except the default.
    """

    field: str
    reason: str
    instead: str
    values: tuple[object, ...] = ()


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
            values=("adascale",),
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
