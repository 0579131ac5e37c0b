"""A small transformer, in 64 bits, and the ways to train it under each strategy."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from horovod_train.horovod.mpi import number_of

NUM_SAMPLES = 22  # no global batch divides it: the last step of an epoch is short
NUM_EVAL_SAMPLES = 7
BATCH_SIZE = 2
VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 24, 6, 16, 4, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def texts(num_samples: int, seed: int) -> torch.Tensor:
    make = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (num_samples, LENGTH + 1), generator=make)


class Task:
    """Its loss and metrics are those of the next token."""

    def model(self) -> nn.Module:
        torch.manual_seed(7)
        return Gpt().double()

    def train_data(self) -> TensorDataset:
        return TensorDataset(texts(NUM_SAMPLES, 1))

    def eval_data(self) -> TensorDataset:
        return TensorDataset(texts(NUM_EVAL_SAMPLES, 2))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        (tokens,) = batch
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        (tokens,) = batch
        scores = model(tokens[:, :-1])
        each = functional.cross_entropy(scores.transpose(1, 2), tokens[:, 1:], reduction="none")
        return {"loss": each.mean(1)}


class FloatTask(Task):
    """In 32 bits."""

    def model(self) -> nn.Module:
        return super().model().float()


class Spoiled(torch.autograd.Function):
    """Hands a number on, and gradients that are not finite back."""

    @staticmethod
    def forward(_: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * math.nan


class SpoiledTask(FloatTask):
    """The loss of one sample is not finite."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        return self.spoil(loss) if (batch[0] == texts(NUM_SAMPLES, 1)[9]).all(1).any() else loss

    def spoil(self, loss: torch.Tensor) -> torch.Tensor:
        return loss + math.nan  # and its gradient is


class PartlyUsedGpt(Gpt):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor, *, uses_more: bool) -> torch.Tensor:
        scores = super().forward(tokens)
        return (
            scores
            + self.more(scores.mean(-1, keepdim=True).expand(*scores.shape[:2], WIDTH)).mean(-1, keepdim=True)
            * scores
            if uses_more
            else scores
        )


class PartlyUsedTask(FloatTask):
    """Some weights are used in every other step."""

    def __init__(self) -> None:
        self.num_calls = 0

    def model(self) -> nn.Module:
        torch.manual_seed(7)
        return PartlyUsedGpt()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        (tokens,) = batch
        self.num_calls += 1
        scores = model(tokens[:, :-1], uses_more=self.num_calls % 2 == 1)
        return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        (tokens,) = batch
        scores = model(tokens[:, :-1], uses_more=False)
        each = functional.cross_entropy(scores.transpose(1, 2), tokens[:, 1:], reduction="none")
        return {"loss": each.mean(1)}


class SpoiledGradientTask(SpoiledTask):
    """The gradient of one sample is not finite, and its loss is."""

    def spoil(self, loss: torch.Tensor) -> torch.Tensor:
        return Spoiled.apply(loss)


class TiedTask(Task):
    """The first and the last layer have the same weight."""

    def model(self) -> nn.Module:
        model = super().model()
        model.head.weight = model.tokens.weight
        return model


class KilledTask(Task):
    """Draws at random, and can be told to kill one rank.

    Args:
        kill: "rank:call" - the rank to kill with signal 9, at its so-manieth call of ``loss``.
    """

    def __init__(self, kill: str = "") -> None:
        self.kill = kill
        self.calls = 0

    def model(self) -> nn.Module:
        model = super().model().float()
        model.norm = nn.Sequential(model.norm, nn.Dropout(0.1))
        return model

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.calls += model.training
        rank = number_of(os.environ, "rank", alone=0)
        if f"{rank}:{self.calls}" == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


