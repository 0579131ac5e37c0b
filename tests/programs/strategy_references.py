"""What training gives under each strategy, computed in one process and without our code."""

from __future__ import annotations

import math
from typing import Any

import torch
from strategy_cases import BATCH_SIZE, NUM_EVAL_SAMPLES, NUM_SAMPLES, Task, Way, texts
from torch import nn


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
    model = way.first_model()
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[way.optimizer]
    optimizer = make(model.parameters(), lr=way.lr, **way.args)
    data = texts(NUM_SAMPLES, 1)
    global_batch = way.global_batch(world_size)
    for _ in range(2):
        for start in range(0, NUM_SAMPLES, global_batch):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=way.precision == "bf16"):
                loss = task.loss(model, (data[start : start + global_batch],))
            loss.backward()
            for parameter in model.parameters():
                if parameter.grad is None:  # DeepSpeed knows zeros alone
                    parameter.grad = torch.zeros_like(parameter)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            if not all(bool(number.isfinite().all()) for number in (loss, *gradients)):
                continue  # as if the step had never been
            if way.clip is not None:
                norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
                for gradient in gradients if norm > way.clip else ():
                    gradient.mul_(way.clip / norm)
            optimizer.step()
    return with_loss(model, way.precision, task)


@torch.no_grad()
def with_loss(
    model: nn.Module, precision: str = "fp32", task: Task | None = None
) -> tuple[torch.Tensor, float]:
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = float((task or Task()).metrics(model, (texts(NUM_EVAL_SAMPLES, 2),))["loss"].mean())
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
