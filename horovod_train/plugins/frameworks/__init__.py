"""What several frameworks refuse, and attributes of packages that are imported on first use.

A package of a framework declares what the framework supports, without importing it, and offers names for
users' scripts, which import it (``attributes_in``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from horovod_train.config.support import Refused, RefusedCallback, follows_gain

NO_SAMPLE_RANDOMNESS = Refused(
    "train.randomness",
    "random numbers by sample are available only with framework: torch and framework: jax",
    "leave it out, or use framework: torch",
)


def only_torch(*, has_sample_randomness: bool = False) -> tuple[Refused, ...]:
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


def compiles_itself(framework: str, *, has_sample_randomness: bool = False) -> tuple[Refused, ...]:
    """Return the fields that apply only to PyTorch."""
    return (
        *only_torch(has_sample_randomness=has_sample_randomness),
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
            "train.activation_memory_mib",
            "is a limit for activations in PyTorch",
            "recompute inside of the task's model, or use framework: torch",
        ),
        Refused(
            "train.initial_weights", "contains names of a PyTorch model", "load weights in the task's model()"
        ),
    )


def keeps_its_model(framework: str) -> tuple[Refused, ...]:
    """Return the fields that do not apply because the framework's own training loop calls the model."""
    return (
        *only_torch(),
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
            "train.activation_memory_mib",
            f"has no effect, because the model is called by {framework} and not by the job",
            "switch recomputation on in the task's model()",
        ),
        Refused(
            "train.initial_weights",
            f"has no effect, because the model is called by {framework} and not by the job",
            "load weights in the task's model()",
        ),
    )


def updates_at_once(framework: str) -> Refused:
    """Return the skip of steps, which a framework that updates before the loss is checked cannot do."""
    return Refused(
        "health.non_finite",
        f"a step cannot be undone: {framework} updates the weights before the loss is checked",
        "use non_finite: stop; fp16's loss scale skips overflows by itself",
    )


def lacks_bfloat16(framework: str) -> Refused:
    """Return the wire data type that no Horovod binding but that of PyTorch has."""
    return Refused(
        "allreduce.wire_dtype",
        f"{framework}'s Horovod binding lacks bfloat16",
        "use fp16 or fp32, or framework: torch",
        values=("bf16",),
    )


SAVES_CHECKPOINTS = RefusedCallback(
    "saves checkpoints, which the job does", "leave it out, and set checkpoint:"
)
SETS_THE_RATE = RefusedCallback(
    "sets the learning rate, which the job does", "leave it out, and set lr.decay"
)
REPORTS_PROGRESS = RefusedCallback("reports progress, which the job does", "leave it out")


def attributes_in(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package; ``modules`` are its modules by name of an attribute."""

    def attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return attribute
