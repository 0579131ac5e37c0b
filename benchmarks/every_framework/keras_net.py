"""Keras: a task, and loops on each back end with Horovod alone. usage: STEPS."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import keras
from vectors import LR, MOMENTUM, NUM_CLASSES, NUM_LAYERS, WIDTH, Vectors, batches


def network() -> keras.Model:
    """Return the network."""
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(WIDTH, "relu") for _ in range(NUM_LAYERS)]
    return keras.Sequential([keras.Input((WIDTH,)), *hidden, keras.layers.Dense(NUM_CLASSES)])


class Task:
    """The network for model.fit."""

    def model(self) -> keras.Model:
        """Return the network."""
        return network()

    def train_data(self) -> Vectors:
        """Return the vectors."""
        return Vectors()

    def compile(self) -> dict[str, Any]:
        """Return the loss."""
        return {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}


def on_tensorflow(model: keras.Model, loss_of: Any, optimizer: Any, num_steps: int) -> None:
    """Train with Horovod's tape."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        tape = hvd.DistributedGradientTape(tape)
        values = [variable.value for variable in model.trainable_variables]
        optimizer.apply(tape.gradient(loss, values), model.trainable_variables)
        return loss

    for x, y in batches(hvd.rank(), hvd.size(), num_steps):
        float(step(tf.constant(x), tf.constant(y)))


def on_torch(model: keras.Model, loss_of: Any, optimizer: Any, num_steps: int) -> None:
    """Train with all gradients in one group."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    weights = model.trainable_weights
    for x, y in batches(hvd.rank(), hvd.size(), num_steps):
        loss = loss_of(torch.from_numpy(y), model(torch.from_numpy(x), training=True))
        model.zero_grad()
        loss.backward()
        means = hvd.grouped_allreduce([w.value.grad for w in weights], name="gradients")
        with torch.no_grad():
            optimizer.apply(means, weights)
        loss.item()


def on_jax(model: keras.Model, loss_of: Any, optimizer: Any, num_steps: int) -> None:
    """Train with one flat gradient between two compiled functions."""
    import horovod.torch as hvd
    import jax
    import torch
    from jax.flatten_util import ravel_pytree

    hvd.init()
    _, unravel = ravel_pytree([v.value for v in model.trainable_variables])

    def loss_and_state(trained: Any, fixed: Any, x: Any, y: Any) -> Any:
        logits, fixed = model.stateless_call(trained, fixed, x, training=True)
        return loss_of(y, logits), fixed

    @jax.jit
    def gradient(trained: Any, fixed: Any, x: Any, y: Any) -> Any:
        (loss, fixed), found = jax.value_and_grad(loss_and_state, has_aux=True)(trained, fixed, x, y)
        return loss, fixed, ravel_pytree(found)[0]

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def update(state: Any, flat: Any, trained: Any) -> Any:
        return optimizer.stateless_apply(state, unravel(flat), trained)

    trained = [v.value for v in model.trainable_variables]
    fixed = [v.value for v in model.non_trainable_variables]
    state = [v.value for v in optimizer.variables]
    for x, y in batches(hvd.rank(), hvd.size(), num_steps):
        loss, fixed, flat = gradient(trained, fixed, x, y)
        hvd.allreduce_(torch.from_dlpack(flat.block_until_ready()), name="gradient")  # where it lies
        trained, state = update(state, flat, trained)
        float(loss)


if __name__ == "__main__":
    task = Task()
    net = task.model()
    sgd = keras.optimizers.SGD(LR * 2, MOMENTUM)
    sgd.build(net.trainable_variables)
    loops = {"tensorflow": on_tensorflow, "torch": on_torch, "jax": on_jax}
    loops[keras.backend.backend()](net, task.compile()["loss"], sgd, int(sys.argv[1]))