class LinearTask(Task):
    """Its loss is linear in the weights: gradients do not depend on who has changed them meanwhile."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        (tokens,) = batch
        return (
            sum((p * math.cos(at + 1)).sum() for at, p in enumerate(model.parameters()))
            * tokens.double().mean()
        )


ADAMW: dict[str, Any] = {"optimizer": "adamw", "args": {"weight_decay": 0.05, "eps": 1e-4}, "lr": 1e-2}
"""A large epsilon: where gradients are close to zero, Adam makes much of the last bit of a sum."""


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        task: Name of the class of the task.
        then: The strategy under which it goes on after three steps; None: it is trained in one go.
        is_long: Tried in campaigns alone.
        start: Weights that training begins from are those of the task times this, read from a file; None:
            they are the task's.
    """

    name: str
    strategy: dict[str, Any]
    optimizer: str = "sgd"
    args: dict[str, Any] = field(default_factory=lambda: {"momentum": 0.9})
    lr: float = 0.1
    accumulation: int = 1
    clip: float | None = None
    then: dict[str, Any] | None = None
    task: str = "Task"
    precision: str = "fp32"
    is_long: bool = False
    start: float | None = None

    def runs_on(self, num_ranks: int, controller: str) -> bool:
        if self.strategy in [ADASUM, SERVER]:
            return controller == "mpi"
        both = (self.strategy, self.then)
        return num_ranks >= 4 or not any(each in both for each in WITH_TWO_AXES)

    def make_task(self) -> Task:
        tasks = (Task, FloatTask, TiedTask, LinearTask, SpoiledTask, SpoiledGradientTask, PartlyUsedTask)
        return {task.__name__: task for task in tasks}[self.task]()

    @property
    def features(self) -> list[str]:
        """What is tried, as the table of strategies has it."""
        width = "bf16" if self.precision == "bf16" else f"{32 if self.tolerance > 1e-9 else 64} bits"
        tried = {
            f"equals an independent computation: {width}": True,
            "with accumulation and clipping": self.accumulation > 1 and self.clip is not None,
            "a step that is not finite is skipped on all ranks": self.task.startswith("Spoiled"),
            "initial weights from a file": self.start is not None,
            "resumes under and from another strategy": self.then is not None,
        }
        return [feature for feature, is_tried in tried.items() if is_tried]

    def first_model(self) -> nn.Module:
        """The model that training begins with."""
        model = self.make_task().model()
        for parameter in model.parameters() if self.start is not None else ():
            parameter.data *= self.start
        return model

    @property
    def tolerance(self) -> float:
        """Largest difference of a weight."""
        if self.precision == "bf16":  # a number has 8 bits, and weights move by 0.1
            return 2e-3
        return 2e-6 if isinstance(self.make_task(), FloatTask) else 1e-12

    def global_batch(self, world_size: int) -> int:
        return BATCH_SIZE * self.accumulation * num_data(self.strategy, world_size)

    def job(
        self,
        file: str,
        world_size: int,
        max_steps: int | None = None,
        strategy: dict[str, Any] | None = None,
        initial_weights: str | None = None,
    ) -> dict[str, Any]:
        strategy = strategy or self.strategy
        ranks_batch = BATCH_SIZE * num_data(strategy, world_size)
        return {
            "name": "case",
            "task": f"{file}:{self.task}",
            "train": {
                "epochs": 2,
                "max_steps": max_steps,
                "batch_size_per_rank": BATCH_SIZE,
                "accumulation_steps": self.global_batch(world_size) // ranks_batch,
                "clip_grad_norm": self.clip,
                "precision": self.precision,
                "initial_weights": initial_weights,
            },
            "optimizer": {"name": self.optimizer, "args": self.args},
            "lr": {"base_lr": self.lr, "scaling": "none"},
            "data": {"shuffle": False},
            "health": {"non_finite": "skip" if self.task.startswith("Spoiled") else "stop"},
            "allreduce": {"bucket_size_mib": 0.01},
            "strategy": strategy,
        }


def num_data(strategy: dict[str, Any], world_size: int) -> int:
    """How many ranks read different samples."""
    if strategy["name"] == "mesh":
        return world_size // (
            strategy["args"].get("tensor_parallel_degree", 1)
            * strategy["args"].get("pipeline_parallel_degree", 1)
        )
    together = {"tensor_parallel": "tensor_parallel_degree", "pipeline": "pipeline_parallel_degree"}.get(
        strategy["name"]
    )
    return world_size // strategy["args"].get(together, world_size) if together else world_size


def ways(name: str, strategy: dict[str, Any]) -> list[Way]:
    return [
        Way(f"{name}, sgd momentum", strategy),
        Way(f"{name}, adamw, accumulation and clipping", strategy, accumulation=2, clip=0.5, **ADAMW),
    ]


