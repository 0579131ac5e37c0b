"""Refusal of Keras losses whose mean over ranks is not the loss of the joint batch.

In the last step of an epoch, ranks have different numbers of samples. Sample weights correct a loss that is a
mean over samples. They have no effect on losses that layers add, or on a mean over the values that a mask
keeps.
"""

from __future__ import annotations

from typing import Any

import keras
from keras.src.backend import get_keras_mask

from horovod_train.errors import UserError


def check_reduction(loss: object) -> None:
    """Raise UserError if a loss is not a mean over samples."""
    for one in keras.tree.flatten(loss):
        reduction = getattr(one, "reduction", "sum_over_batch_size")
        if reduction not in {"sum_over_batch_size", "mean"}:
            raise UserError(
                f"the loss {one.name} has reduction {reduction!r}: it is not a mean over samples, and "
                "the mean over ranks would not be the loss of the joint batch",
                hint="use reduction='sum_over_batch_size', Keras's default",
            )


def check_joint_loss(model: keras.Model, inputs: Any, loss: object) -> None:
    """Refuse a built model whose loss on a batch is not the mean of the losses on the batch's parts.

    The model is called with ``inputs`` of one sample.

    Raises:
        UserError: Layers add losses of a batch, or a mask selects the values that are averaged.
    """
    before = [(variable, variable.numpy()) for variable in model.variables]
    outputs = model(inputs, training=False)
    own = [loss for layer in [model, *model._flatten_layers()] for loss in layer._get_own_losses()]  # noqa: SLF001
    for variable, value in before:  # such as the state of a recurrent layer
        variable.assign(value)
    if own:
        raise UserError(
            "layers of the model add losses of a batch (activity_regularizer, add_loss), which sample "
            "weights do not scale: their mean over ranks is not the loss of the joint batch",
            hint="add the term to the loss that compile() gets, or use framework: torch, tensorflow or jax",
        )
    ignoring = [each for each in keras.tree.flatten(loss) if getattr(each, "ignore_class", None) is not None]
    if ignoring or any(get_keras_mask(each) is not None for each in keras.tree.flatten(outputs)):
        origin = "ignore_class" if ignoring else "mask_zero, Masking"
        raise UserError(
            f"the loss is a mean over unmasked values ({origin}), whose number differs between ranks",
            hint="take the mask off the model's output, and give weights with the samples: (x, y, weights)",
        )
