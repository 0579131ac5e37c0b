"""What training gives in one process: a plain loop over the joint batch, without code of the product."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import default_collate

EPOCHS = 2
BATCH_SIZE = 4


@dataclass(frozen=True)
class Settings:
    """How a case is trained.

    Attributes:
        optimizer: Name in ``torch.optim``, or ``module:Class``.
        accumulation_steps: Micro-batches per step on each rank; here they are one batch.
    """

    name: str
    optimizer: str = "SGD"
    lr: float = 0.05
    args: dict[str, Any] = field(default_factory=dict)
    accumulation_steps: int = 1
    clip_grad_norm: float | None = None

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        module, _, name = self.optimizer.rpartition(":")
        source = torch.optim if not module else __import__(module)
        return getattr(source, name)(parameters, lr=self.lr, **self.args)


EASY = Settings("easy")
HARD = Settings("hard", "AdamW", 0.01, {"weight_decay": 0.1, "eps": 1e-4}, 3, 0.5)
"""A large eps: AdamW turns the rounding of a gradient of zero into a step of the learning rate's size."""


def pieces(total: int, num: int) -> list[int]:
    """Lengths of so many consecutive pieces, the longer ones first."""
    return [total // num + (at < total % num) for at in range(num)]


def split_step(num_samples: int, accumulation_steps: int, num_ranks: int) -> list[int]:
    """Lengths of the micro-batches of a step, rank by rank: no rank has a lone sample if that can be."""
    needed = -(-num_samples // (BATCH_SIZE * accumulation_steps))
    busy = min(num_ranks, max(needed, num_samples // 2, 1))
    return [
        each for of_rank in pieces(num_samples, busy) for each in pieces(of_rank, -(-of_rank // BATCH_SIZE))
    ]


def trained(task: Any, settings: Settings, num_ranks: int, *, zeros: bool = False) -> dict[str, torch.Tensor]:
    """Return weights and buffers after training.

    Args:
        task: A case.
        settings: How it is trained.
        num_ranks: So many ranks share a global batch.
        zeros: A parameter that a step does not use has a gradient of zeros.
    """
    precision = task.job.get("train", {}).get("precision", "fp32")
    settings = task.optimized(settings)
    model = task.model()
    data = task.train_data()
    groups = getattr(task, "param_groups", None)
    parameters = groups(model) if groups else [p for p in model.parameters() if p.requires_grad]
    optimizer = settings.make_optimizer(parameters)
    collate = getattr(data, "collate", default_collate)
    rates = [group["lr"] * group.get("lr_scale", 1.0) for group in optimizer.param_groups]
    ema = task.job.get("ema")
    averaged = None
    has_modes = callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None))
    if has_modes:
        optimizer.train()
    size = BATCH_SIZE * settings.accumulation_steps * num_ranks
    for _ in range(EPOCHS):
        for start in range(0, len(data), size):
            model.train()
            model.zero_grad()
            stop = min(start + size, len(data))
            splits = (
                split_step(stop - start, settings.accumulation_steps, num_ranks)
                if task.splits
                else [stop - start]
            )
            first = start
            for length in splits:
                batch = collate([data[i] for i in range(first, first + length)])
                first += length
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                    loss = task.loss(model, batch)
                if isinstance(loss, tuple):
                    loss = loss[0] / loss[1]
                (loss.sum() * length / (stop - start)).backward()
            trained_now = [p for p in model.parameters() if p.requires_grad]
            for p in trained_now:
                if p.grad is None and zeros:
                    p.grad = torch.zeros_like(p)
                if p.grad is not None and p.grad.is_sparse:
                    p.grad = p.grad.to_dense()
            gradients = [p.grad for p in trained_now if p.grad is not None]
            if settings.clip_grad_norm is not None:
                norm = sum(float(g.abs().square().sum()) for g in gradients) ** 0.5
                for g in gradients if norm > settings.clip_grad_norm else ():
                    g.mul_(settings.clip_grad_norm / norm)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            optimizer.step()
            if (after := getattr(task, "after_update", None)) is not None:
                after(model)
            if ema is not None and averaged is None:
                averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(ema["decay"]))
            if ema is not None:
                averaged.update_parameters(model)
    if has_modes:
        optimizer.eval()
    final = averaged.module if averaged is not None else model
    return {name: t.detach().clone() for name, t in final.state_dict().items() if isinstance(t, torch.Tensor)}