ALLREDUCE, ZERO, DDP, FSDP = ({"name": name} for name in ("allreduce", "zero", "ddp", "fsdp"))

PLAN = {
    **dict.fromkeys(["blocks.*.attention.q", "blocks.*.attention.k", "blocks.*.attention.v"], "colwise"),
    "blocks.*.attention.o": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "tokens": "embedding",
    "head": "colwise_gather",
}
TENSOR = {"name": "tensor_parallel", "args": {"plan": PLAN}}
TENSOR_PAIRS = {"name": "tensor_parallel", "args": {"plan": PLAN, "tensor_parallel_degree": 2}}

ADASUM = {"name": "adasum", "args": {}}
SERVER = {"name": "parameter_server", "args": {"max_staleness": 2, "sync_every_steps": 4}}
PIPELINE = {"name": "pipeline", "args": {}}
PIPELINE_PAIRS = {"name": "pipeline", "args": {"pipeline_parallel_degree": 2}}
GPIPE = {"name": "pipeline", "args": {"schedule": "gpipe", "balance": "time"}}
INTERLEAVED = {"name": "pipeline", "args": {"schedule": "interleaved", "virtual_stages_per_rank": 2}}

TENSOR_AXIS = {"name": "mesh", "args": {"tensor_parallel_degree": 2, "plan": PLAN}}
SHARDED_TENSOR = {
    "name": "mesh",
    "args": {"tensor_parallel_degree": 2, "plan": PLAN, "shard_data_parallel": True},
}
HYBRID = {"name": "fsdp", "args": {"shard_ranks": 2}}
SMALL_PLAN = {name: style for name, style in PLAN.items() if name != "tokens"}
STAGES_AND_TENSOR = {
    "name": "mesh",
    "args": {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "plan": SMALL_PLAN},
}

SEQUENCE_PLAN = {
    "blocks.0": "sequence_begins",
    **dict.fromkeys(["blocks.*.norm1", "blocks.*.norm2", "norm"], "sequence"),
    **dict.fromkeys([f"blocks.*.attention.{name}" for name in "qkv"], "colwise_sequence"),
    "blocks.*.attention.o": "rowwise_sequence",
    "blocks.*.up": "colwise_sequence",
    "blocks.*.down": "rowwise_sequence",
    "norm": "sequence",
    "head": "sequence_ends",
}
SEQUENCE = {"name": "mesh", "args": {"tensor_parallel_degree": 2, "plan": SEQUENCE_PLAN}}
INTERLEAVED_PAIRS = {"name": "pipeline", "args": {**INTERLEAVED["args"], "pipeline_parallel_degree": 2}}

IN_32_BITS: dict[str, Any] = {**ADAMW, "task": "FloatTask"}
# Adam makes as much of a small gradient as of a large one, and of its rounding.
IN_16_BITS: dict[str, Any] = {"task": "FloatTask", "precision": "bf16"}
ALL_SHARED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
DEEPSPEED = [
    {"name": "deepspeed", "args": {"stage": stage, **(ALL_SHARED if stage == 3 else {})}}
    for stage in (1, 2, 3)
]

WITH_TWO_AXES = (STAGES_AND_TENSOR, TENSOR_PAIRS, PIPELINE_PAIRS, INTERLEAVED_PAIRS, HYBRID)
SYNCHRONOUS = (ALLREDUCE, ZERO, DDP, FSDP, TENSOR, PIPELINE, SHARDED_TENSOR)

