"""Ways to train a small model, for our trainer and for the reference loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

NUM_SAMPLES = 50  # not divisible by any global batch used: the last batch of an epoch is short
NUM_EVAL_SAMPLES = 23
BATCH_SIZE = 4


class Net(nn.Module):
    """A model with a parameter that no sample uses, and one that only some samples use."""

    def __init__(self, *, partly_used: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 3)
        self.never = nn.Linear(5, 5)
        self.sometimes = nn.Linear(16, 3)
        self.partly_used = partly_used

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.body(inputs)
        out = self.head(hidden)
        chosen = inputs[:, 0] > 1.0  # few samples: some ranks' batches have none
        if self.partly_used and bool(chosen.any()):
            out = out + chosen.unsqueeze(1) * self.sometimes(hidden)
        return out


def data(num_samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(num_samples, 6, generator=make), torch.randint(3, (num_samples,), generator=make)


class Task:
    def __init__(self, dtype: str = "float32", partly_used: bool = False) -> None:
        self.dtype = getattr(torch, dtype)
        self.partly_used = partly_used

    def model(self) -> nn.Module:
        torch.manual_seed(7)
        return Net(partly_used=self.partly_used).to(self.dtype)

    def train_data(self) -> TensorDataset:
        return TensorDataset(*data(NUM_SAMPLES, 1))

    def eval_data(self) -> TensorDataset:
        return TensorDataset(*data(NUM_EVAL_SAMPLES, 2))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        return functional.cross_entropy(self.scores(model, inputs), labels)

    def scores(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        scores = model(inputs.to(self.dtype))
        return scores if self.dtype == torch.float64 else scores.float()

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        inputs, labels = batch
        scores = self.scores(model, inputs)
        return {
            "loss": functional.cross_entropy(scores, labels, reduction="none"),
            "accuracy": scores.argmax(1) == labels,
        }


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        tolerance: Largest difference of a weight from the reference that is allowed.
    """

    name: str
    optimizer: str = "sgd"
    optimizer_args: dict[str, Any] = field(default_factory=lambda: {"momentum": 0.9})
    lr: float = 0.05
    accumulation: int = 1
    clip: float | None = None
    precision: str = "fp32"
    wire: str = "fp32"
    task_args: dict[str, Any] = field(default_factory=dict)
    bucket_mib: float = 0.0005  # several buckets, also for a model this small
    compile: dict[str, str] | None = None
    recompute: tuple[str, ...] = ()
    strategy: dict[str, Any] = field(default_factory=dict)
    codec: dict[str, Any] | None = None
    epochs: int = 3
    tolerance: float = 1e-6

    def job(self, task: str) -> dict[str, Any]:
        return {
            "name": "case",
            "task": task,
            "task_args": self.task_args,
            "train": {
                "epochs": self.epochs,
                "batch_size_per_rank": BATCH_SIZE,
                "accumulation_steps": self.accumulation,
                "clip_grad_norm": self.clip,
                "precision": self.precision,
                "compile": self.compile,
                "activation_checkpointing": list(self.recompute),
            },
            "optimizer": {"name": self.optimizer, "args": self.optimizer_args},
            "lr": {"base_lr": self.lr, "scaling": "none"},
            "data": {"shuffle": False},
            "allreduce": {
                "bucket_size_mib": self.bucket_mib,
                "wire_dtype": self.wire,
                "codec": self.codec,
            },
            "strategy": self.strategy,
        }


ADAMW: dict[str, Any] = {"optimizer": "adamw", "optimizer_args": {"weight_decay": 0.05}, "lr": 2e-3}

CASES = (
    Case("sgd momentum"),
    Case("sgd momentum, accumulation", accumulation=3),
    Case("sgd momentum, clipping", clip=0.3),
    Case("adamw", **ADAMW),
    Case("adamw, accumulation and clipping", accumulation=2, clip=0.3, **ADAMW),
    Case("weight decay and unused parameters", optimizer_args={"momentum": 0.9, "weight_decay": 0.01}),
    Case("parameters used by some ranks only", task_args={"partly_used": True}),
    Case("one bucket", bucket_mib=8.0),
    Case("recomputed activations", recompute=("body",)),
    Case("compiled", compile={"backend": "aot_eager"}),
    Case("fp16 on the wire", wire="fp16", tolerance=5e-4),
    Case("bf16 on the wire", wire="bf16", tolerance=4e-3),
    Case(
        "bf16 parameters and bf16 on the wire",
        task_args={"dtype": "bfloat16"},
        wire="bf16",
        lr=0.02,
        tolerance=5e-2,
    ),
    Case("bf16 autocast", precision="bf16", tolerance=4e-3),
    Case("fp16 autocast, clipping", precision="fp16", clip=0.3, tolerance=5e-4),
    Case("bf16 parameters", task_args={"dtype": "bfloat16"}, lr=0.02, tolerance=3e-2),
    Case("optimizer by import path", optimizer="torch.optim:SGD"),
    Case("lars", optimizer="lars", optimizer_args={"momentum": 0.9}, lr=0.5),
    Case("parts of weights", strategy={"name": "zero"}),
    Case(
        "parts of weights, accumulation and clipping",
        strategy={"name": "zero", "args": {"stage": 2}},
        accumulation=2,
        clip=0.3,
        task_args={"partly_used": True},
        **ADAMW,
    ),
    # Of an optimizer that is linear in the gradient, the mean of what ranks do is what the mean does.
    Case("a mean of weights", strategy={"name": "local_sgd", "args": {"every_steps": 1}}),
    Case("all numbers by top-k", codec={"name": "top-k", "args": {"keep": 1.0}}),
    Case("lamb", optimizer="lamb", optimizer_args={}, lr=2e-3),
)
