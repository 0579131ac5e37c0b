"""The independent computation: one process with the joint batch, in NumPy. Imports nothing of ours.

Gradients are written down by hand, in double precision; so are the optimizers, as their frameworks'
documentation defines them.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from typing import Any

import numpy as np
from frameworks.cases import EPOCHS, Case
from frameworks.net import BATCH_SIZE, NUM_EVAL_SAMPLES, Samples, start_weights

LIKE_KERAS = {"tensorflow", "keras", "mxnet"}
Weights = dict[str, np.ndarray]


def largest_difference(found: Iterable[Any], expected: Iterable[Any]) -> float:
    """The largest difference of any number; arrays may be flat on one side."""
    pairs = zip(found, expected, strict=True)
    return max(float(np.abs(np.ravel(mine) - np.ravel(theirs)).max()) for mine, theirs in pairs)


def forward(weights: Weights, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    hidden = np.tanh(x @ weights["w1"] + weights["b1"])
    return hidden, hidden @ weights["w2"] + weights["b2"]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def gradient(weights: Weights, x: np.ndarray, y: np.ndarray) -> Weights:
    """The gradient of the mean cross-entropy."""
    hidden, logits = forward(weights, x)
    d_logits = (np.exp(log_softmax(logits)) - np.eye(3)[y]) / len(x)
    d_hidden = (d_logits @ weights["w2"].T) * (1 - hidden**2)
    return {
        "w1": x.T @ d_hidden,
        "b1": d_hidden.sum(0),
        "w2": hidden.T @ d_logits,
        "b2": d_logits.sum(0),
    }


def clipped(gradients: Weights, limit: float | None) -> Weights:
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
    if limit is None or norm <= limit:
        return gradients
    return {name: g * limit / norm for name, g in gradients.items()}


class Sgd:
    """v = m v + g, w -= lr v (PyTorch, optax); or v = m v - lr g, w += v (Keras, MXNet)."""

    def __init__(self, weights: Weights, momentum: float, *, like_keras: bool) -> None:
        self.velocity = {name: np.zeros_like(w) for name, w in weights.items()}
        self.momentum = momentum
        self.like_keras = like_keras

    def step(self, weights: Weights, gradients: Weights, lr: float) -> None:
        for name, g in gradients.items():
            self.velocity[name] = self.momentum * self.velocity[name] + (-lr * g if self.like_keras else g)
            weights[name] += self.velocity[name] if self.like_keras else -lr * self.velocity[name]


class Adam:
    """Kingma and Ba 2015, algorithm 1 (PyTorch, optax), or with epsilon-hat (Keras, MXNet; section 2)."""

    def __init__(self, weights: Weights, *, like_keras: bool, epsilon: float) -> None:
        self.mean = {name: np.zeros_like(w) for name, w in weights.items()}
        self.square = {name: np.zeros_like(w) for name, w in weights.items()}
        self.count = 0
        self.like_keras = like_keras
        self.epsilon = epsilon

    def step(self, weights: Weights, gradients: Weights, lr: float) -> None:
        self.count += 1
        c1, c2 = 1 - 0.9**self.count, 1 - 0.999**self.count
        for name, g in gradients.items():
            self.mean[name] = 0.9 * self.mean[name] + 0.1 * g
            self.square[name] = 0.999 * self.square[name] + 0.001 * g**2
            if self.like_keras:
                root = np.sqrt(self.square[name]) + self.epsilon
                weights[name] -= lr * math.sqrt(c2) / c1 * self.mean[name] / root
            else:
                root = np.sqrt(self.square[name] / c2) + self.epsilon
                weights[name] -= lr * self.mean[name] / c1 / root


def learning_rate(section: dict[str, Any], global_batch: int, epochs: float) -> float:
    """Linear scaling, a linear ramp, then half a cosine to zero at the end."""
    base = section["base_lr"]
    peak = base * global_batch / section["reference_batch_size"] if "decay" in section else base
    warmup = section.get("warmup", 0)
    if epochs < warmup:
        return base + (peak - base) * epochs / warmup
    if "decay" not in section:
        return peak
    return peak * (1 + math.cos(math.pi * (epochs - warmup) / (EPOCHS - warmup))) / 2


def train_jointly(
    case: Case,
    world_size: int,
    *,
    framework: str,
    huge: float | None = None,
    skipped: Container[int] = (),
    epochs: int = EPOCHS,
    batches: Sequence[Sequence[Sequence[int]]] | None = None,
) -> tuple[Weights, dict[str, float]]:
    """Return the weights, and the metrics, of one process that sees each global batch at once.

    Args:
        case: How to train.
        world_size: How many ranks' batches make one.
        framework: Whose definitions of the optimizers hold.
        huge: See ``Samples``.
        skipped: Numbers of the steps that are not used, from 0.
        epochs: How long.
        batches: Numbers of the samples of each step of each epoch; None: one after the other.
    """
    weights = {name: array.astype(np.float64) for name, array in start_weights().items()}
    like_keras = framework in LIKE_KERAS
    if case.optimizer == "adam":
        epsilon = 1e-7 if framework in {"tensorflow", "keras"} else 1e-8
        optimizer: Any = Adam(weights, like_keras=like_keras, epsilon=epsilon)
    else:
        optimizer = Sgd(weights, case.optimizer_args["momentum"], like_keras=like_keras)
    samples = Samples(case.num_samples, 1, huge)
    global_batch = BATCH_SIZE * case.accumulation * world_size
    in_order = np.split(np.arange(case.num_samples), range(global_batch, case.num_samples, global_batch))
    for epoch, pieces in enumerate(batches or [in_order] * epochs):
        for number, piece in enumerate(pieces):
            start = number * global_batch
            found = gradient(weights, samples.x[piece].astype(np.float64), samples.y[piece])
            for name in ("w1", "w2"):
                found[name] += 2 * case.penalty * weights[name]
            lr = learning_rate(case.lr, global_batch, epoch + start / case.num_samples)
            if epoch == 0 and number in skipped:
                continue
            optimizer.step(weights, clipped(found, case.clip), lr)
    return weights, metrics(weights, case.penalty)


def metrics(weights: Weights, penalty: float) -> dict[str, float]:
    """Loss and accuracy over the evaluation data."""
    samples = Samples(NUM_EVAL_SAMPLES, 2)
    logits = forward(weights, samples.x.astype(np.float64))[1]
    losses = -log_softmax(logits)[np.arange(len(samples)), samples.y]
    loss = losses.mean() + penalty * sum((weights[name] ** 2).sum() for name in ("w1", "w2"))
    return {"loss": float(loss), "accuracy": float((logits.argmax(1) == samples.y).mean())}
