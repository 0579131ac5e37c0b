"""Functions of PyTorch that draw random numbers, and their replacements, which draw by sample."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from horovod_train.config.schema import Train
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.step.sample_random import RankDraws, SampleDraws, current


def draws_of(train: Train, device: torch.device) -> RankDraws:
    """Return the draws of a job's replica."""
    if train.randomness != "sample":
        return RankDraws()
    install()
    return SampleDraws(train.seed, device)


def _dropout(original: Callable[..., Any], num_dims: int | None) -> Callable[..., Any]:
    """Return a dropout; ``num_dims``: leading dimensions that have their own numbers (None: all)."""

    @functools.wraps(original)
    def dropout(
        input: torch.Tensor,  # noqa: A002  (PyTorch's name)
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> torch.Tensor:
        draws = current()
        if draws is None or not training or p == 0 or not 0 <= p <= 1:
            return original(input, p, training, inplace)
        shape = list(input.shape)
        if num_dims is not None:
            shape[num_dims:] = [1] * (len(shape) - num_dims)
        kept = draws.is_below(1 - p, shape, original.__name__)
        factor = kept.to(input.dtype).mul_(1 / (1 - p) if p < 1 else 0.0)
        return input.mul_(factor) if inplace else input * factor

    return dropout


def _attention(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> torch.Tensor:
        if dropout_p == 0 or current() is None:
            return original(query, key, value, attn_mask, dropout_p, is_causal, **more)
        if more.get("enable_gqa"):
            key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
        scale = more.get("scale") or 1 / math.sqrt(query.shape[-1])
        scores = query @ key.transpose(-2, -1) * scale
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            is_bool = attn_mask.dtype == torch.bool
            scores = (
                scores.masked_fill(~attn_mask, -math.inf) if is_bool else scores + attn_mask.to(scores.dtype)
            )
        # As PyTorch does, a row whose keys are all masked is 0.
        weights = scores.softmax(-1).masked_fill(scores.isneginf().all(-1, keepdim=True), 0.0)
        return functional.dropout(weights, dropout_p).to(value.dtype) @ value

    return scaled_dot_product_attention


def _multi_head(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the multi-head attention, whose weights have the rows of all heads of a sample together."""

    @functools.wraps(original)
    def multi_head_attention_forward(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        embed_dim: int,
        num_heads: int,
        *rest: Any,
        **more: Any,
    ) -> Any:
        draws = current()
        if draws is None:
            return original(query, key, value, embed_dim, num_heads, *rest, **more)
        draws.rows_per_sample = num_heads if more.get("need_weights", True) else 1
        try:
            return original(query, key, value, embed_dim, num_heads, *rest, **more)
        finally:
            draws.rows_per_sample = 1

    return multi_head_attention_forward


def check_generator(original: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise UserError if a call has a generator, whose numbers do not depend on the sample."""
    if arguments.get("generator") is not None:
        raise UserError(
            f"train.randomness: sample: {original.__name__} is called with a generator, whose numbers cannot "
            "be mapped to samples",
            hint="remove the argument, or set train.randomness: rank",
        )


def _as_requested(found: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
    """Return a tensor with the ``device``, ``requires_grad`` and ``out`` of a call."""
    out: torch.Tensor | None = arguments.get("out")
    if out is not None:
        return out.copy_(found)
    return found.to(arguments.get("device") or found.device).requires_grad_(
        bool(arguments.get("requires_grad"))
    )


Draw = Callable[[SampleDraws, Sequence[int], torch.dtype, str], torch.Tensor]


def _made(original: Callable[..., torch.Tensor], draw: Draw) -> Callable[..., torch.Tensor]:
    """Return a function that creates a tensor of a shape, such as ``torch.rand``."""

    @functools.wraps(original)
    def made(*size: Any, **more: Any) -> torch.Tensor:
        draws = current()
        if draws is None:
            return original(*size, **more)
        check_generator(original, more)
        given = size or (more["size"],)
        shape = tuple(given[0]) if len(given) == 1 and isinstance(given[0], Sequence) else given
        dtype = more.get("dtype") or torch.get_default_dtype()
        return _as_requested(draw(draws, shape, dtype, original.__name__), more)

    return made


def _like(original: Callable[..., torch.Tensor], draw: Draw) -> Callable[..., torch.Tensor]:
    """Return a function that creates a tensor of the shape of another one, such as ``torch.rand_like``."""

    @functools.wraps(original)
    def like(input: torch.Tensor, **more: Any) -> torch.Tensor:  # noqa: A002
        draws = current()
        if draws is None:
            return original(input, **more)
        check_generator(original, more)
        return _as_requested(
            draw(draws, input.shape, more.get("dtype") or input.dtype, original.__name__), more
        )

    return like


def _integers(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def randint(*bounds: Any, **more: Any) -> torch.Tensor:
        draws = current()
        if draws is None:
            return original(*bounds, **more)
        check_generator(original, more)
        given = list(bounds)
        size = more["size"] if "size" in more else given.pop()
        high = more["high"] if "high" in more else given.pop()
        low = given.pop() if given else more.get("low", 0)
        found = draws.uniform(size, torch.float64, "randint").mul_(high - low).floor_().add_(low)
        return _as_requested(found.to(more.get("dtype") or torch.int64), more)

    return randint


def _bernoulli(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def bernoulli(input: torch.Tensor, p: float | None = None, **more: Any) -> torch.Tensor:  # noqa: A002
        draws = current()
        if draws is None:
            return original(input, **({} if p is None else {"p": p}), **more)
        check_generator(original, more)
        found = draws.uniform(input.shape, torch.float64, "bernoulli") < (input if p is None else p)
        return _as_requested(found.to(input.dtype), more)

    return bernoulli


def _in_place(
    original: Callable[..., torch.Tensor], fill: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """Return a method that fills a tensor, such as ``uniform_``; ``fill`` returns its values."""

    @functools.wraps(original)
    def method(self: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        draws = current()
        if draws is None:
            return original(self, *args, **more)
        check_generator(original, more)
        more.pop("generator", None)
        if "from" in more:  # a keyword of Python
            more["start"] = more.pop("from")
        return self.copy_(fill(draws, self, *args, **more))  # the gradient of the former values is 0

    return method


def _fill_uniform(draws: SampleDraws, t: torch.Tensor, start: float = 0.0, to: float = 1.0) -> torch.Tensor:
    return draws.uniform(t.shape, t.dtype, "uniform_") * (to - start) + start


def _fill_normal(draws: SampleDraws, t: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    return draws.normal(t.shape, t.dtype, "normal_") * std + mean


def _fill_exponential(draws: SampleDraws, t: torch.Tensor, lambd: float = 1.0) -> torch.Tensor:
    return (-draws.inside(t.shape, t.dtype, "exponential_").log() / lambd).to(t.dtype)


def _fill_bernoulli(draws: SampleDraws, t: torch.Tensor, p: float | torch.Tensor = 0.5) -> torch.Tensor:
    return (draws.uniform(t.shape, torch.float64, "bernoulli_") < p).to(t.dtype)


_installation = threading.Lock()
_is_installed = False


def install() -> None:
    """Replace the functions of PyTorch that draw; without an active pass, they call the originals."""
    global _is_installed  # noqa: PLW0603  (PyTorch's functions are global, too)
    with _installation:
        if _is_installed:
            return
        _is_installed = True
        for name, num_dims in (("dropout", None), ("dropout1d", 2), ("dropout2d", 2), ("dropout3d", 2)):
            setattr(functional, name, _dropout(getattr(functional, name), num_dims))
        functional.scaled_dot_product_attention = _attention(functional.scaled_dot_product_attention)
        functional.multi_head_attention_forward = _multi_head(functional.multi_head_attention_forward)
        torch.rand, torch.randn = (
            _made(torch.rand, SampleDraws.uniform),
            _made(torch.randn, SampleDraws.normal),
        )
        torch.rand_like = _like(torch.rand_like, SampleDraws.uniform)
        torch.randn_like = _like(torch.randn_like, SampleDraws.normal)
        torch.randint, torch.bernoulli = _integers(torch.randint), _bernoulli(torch.bernoulli)
        setattr(torch.Tensor, "bernoulli", _bernoulli(torch.Tensor.bernoulli))  # noqa: B010
        fills: dict[str, Callable[..., torch.Tensor]] = {
            "uniform_": _fill_uniform,
            "normal_": _fill_normal,
            "exponential_": _fill_exponential,
            "bernoulli_": _fill_bernoulli,
        }
        for name, fill in fills.items():
            setattr(torch.Tensor, name, _in_place(getattr(torch.Tensor, name), fill))
