"""Random numbers of a forward pass.

RankDraws     ``train.randomness: rank``: each rank has its own generators
SampleDraws   ``train.randomness: sample``: numbers do not depend on the number of ranks
install       replaces the functions of PyTorch that draw by functions that draw by sample
"""

from __future__ import annotations

import functools
import logging
import math
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from horovod_train.config.schema import Train
from horovod_train.data.order import GOLDEN
from horovod_train.data.shard import MicroBatch
from horovod_train.errors import UserError
from horovod_train.frameworks.reader import sample_seeds

log = logging.getLogger(__name__)

MASK16 = 0xFFFF
NUM_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Bits of uniformly distributed numbers; more would be rounded up to 1."""
HINT = (
    "draw with the batch as first dimension, by the functions that docs/scaling.md lists, or set "
    "train.randomness: rank"
)
EVALUATION = 2**53
"""Number in place of an epoch, for random numbers of evaluations."""
_active: dict[int, SampleDraws] = {}
"""The draws of each thread that runs a pass."""


class RankDraws:
    """Draws of ``train.randomness: rank``: each rank has its own generators."""

    def micro_batch(self, epoch: int, micro_batch: MicroBatch) -> Any:
        """Return the context of the passes of a micro-batch."""
        del epoch, micro_batch
        return nullcontext()

    def evaluation(self, micro_batch: MicroBatch) -> Any:
        """Return the context of the evaluation of a micro-batch."""
        del micro_batch
        return nullcontext()

    def forward(self) -> Any:
        """Return the context of a forward pass, within that of the micro-batch."""
        return nullcontext()


class SampleDraws(RankDraws):
    """Draws of ``train.randomness: sample``.

    Each random number of a forward pass is a hash of (seed, epoch, place of the sample in the epoch, number
    of the call, number of the element). A sample therefore has the same dropout mask and the same noise on
    any number of ranks, in any micro-batch, and after a resume. The functions of PyTorch that draw numbers
    are replaced by functions that use the hash while a forward pass runs in this thread. They require the
    batch as the first dimension.

    A draw that is not replaced changes the state of a default generator, which is checked after each
    micro-batch; the job then ends with the name of the operation. The hash is the mixer ``lowbias32`` of
    Christopher Wellons ("Prospecting for Hash Functions", 2018), applied twice; on a CPU, it is faster than
    PyTorch's generator.

    Args:
        seed: The job's seed.
        device: Device of the model.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._hashed = torch.zeros(0, dtype=torch.int32, device=device)
        self._keys = torch.zeros(0, dtype=torch.int64)
        self._num_calls = 0
        self._is_in_forward = self._is_lenient = self._has_warned = False
        self._finder: _Finder | None = _Finder()
        self.rows_per_sample = 1

    @contextmanager
    def micro_batch(self, epoch: int, micro_batch: MicroBatch) -> Iterator[None]:
        """Draw by sample in the block, which runs the passes of a micro-batch.

        Raises:
            UserError: A random number was drawn that cannot be mapped to a sample.
        """
        seeds = sample_seeds(self._seed, epoch, range(micro_batch.start, micro_batch.stop))
        self._keys = torch.from_numpy(seeds.view(np.int64)).to(self._device)
        self._num_calls, before = 0, _default_states()
        _active[threading.get_ident()] = self
        try:
            # Recording slows each operation down: the first micro-batch is recorded.
            finder, self._finder = self._finder, None
            with nullcontext() if finder is None else finder:
                yield
        finally:
            del _active[threading.get_ident()]
        if _default_states() != before:
            if self._is_lenient:
                self._warn_of_metrics("functions that docs/scaling.md does not list")
                return
            found = sorted(finder.found) if finder is not None else []
            names = f": {', '.join(found)}" if found else ""
            raise UserError(
                "train.randomness: sample: the model or its loss draws random numbers that cannot be mapped "
                f"to samples{names}",
                hint=HINT,
            )

    @contextmanager
    def evaluation(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Draw by sample in the block, the same in each evaluation.

        Random numbers that cannot be mapped to samples are drawn as without ``train.randomness: sample``,
        with a warning: metrics change no weights.
        """
        self._is_lenient = True
        try:
            with self.micro_batch(EVALUATION, micro_batch), self.forward():
                yield
        finally:
            self._is_lenient = False

    def _warn_of_metrics(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "train.randomness: sample: metrics or the model draw random numbers in an evaluation by %s; "
                "results depend on the number of ranks",
                what,
            )

    @contextmanager
    def forward(self) -> Iterator[None]:
        self._is_in_forward = True
        try:
            yield
        finally:
            self._is_in_forward = False

    # -- numbers

    def bits(self, shape: Sequence[int], what: str) -> torch.Tensor:
        """Return random 32-bit integers of a shape, whose first dimension is the batch.

        Raises:
            UserError: The shape cannot be mapped to samples, or a backward pass draws.
        """
        num_samples = len(self._keys)
        is_mapped = bool(shape) and shape[0] == num_samples * self.rows_per_sample
        if self._is_lenient and not is_mapped:
            self._warn_of_metrics(f"{what} of shape {list(shape)}, whose first dimension is not the batch")
            draw = torch.ops.aten.randint.low  # PyTorch's functions are replaced
            numbers: torch.Tensor = draw(-(2**31), 2**31, shape, dtype=torch.int32, device=self._device)
            return numbers
        # A backward pass within the loss, as for a gradient penalty, recomputes activations, too.
        if not self._is_in_forward or torch._C._current_graph_task_id() != -1:  # noqa: SLF001
            raise UserError(
                f"train.randomness: sample: {what} is called in the backward pass, as recomputation of "
                "activations does",
                hint="remove torch.utils.checkpoint, or set train.randomness: rank",
            )
        if not is_mapped:
            raise UserError(
                f"train.randomness: sample: {what} of shape {list(shape)} cannot be mapped to samples: its "
                f"first dimension is not the batch of {num_samples}",
                hint=HINT,
            )
        self._num_calls += 1
        length = math.prod(shape) // num_samples
        offset = (self._num_calls * GOLDEN + 2**63) % 2**64 - 2**63  # in 64 bits
        keys = mixed64(self._keys + offset)
        return mixed32(self._counter(length) ^ keys.to(torch.int32).unsqueeze(1)).reshape(list(shape))

    def _counter(self, length: int) -> torch.Tensor:
        """Return the hashed numbers of the elements of a sample, shape [length]."""
        if length > len(self._hashed):
            self._hashed = mixed32(torch.arange(length, dtype=torch.int32, device=self._device))
        return self._hashed[:length]

    def uniform(self, shape: Sequence[int], dtype: torch.dtype, what: str) -> torch.Tensor:
        """Return numbers that are uniformly distributed in [0, 1), with as many bits as the type represents.

        Raises:
            UserError: The type is an integer or complex type.
        """
        if dtype not in NUM_BITS:
            raise UserError(
                f"train.randomness: sample: {what} of {dtype} is not supported",
                hint="use a floating-point type",
            )
        num_bits = NUM_BITS[dtype]
        high = self.bits(shape, what).to(torch.int64) & 0xFFFFFFFF
        if num_bits > 32:
            low = self.bits(shape, what).to(torch.int64) & 0x1FFFFF
            return (high * 2**21 + low).to(torch.float64) * 2.0**-num_bits
        return ((high >> (32 - num_bits)).to(torch.float32) * 2.0**-num_bits).to(dtype)

    def inside(self, shape: Sequence[int], dtype: torch.dtype, what: str) -> torch.Tensor:
        """Return uniformly distributed numbers between 0 and 1, without both, in at least 32 bits."""
        wide = dtype if dtype == torch.float64 or dtype not in NUM_BITS else torch.float32
        return self.uniform(shape, wide, what) + 2.0 ** -(NUM_BITS.get(wide, 0) + 1)

    def normal(self, shape: Sequence[int], dtype: torch.dtype, what: str) -> torch.Tensor:
        """Return numbers with the standard normal distribution (Box and Muller, 1958)."""
        radius = (-2 * self.inside(shape, dtype, what).log()).sqrt_()
        return (radius * torch.cos(2 * math.pi * self.inside(shape, dtype, what))).to(dtype)

    def is_below(self, probability: float, shape: Sequence[int], what: str) -> torch.Tensor:
        """Return a bool tensor whose elements are true with a probability."""
        if probability >= 1:
            return torch.ones(list(shape), dtype=torch.bool, device=self._device)
        threshold = min(round(probability * 2**32) - 2**31, 2**31 - 1)
        return self.bits(shape, what) < threshold


def mixed32(x: torch.Tensor) -> torch.Tensor:
    """Return the hash ``lowbias32`` of 32-bit integers, which are overwritten if they are not shared."""
    x = (x ^ ((x >> 16) & MASK16)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -2073254261  # 0x846CA68B
    return x ^ ((x >> 16) & MASK16)


def mixed64(x: torch.Tensor) -> torch.Tensor:
    """Return the hash of 64-bit integers with the mixer of SplitMix64 (Steele et al., 2014)."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _default_states() -> tuple[object, ...]:
    """Return the states of all default generators, for a comparison."""
    on_gpu = torch.cuda.default_generators[torch.cuda.current_device()].get_offset() if _has_gpu() else 0
    _, keys, position, *_ = np.random.get_state(legacy=True)
    own = torch.get_rng_state().numpy().tobytes()
    return own, on_gpu, random.getstate(), np.asarray(keys).tobytes(), position


def _has_gpu() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class _Finder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the names of operations that draw from a default generator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and (kwargs or {}).get("generator") is None:
            self.found.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def current() -> SampleDraws | None:
    """Return the draws of this thread; None: random numbers are not drawn by sample now.

    Raises:
        UserError: A thread of autograd draws, as recomputation of activations does.
    """
    found = _active.get(threading.get_ident())
    if found is None and _active and isinstance(threading.current_thread(), threading._DummyThread):  # noqa: SLF001
        found = next(iter(_active.values()))
    return found


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