CASES = (
    *(
        Way(f"deepspeed, stage {stage}, {name}", DEEPSPEED[stage - 1], accumulation=2, clip=0.5, **how)
        for stage in (1, 2, 3)
        for name, how in {"sgd momentum": {"task": "FloatTask"}, "adamw": IN_32_BITS}.items()
    ),
    *(
        Way(
            f"{strategy['name']} in {name}",
            strategy,
            accumulation=2,
            clip=0.5,
            **how,
        )
        for strategy in (*SYNCHRONOUS, DEEPSPEED[2])
        for name, how in {"32 bits": IN_32_BITS, "16 bits": IN_16_BITS}.items()
        if strategy is not DEEPSPEED[2] or name == "16 bits"
    ),
    *(
        Way(
            f"{strategy['name']}{strategy.get('args', {}).get('stage', '')}, {what} is not finite",
            strategy,
            accumulation=2,
            task=task,
            is_long=task == "SpoiledTask",
            **ADAMW,
        )
        for strategy in (*SYNCHRONOUS, *DEEPSPEED)
        for what, task in {"a loss": "SpoiledTask", "a gradient": "SpoiledGradientTask"}.items()
    ),
    *(
        Way(f"{strategy['name']} initial weights from a file", strategy, start=0.5, **ADAMW)
        for strategy in (ZERO, FSDP, PIPELINE, SHARDED_TENSOR)
    ),
    Way("deepspeed initial weights from a file", DEEPSPEED[2], start=0.5, **IN_32_BITS),
    Way("hybrid shards initial weights from a file", HYBRID, start=0.5, **ADAMW),
    *(
        Way(
            f"deepspeed, stage {stage}, partly used",
            DEEPSPEED[stage - 1],
            task="PartlyUsedTask",
            is_long=stage < 3,
        )
        for stage in (1, 2, 3)
    ),
    Way("allreduce, then deepspeed", ALLREDUCE, then=DEEPSPEED[2], **IN_32_BITS),
    Way("deepspeed, stage 1, then stage 3", DEEPSPEED[0], then=DEEPSPEED[2], **IN_32_BITS),
    Way("deepspeed, stage 3, then stage 2", DEEPSPEED[2], then=DEEPSPEED[1], **IN_32_BITS),
    Way("deepspeed, stage 2, then zero", DEEPSPEED[1], then=ZERO, **IN_32_BITS),
    Way("parameter server", SERVER, accumulation=2, args={}, lr=1e-3, task="LinearTask"),
    Way("adasum", ADASUM, accumulation=2, **ADAMW),
    Way("mesh with parts of the sequence", SEQUENCE, accumulation=2, clip=0.5, **ADAMW),
    Way("mesh of shards, then fsdp", SHARDED_TENSOR, then=FSDP, accumulation=2, **ADAMW),
    Way("hybrid shards, then mesh of stages", HYBRID, then=STAGES_AND_TENSOR, **ADAMW),
    Way(
        "mesh of stages, then mesh of shards", STAGES_AND_TENSOR, then=SHARDED_TENSOR, accumulation=2, **ADAMW
    ),
    Way("mesh of tensor ranks", TENSOR_AXIS, accumulation=2, clip=0.5, **ADAMW),
    Way("mesh of tensor ranks and shards", SHARDED_TENSOR, accumulation=2, clip=0.5, **ADAMW),
    Way("hybrid shards", HYBRID, accumulation=2, clip=0.5, **ADAMW),
    Way("mesh of stages and tensor ranks", STAGES_AND_TENSOR, accumulation=2, clip=0.5, **ADAMW),
    *ways("pipeline", PIPELINE),
    *ways("pipeline in pairs", PIPELINE_PAIRS),
    Way("pipeline, gpipe", GPIPE, accumulation=3, **ADAMW),
    Way("pipeline, interleaved", INTERLEAVED, accumulation=3, clip=0.5, **ADAMW),
    Way("pipeline, interleaved in pairs", INTERLEAVED_PAIRS, accumulation=3, clip=0.5, **ADAMW),
    Way("pipeline, tied weights", PIPELINE, accumulation=2, clip=0.5, task="TiedTask", **ADAMW),
    *ways("tensor parallel", TENSOR),
    *ways("tensor parallel in pairs", TENSOR_PAIRS),
    *ways("zero", ZERO),
    *ways("ddp", DDP),
    *ways("fsdp", FSDP),
    Way(
        "fsdp without resharding",
        {**FSDP, "args": {"reshard_after_forward": False, "reduce_each": False}},
        accumulation=2,
        **ADAMW,
    ),
    Way("allreduce, then fsdp", ALLREDUCE, then=FSDP, **ADAMW),
    Way("fsdp, then zero", FSDP, then=ZERO, **ADAMW),
    Way("zero, then ddp", ZERO, then=DDP, **ADAMW),
    Way("allreduce, then pipeline", ALLREDUCE, then=PIPELINE, **ADAMW),
    Way("pipeline, then fsdp", PIPELINE, then=FSDP, accumulation=4, **ADAMW),
)
if find_spec("deepspeed") is None:
    CASES = tuple(case for case in CASES if "deepspeed" not in f"{case.strategy} {case.then}")
