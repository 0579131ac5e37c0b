"""The independent computation: a plain PyTorch loop over the joint batch. Imports nothing of ours."""

from __future__ import annotations

import pytorch_optimizer
import torch
from programs.cases import BATCH_SIZE, NUM_EVAL_SAMPLES, NUM_SAMPLES, Case, Task, data
from torch.nn.utils import clip_grad_norm_

FACTORIES = {
    "sgd": torch.optim.SGD,
    "torch.optim:SGD": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
    "lars": pytorch_optimizer.LARS,
    "lamb": pytorch_optimizer.Lamb,
}


def joint_batch_weights(case: Case, world_size: int) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the weights, and the metrics, of one process that sees each global batch at once."""
    # Loss scaling and rounding are the trainer's business: the reference is always fp32.
    task = Task(partly_used=case.task_args.get("partly_used", False))
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
                clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
    inputs, labels = data(NUM_EVAL_SAMPLES, 2)
    with torch.no_grad():
        scores = model(inputs).double()
    metrics = {
        "loss": float(torch.nn.functional.cross_entropy(scores, labels)),
        "accuracy": float((scores.argmax(1) == labels).double().mean()),
    }
    return torch.cat([p.detach().double().flatten() for p in model.parameters()]), metrics
