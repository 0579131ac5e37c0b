"""Small models in JAX: each takes its parameters, x and t, and returns logits, shape [batch, 4]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NETS: dict[str, tuple[dict[str, tuple[int, ...]], Callable[..., Any]]] = {}
Net = Callable[[Any, Any, Any], Any]


def net(**shapes: tuple[int, ...]) -> Callable[[Net], Net]:
    """Add a function, with the shapes of its parameters."""

    def add(function: Net) -> Net:
        NETS[function.__name__] = shapes, function
        return function

    return add


def made(name: str) -> dict[str, np.ndarray]:
    """Return parameters, the same each time."""
    numbers = np.random.RandomState(1234)
    return {key: (0.5 * numbers.randn(*shape)).astype(np.float32) for key, shape in NETS[name][0].items()}


def norm(h: Any) -> Any:
    return (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)


@net(a=(6, 8), b=(8,), c=(8, 4))
def mlp(p, x, t):
    return jnp.tanh(x @ p["a"] + p["b"]) @ p["c"]


@net(a=(6, 6), b=(6, 6), c=(6, 4))
def residual(p, x, t):
    for name in ("a", "b"):
        x = x + jax.nn.gelu(x @ p[name])
    return x @ p["c"]


@net(a=(6, 8), g=(8,), s=(8,), c=(8, 4))
def layer_norm(p, x, t):
    return (norm(x @ p["a"]) * p["g"] + p["s"]) @ p["c"]


@net(a=(6, 8), c=(8, 4))
def rms_norm(p, x, t):
    h = x @ p["a"]
    return h / jnp.sqrt((h**2).mean(-1, keepdims=True) + 1e-5) @ p["c"]


@net(a=(6, 6), c=(6, 4))
def iterated(p, x, t):
    return jax.lax.fori_loop(0, 4, lambda _, h: h + 0.3 * jnp.tanh(h @ p["a"]), x) @ p["c"]


@net(a=(6, 6), c=(6, 4))
def scanned(p, x, t):
    h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ p["a"]), None), x, None, length=3)
    return h @ p["c"]


@net(e=(20, 6), c=(6, 4))
def bag(p, x, t):
    return p["e"][t].sum(1) @ p["c"]


@net(e=(20, 4), c=(20, 4))
def tied(p, x, t):
    return p["e"][t].mean(1) @ p["e"].T @ p["c"]


@net(e=(20, 6), w=(6, 6), u=(6, 6), c=(6, 4))
def rnn(p, x, t):
    def step(h, token):
        return jnp.tanh(p["e"][token] @ p["w"] + h @ p["u"]), None

    h, _ = jax.lax.scan(step, jnp.zeros((len(t), 6)), t.T)
    return h @ p["c"]


@net(e=(20, 6), w=(6, 18), u=(6, 18), c=(6, 4))
def gru(p, x, t):
    def step(h, token):
        r, z, n = jnp.split(p["e"][token] @ p["w"], 3, -1)
        hr, hz, hn = jnp.split(h @ p["u"], 3, -1)
        gate = jax.nn.sigmoid(z + hz)
        return (1 - gate) * jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn) + gate * h, None

    h, _ = jax.lax.scan(step, jnp.zeros((len(t), 6)), t.T)
    return h @ p["c"]


@net(e=(20, 8), q=(8, 8), k=(8, 8), v=(8, 8), c=(8, 4))
def attention(p, x, t):
    h = p["e"][t]
    weights = jax.nn.softmax(h @ p["q"] @ jnp.swapaxes(h @ p["k"], 1, 2) / 8**0.5, -1)
    return (weights @ (h @ p["v"])).mean(1) @ p["c"]


@net(e=(20, 8), q=(8, 8), k=(8, 8), c=(8, 4))
def causal(p, x, t):
    h = p["e"][t]
    scores = jnp.where(jnp.tri(5, dtype=bool), h @ p["q"] @ jnp.swapaxes(h @ p["k"], 1, 2), -jnp.inf)
    return (jax.nn.softmax(scores, -1) @ h)[:, -1] @ p["c"]


@net(w=(2, 2, 1, 4), c=(4, 4))
def convolution(p, x, t):
    dims = ("NHWC", "HWIO", "NHWC")
    h = jax.lax.conv_general_dilated(x.reshape(-1, 2, 3, 1), p["w"], (1, 1), "SAME", dimension_numbers=dims)
    return jax.nn.relu(h).mean((1, 2)) @ p["c"]


@net(a=(6, 8), c=(8, 4))
def maxout(p, x, t):
    return jnp.repeat((x @ p["a"]).reshape(-1, 4, 2).max(-1), 2, -1) @ p["c"]


@net(g=(6, 3), w=(3, 6, 4))
def experts(p, x, t):
    return jnp.einsum("be,bi,eio->bo", jax.nn.softmax(x @ p["g"], -1), x, p["w"])


@net(g=(6, 3), w=(3, 6, 4))
def best_expert(p, x, t):
    scores = jax.nn.softmax(x @ p["g"], -1)
    mask = jax.nn.one_hot(scores.argmax(-1), 3)
    return jnp.einsum("be,bi,eio->bo", mask * scores, x, p["w"])


@net(a=(6, 8), c=(8, 4))
def recomputed(p, x, t):
    return jax.checkpoint(lambda h: jnp.tanh(h @ p["a"]))(x) @ p["c"]


@net(a=(6, 8), c=(8, 4), scale=())
def scalar(p, x, t):
    return p["scale"] * jnp.tanh(x @ p["a"]) @ p["c"]


@net(a=(6, 8), c=(8, 4))
def stopped(p, x, t):
    h = jnp.tanh(x @ p["a"])
    return h @ p["c"] + jax.lax.stop_gradient(h[:, :4])


@net(a=(6, 8), c=(8, 4), unused=(3, 3))
def unused(p, x, t):
    return jnp.tanh(x @ p["a"]) @ p["c"]


@net(a=(6, 8), c=(8, 4))
def branches(p, x, t):
    return jax.lax.cond((t[0, 0] % 2) == 0, lambda: x, lambda: x) @ p["a"] @ p["c"]


@jax.custom_vjp
def rounded(h):
    return jnp.round(h * 4) / 4


rounded.defvjp(lambda h: (rounded(h), None), lambda _, gradient: (gradient,))


@net(a=(6, 8), c=(8, 4))
def straight_through(p, x, t):
    return rounded(jnp.tanh(x @ p["a"])) @ p["c"]


@net(a=(6, 8), c=(8, 4))
def vmapped(p, x, t):
    return jax.vmap(lambda each: jnp.tanh(each @ p["a"]) @ p["c"])(x)


@net(a=(6, 8), c=(8, 4))
def normalized(p, x, t):
    weight = p["c"] / jnp.linalg.norm(p["c"], axis=0)
    return jnp.tanh(x @ p["a"]) @ weight


@net(a=(6, 6), c=(6, 4))
def symmetric(p, x, t):
    return jnp.tanh(x @ (p["a"] + p["a"].T)) @ p["c"]


@net(f=(6, 5), e=(20, 6), c=(6, 4))
def spectrum(p, x, t):
    h = jnp.fft.rfft(jnp.swapaxes(p["e"][t], 1, 2), n=10) * jnp.fft.rfft(p["f"], n=10)
    return jnp.fft.irfft(h, n=10)[..., 4] @ p["c"]


@net(a=(6, 9), c=(3, 4))
def solved(p, x, t):
    matrix = (x @ p["a"]).reshape(-1, 3, 3)
    system = matrix @ jnp.swapaxes(matrix, 1, 2) + jnp.eye(3)
    return jnp.linalg.solve(system, x[:, :3, None])[..., 0] @ p["c"]


@net(e=(20, 6), m=(12, 6), c=(6, 4))
def graph(p, x, t):
    h = p["e"][t]
    source, target = jnp.array([0, 1, 2, 3, 4]), jnp.array([1, 2, 3, 4, 0])
    messages = jax.nn.relu(jnp.concatenate([h[:, source], h[:, target]], -1) @ p["m"])
    return jnp.zeros_like(h).at[:, target].add(messages).sum(1) @ p["c"]


@net(a=(6, 8), b=(8, 4), gain=(4,), bias=(4,))
def with_vectors(p, x, t):
    return jnp.tanh(x @ p["a"]) @ p["b"] * p["gain"] + p["bias"]


@net(k=(10, 6), v=(10, 4))
def memory(p, x, t):
    scores, places = jax.lax.top_k(x @ p["k"].T, 2)
    return (jax.nn.softmax(scores, -1)[..., None] * p["v"][places]).sum(1)


@net(emb=(20, 4), w=(4, 36), c=(6, 4))
def hyper(p, x, t):
    weights = (p["emb"][t].mean(1) @ p["w"]).reshape(-1, 6, 6)
    return jnp.tanh(jnp.einsum("bi,bij->bj", x, weights)) @ p["c"]
