"""Whether a loss is divided by the number of items (labels, tokens) of the whole step.

Trainer passes this number to each model whose ``forward`` accepts further arguments. Many models ignore it,
such as BertForSequenceClassification, and return a mean over the labels of their batch.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from horovod_train.collectives.base import allgather_json
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.state.generators import seed_generators
from horovod_train.frameworks.torch.verify.untouched import traceless

TOLERANCE = 0.02
"""Largest difference of a ratio of two losses that is attributed to rounding."""


def divides_by_items(trainer: Any, inputs: dict[str, Any]) -> bool | None:
    """Compute a loss with two numbers of items, in evaluation mode. Collective.

    Args:
        trainer: A ``HorovodTrainer``.
        inputs: A micro-batch of this rank.

    Returns:
        True: the loss is divided by the number; False: it ignores the number; None: it cannot be seen in this
        batch, whose loss is zero or not finite.

    Raises:
        UserError: Only a part of the loss is divided by the number, so that no weight of ranks is right.
    """
    found = set(allgather_json(trainer.world, _kind_of(_ratio(trainer, inputs)))) - {""}
    if len(found) > 1 or "mixed" in found:
        raise UserError(
            "the loss is a sum of terms, of which only some are divided by num_items_in_batch: on several "
            "ranks, each rank would add the others",
            hint="divide all terms by num_items_in_batch, or none (compute_loss_func); for a mixture of "
            "experts, set output_router_logits: false",
        )
    return {"divided": True, "ignored": False}[found.pop()] if found else None


def _ratio(trainer: Any, inputs: dict[str, Any]) -> float:
    """Return the loss with twice the number of items, relative to that with the number."""
    model, losses = trainer.model, []
    prepared = trainer._prepare_inputs(inputs)  # noqa: SLF001  (as training_step does)
    with traceless(model), torch.no_grad(), trainer.compute_loss_context_manager():
        model.eval()
        for num_items in (8.0, 16.0):
            seed_generators(0, 0, 0)
            count = torch.tensor(num_items, device=trainer.args.device)
            losses.append(float(trainer.compute_loss(model, dict(prepared), num_items_in_batch=count)))
    return losses[1] / losses[0] if losses[0] else float("nan")


def _kind_of(ratio: float) -> str:
    if math.isnan(ratio):
        return ""
    kinds = {"divided": 0.5, "ignored": 1.0}
    return next((kind for kind, ideal in kinds.items() if abs(ratio - ideal) <= TOLERANCE), "mixed")
