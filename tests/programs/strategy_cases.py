"""A small transformer, in 64 bits, and the ways to train it under each strategy."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

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
        rank = os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
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

    def runs_on(self, num_ranks: int, controller: str) -> bool:
        if self.strategy in [ADASUM, SERVER]:
            return controller == "mpi"
        return num_ranks >= 4 or STAGES_AND_TENSOR not in [self.strategy, self.then]

    def make_task(self) -> Task:
        return {"Task": Task, "TiedTask": TiedTask, "LinearTask": LinearTask}[self.task]()

    def global_batch(self, world_size: int) -> int:
        return BATCH_SIZE * self.accumulation * num_data(self.strategy, world_size)

    def job(
        self,
        file: str,
        world_size: int,
        max_steps: int | None = None,
        strategy: dict[str, Any] | None = None,
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
            },
            "optimizer": {"name": self.optimizer, "args": self.args},
            "lr": {"base_lr": self.lr, "scaling": "none"},
            "data": {"shuffle": False},
            "allreduce": {"bucket_size_mib": 0.01},
            "strategy": strategy,
        }


def num_data(strategy: dict[str, Any], world_size: int) -> int:
    """How many ranks read different samples."""
    if strategy["name"] == "mesh":
        return world_size // (strategy["args"].get("tensor", 1) * strategy["args"].get("pipeline", 1))
    together = {"tensor_parallel": "degree", "pipeline": "stages"}.get(strategy["name"])
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
TENSOR_PAIRS = {"name": "tensor_parallel", "args": {"plan": PLAN, "degree": 2}}

ADASUM = {"name": "adasum", "args": {}}
SERVER = {"name": "parameter_server", "args": {"max_staleness": 2, "meet_every_steps": 4}}
PIPELINE = {"name": "pipeline", "args": {}}
PIPELINE_PAIRS = {"name": "pipeline", "args": {"stages": 2}}
GPIPE = {"name": "pipeline", "args": {"schedule": "gpipe", "balance": "time"}}
INTERLEAVED = {"name": "pipeline", "args": {"schedule": "interleaved", "chunks_per_rank": 2}}

TENSOR_AXIS = {"name": "mesh", "args": {"tensor": 2, "plan": PLAN}}
SHARDED_TENSOR = {"name": "mesh", "args": {"tensor": 2, "plan": PLAN, "shard": True}}
HYBRID = {"name": "fsdp", "args": {"shard_ranks": 2}}
SMALL_PLAN = {name: style for name, style in PLAN.items() if name != "tokens"}
STAGES_AND_TENSOR = {"name": "mesh", "args": {"pipeline": 2, "tensor": 2, "plan": SMALL_PLAN}}

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
SEQUENCE = {"name": "mesh", "args": {"tensor": 2, "plan": SEQUENCE_PLAN}}
INTERLEAVED_PAIRS = {"name": "pipeline", "args": {**INTERLEAVED["args"], "stages": 2}}

CASES = (
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


def joined_by_adasum(changes: list[Any]) -> Any:
    """The operator as the paper has it, in NumPy, on flat arrays of 2^k ranks."""
    while len(changes) > 1:
        following = []
        for a, b in zip(changes[::2], changes[1::2], strict=True):
            of_a, of_b = (1 - (a @ b) / (2 * (each @ each)) if each.any() else 1 for each in (a, b))
            following.append(of_a * a + of_b * b)
        changes = following
    return changes[0]


def shares_of_step(step: torch.Tensor, size: int, batch: int) -> list[torch.Tensor]:
    """Which samples of a step each rank has, at most so many."""
    num_busy = min(size, max(-(-len(step) // batch), len(step) // 2, 1))
    return [*step.tensor_split(num_busy), *[step[:0]] * (size - num_busy)]


def adasum(way: Way, world_size: int) -> tuple[torch.Tensor, float]:
    """Adasum, written down once more: a loop over models of all ranks, with an optimizer each."""
    task = way.make_task()
    models = [task.model() for _ in range(world_size)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=way.lr, **way.args) for model in models]
    data = texts(NUM_SAMPLES, 1)
    batch = BATCH_SIZE * way.accumulation
    for step in [s for _ in range(2) for s in torch.arange(NUM_SAMPLES).split(batch * world_size)]:
        before = [p.detach().clone() for p in models[0].parameters()]
        shares = shares_of_step(step, world_size, batch)
        for model, optimizer, mine in zip(models, optimizers, shares, strict=True):
            optimizer.zero_grad()
            if len(mine):
                task.loss(model, (data[mine],)).backward()
                optimizer.step()
        for old, *new in zip(before, *(model.parameters() for model in models), strict=True):
            changes = [(p.detach() - old).flatten().numpy() for p in new]
            for p in new:
                p.data = old + torch.from_numpy(joined_by_adasum(changes)).view(old.shape)
    return with_loss(models[0])


def joint_batch(way: Way, world_size: int) -> tuple[torch.Tensor, float]:
    """The weights, and the loss of the evaluation, of one process that sees each global batch at once."""
    task = way.make_task()
    model = task.model()
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[way.optimizer]
    optimizer = make(model.parameters(), lr=way.lr, **way.args)
    data = texts(NUM_SAMPLES, 1)
    global_batch = way.global_batch(world_size)
    for _ in range(2):
        for start in range(0, NUM_SAMPLES, global_batch):
            optimizer.zero_grad()
            task.loss(model, (data[start : start + global_batch],)).backward()
            if way.clip is not None:
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
                for gradient in gradients if norm > way.clip else ():
                    gradient.mul_(way.clip / norm)
            optimizer.step()
    return with_loss(model)


@torch.no_grad()
def with_loss(model: nn.Module) -> tuple[torch.Tensor, float]:
    loss = float(Task().metrics(model, (texts(NUM_EVAL_SAMPLES, 2),))["loss"].mean())
    return torch.cat([p.detach().flatten() for p in model.parameters()]), loss


def parameter_server(way: Way, world_size: int) -> tuple[torch.Tensor, float]:
    """Each weight moves by the sum of all gradients, in whatever order they come."""
    model = way.make_task().model()
    batch = BATCH_SIZE * way.accumulation
    steps = [s for _ in range(2) for s in torch.arange(NUM_SAMPLES).split(batch * world_size)]
    shares = [mine for step in steps for mine in shares_of_step(step, world_size, batch) if len(mine)]
    total = sum(float(texts(NUM_SAMPLES, 1)[mine].double().mean()) for mine in shares)
    for at, p in enumerate(model.parameters()):
        p.data -= way.lr * math.cos(at + 1) * total
    return with_loss(model)


def expected(way: Way, world_size: int) -> tuple[torch.Tensor, float]:
    """The weights, and the loss of the evaluation."""
    compute = {"adasum": adasum, "parameter_server": parameter_server}.get(way.strategy["name"], joint_batch)
    return compute(way, world_size)
