"""The independent computation: a plain PyTorch loop over the joint batch. Of ours, it imports Lamb alone."""

from __future__ import annotations

import pytorch_optimizer
import torch
from programs.cases import BATCH_SIZE, NUM_EVAL_SAMPLES, NUM_SAMPLES, Case, Task, data

from horovod_train.frameworks.torch.state.optimizer import (
    Lamb,  # tests/unit/test_scaling_rules.py: by its formula
)

FACTORIES = {
    "sgd": torch.optim.SGD,
    "torch.optim:SGD": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
    "torch.optim:Adagrad": torch.optim.Adagrad,
    "lars": pytorch_optimizer.LARS,
    "lamb": Lamb,
}


def clip(model: torch.nn.Module, limit: float) -> None:
    """Scale the gradient down to a norm; exactly: PyTorch's own function adds 1e-6 to the norm."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = float(sum(gradient.double().square().sum() for gradient in gradients)) ** 0.5
    for gradient in gradients if norm > limit else ():
        gradient.mul_(limit / norm)


def joint_batch_weights(case: Case, world_size: int) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the weights, and the metrics, of one process that sees each global batch at once."""
    # Loss scaling and rounding are the trainer's business: the reference is never in less than 32 bits.
    dtype = "float64" if case.task_args.get("dtype") == "float64" else "float32"
    task = Task(dtype, partly_used=case.task_args.get("partly_used", False))
    model = task.model()
    optimizer = FACTORIES[case.optimizer](model.parameters(), lr=case.lr, **case.optimizer_args)
    inputs, labels = data(NUM_SAMPLES, 1)
    global_batch = BATCH_SIZE * case.accumulation * world_size
    for _ in range(case.epochs):
        for start in range(0, NUM_SAMPLES, global_batch):
            piece = slice(start, start + global_batch)
            optimizer.zero_grad()
            task.loss(model, (inputs[piece], labels[piece])).backward()
            if case.clip is not None:
                clip(model, case.clip)
            optimizer.step()
    inputs, labels = data(NUM_EVAL_SAMPLES, 2)
    with torch.no_grad():
        scores = task.scores(model, inputs).double()
    metrics = {
        "loss": float(torch.nn.functional.cross_entropy(scores, labels)),
        "accuracy": float((scores.argmax(1) == labels).double().mean()),
    }
    return torch.cat([p.detach().double().flatten() for p in model.parameters()]), metrics
