"""Ways to train the small network, the same for every framework."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from frameworks.net import BATCH_SIZE, NUM_SAMPLES

EPOCHS = 3


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        num_samples: Samples of an epoch.
        penalty: Factor of the sum of squares of both kernels in the loss: Keras knows such penalties
            as a part of the model, of which each rank has one.
        tolerance: Largest difference of a weight from the reference that is allowed.
    """

    name: str
    optimizer: str = "sgd"
    optimizer_args: dict[str, Any] = field(default_factory=lambda: {"momentum": 0.9})
    lr: dict[str, Any] = field(default_factory=lambda: {"base_lr": 0.05, "scaling": "none"})
    accumulation: int = 1
    clip: float | None = None
    precision: str = "fp32"
    num_samples: int = NUM_SAMPLES
    penalty: float = 0.0
    evaluation: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-6

    def job(self, framework: str, huge: float | None = None) -> dict[str, Any]:
        return {
            "name": "case",
            "framework": framework,
            "task": f"frameworks.{framework}_task:Task",
            "task_args": {
                "num_samples": self.num_samples,
                "huge": huge,
                **({"penalty": self.penalty} if self.penalty else {}),
            },
            "train": {
                "epochs": EPOCHS,
                "batch_size_per_rank": BATCH_SIZE,
                "accumulation_steps": self.accumulation,
                "clip_grad_norm": self.clip,
                "precision": self.precision,
            },
            "optimizer": {"name": self.optimizer, "args": self.optimizer_args},
            "lr": self.lr,
            "data": {"shuffle": False},
            "evaluation": self.evaluation,
            "allreduce": {"bucket_size_mib": 0.0005},  # several buckets, also for a model this small
        }


CASES = (
    Case("SGD with momentum"),
    Case("Adam, clipping", "adam", {}, {"base_lr": 2e-3, "scaling": "none"}, clip=0.2),
    Case("accumulation, clipping", accumulation=3, clip=0.3),
    Case(
        "warm-up, linear scaling, cosine decay",
        lr={"base_lr": 0.01, "reference_batch_size": 4, "warmup": 1.5, "decay": "cosine"},
        evaluation={"every": "2 steps"},
    ),
    Case("bf16", precision="bf16", tolerance=4e-3),
    # More samples: one alone in a batch is enough to overflow at the first scales.
    Case("fp16, clipping", precision="fp16", clip=0.3, num_samples=53, tolerance=2e-3),
    Case("penalty", penalty=0.03),
)

EVALUATED_WITHIN = CASES[3]
STOPPED_WITHIN = Case(
    "stopped within an epoch",
    evaluation={
        "every": "2 steps",
        "early_stopping": {"metric": "loss", "mode": "max", "min_delta": 1e6, "patience": 1},
    },
)

# As which the version before has trained an epoch on one rank: tests/data/version_before.
BEFORE = CASES[1]

# What 16 bits cannot hold, on rank 1 alone: there a gradient overflows, but not the loss.
OVERFLOW = Case("overflow", precision="fp16", tolerance=1e-2)
OVERFLOWING = 6e4
# There the loss itself is not a number, in 32 and in 16 bits.
NOT_A_NUMBER = (Case("not a number"), Case("not a number, bf16", precision="bf16"))


def cases_of(framework: str) -> list[Case]:
    """Penalties of layers are a thing of Keras alone."""
    return [case for case in CASES if not case.penalty or framework == "keras"]


def refusal(case: Case, framework: str) -> str:
    """Why a framework does not train that way; empty: it does."""
    if framework == "mxnet" and case.precision != "fp32":
        return "mixed precision of MXNet is not supported (legacy framework)"
    if framework == "transformers" and case.precision == "fp16":
        return "Transformers does not support fp16 on a CPU"
    return ""
