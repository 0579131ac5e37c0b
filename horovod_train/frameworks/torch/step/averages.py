"""Averages of buffers and weights, and the running statistics of a model.

AveragedBuffers     buffers that depend on a rank's samples, averaged over ranks after each step
AveragedWeights     averaged weights, which are evaluated and exported instead of the trained weights
RunningStatistics   statistics of normalization layers, which a forward pass changes even if the step is
                    skipped
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from horovod_train.checkpoint.arrays import ArrayBlob, pack_tree
from horovod_train.collectives.base import Communicator
from horovod_train.config.arguments import batch_size_of_lr
from horovod_train.config.optimization import Ema
from horovod_train.config.schema import Job
from horovod_train.data.shard import PlannedStep
from horovod_train.errors import UserError
from horovod_train.frameworks.torch.comm.collectives import Exchange, wide_type
from horovod_train.frameworks.torch.comm.sync_batch_norm import SyncBatchNormMixin
from horovod_train.frameworks.torch.state.local import Cache, LocalTensor, load_model
from horovod_train.frameworks.torch.strategies.base import Strategy

FIELD = "train.average_buffers"


class AveragedBuffers:
    """Average, over the data-parallel ranks, of the buffers whose names match a pattern.

    A moving average of batch means (``b <- a * b + (1 - a) * mean``) then equals that of a single process
    with the joint batch.

    Raises:
        UserError: A pattern matches no buffer, or a buffer that has no mean (integers, for example).
    """

    def __init__(self, model: torch.nn.Module, patterns: Iterable[str], ranks: Communicator) -> None:
        self._modules = dict(model.named_modules())
        self._names = _fitting(model, patterns)
        self._exchange = Exchange(ranks)
        self._own_share = 0.0

    def begin(self, step: PlannedStep) -> None:
        """Begin a step: this rank's weight in the mean is its fraction of the samples."""
        self._own_share = step.share.local_share

    @torch.no_grad()
    def after_update(self, *, is_used: torch.Tensor | bool) -> None:
        """Set buffers to their mean over ranks, also after a skipped step."""
        if not self._names:
            return
        buffers = [self._buffer(name) for name in self._names]  # a forward pass may have replaced them
        sums = self._exchange.sum([buffer * self._own_share for buffer in buffers], "buffers")
        for buffer, total in zip(buffers, sums, strict=True):
            buffer.copy_(total)

    def _buffer(self, name: str) -> torch.Tensor:
        module, _, key = name.rpartition(".")
        found: torch.Tensor = getattr(self._modules[module], key)
        return found


def _fitting(model: torch.nn.Module, patterns: Iterable[str]) -> list[str]:
    """Return the names of the buffers that match a pattern, except meta tensors."""
    named = {name: buffer for name, buffer in model.named_buffers() if buffer is not None}
    found: dict[str, torch.Tensor] = {}
    for pattern in patterns:
        fitting = {name: buffer for name, buffer in named.items() if fnmatchcase(name, pattern)}
        if not fitting:
            names = list(named)
            raise UserError(
                f"{FIELD}: {pattern!r} matches no buffer",
                hint=f"buffers are {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"
                if names
                else "there is none",
            )
        for name, buffer in fitting.items():
            if not (buffer.is_floating_point() or buffer.is_complex()):
                raise UserError(
                    f"{FIELD}: {name!r} is of {str(buffer.dtype).removeprefix('torch.')}, which has no mean",
                    hint="name buffers of floating point numbers",
                )
        found |= fitting
    return [name for name, buffer in found.items() if not buffer.is_meta]


KEY = "averaged"


@dataclass(frozen=True)
class Averaging:
    """How weights are averaged.

    Attributes:
        ema: The job's section.
        samples: Number of samples of a step, over all ranks, for which ``ema.decay`` is right; a step of k
            times as many has decay^k (Busbridge et al., arXiv:2307.13813). None: all steps have it.
    """

    ema: Ema
    samples: float | None = None

    def decay_of(self, num_steps: int, num_samples: int) -> float:
        """Return the decay of an update, given steps and samples since the one before.

        >>> round(Averaging(Ema(decay=0.9), samples=8).decay_of(1, 16), 6)
        0.81
        """
        if self.samples is None:
            return self.ema.decay
        return float(self.ema.decay ** (num_samples / (num_steps * self.samples)))


def averaging_of(job: Job, num_data_ranks: int) -> Averaging | None:
    """Return how a job averages weights; None: it does not."""
    if job.ema is None:
        return None
    if not job.ema.scale_decay or job.lr.scaling == "none":
        return Averaging(job.ema)
    ranks = job.global_batch_size(num_data_ranks) / batch_size_of_lr(job, num_data_ranks)
    return Averaging(job.ema, job.lr.reference_batch_size * ranks)


class AveragedWeights:
    """Averaged weights of one replica; ``averaging`` is None if the job has no moving average.

    There are two kinds: an exponential moving average of the weights (``ema`` in the job), and the
    evaluation weights of an optimizer with two modes (``ScheduleFreeAdamW``: ``optimizer.eval()`` and
    ``train()``). A rank stores the averages of its local shard. A checkpoint contains averaged and trained
    weights. The trained weights are restored exactly after an evaluation.

    Raises:
        UserError: Both kinds are requested, or the strategy cannot switch the optimizer's mode.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        averaging: Averaging | None,
    ) -> None:
        self._model, self._optimizer, self._strategy = model, optimizer, strategy
        self._averaging = averaging
        self._samples_of_step = 0
        self._num_steps = self._num_samples = 0  # since the last update
        self._has_modes = callable(getattr(optimizer, "eval", None)) and callable(
            getattr(optimizer, "train", None)
        )
        name = type(optimizer).__name__
        if self._has_modes and averaging is not None:
            raise UserError(
                f"ema: the optimizer {name} averages weights by itself",
                hint="leave ema out, or use another optimizer",
            )
        if self._has_modes and strategy.capabilities.owns_update:
            raise UserError(
                f"the optimizer {name} has two modes, which this strategy cannot switch",
                hint="use another optimizer, or strategy: zero, fsdp or allreduce",
            )
        self._averages: dict[str, torch.Tensor] = {}
        self._num_updates = 0
        if self._has_modes:
            self._optimizer.train()  # type: ignore[attr-defined]

    @property
    def exist(self) -> bool:
        """Whether the job or the optimizer averages weights."""
        return self._averaging is not None or self._has_modes

    @property
    def _are_evaluated(self) -> bool:
        return self._has_modes or (self._averaging is not None and self._averaging.ema.evaluate)

    def _trained(self) -> dict[str, LocalTensor]:
        names = {
            name
            for name, parameter in self._model.named_parameters(remove_duplicate=False)
            if parameter.is_floating_point() or parameter.is_complex()
        }
        return {name: local for name, local in self._strategy.local_tensors().items() if name in names}

    def begin(self, step: PlannedStep) -> None:
        """Begin a step, and count its samples over all ranks."""
        self._samples_of_step = step.share.num_samples

    @torch.no_grad()
    def after_update(self, *, is_used: torch.Tensor | bool) -> None:
        """Move the average towards the current weights, if the step was used."""
        if self._averaging is None or is_used is False:
            return
        ema = self._averaging.ema
        self._num_steps += 1
        self._num_samples += self._samples_of_step
        trained = self._trained()
        if not self._averages:
            self._averages = {name: _wide(local.tensor).clone() for name, local in trained.items()}
            # The weights before the first step are not available: the average starts with those after it.
            self._num_updates += 1
            self._num_steps = self._num_samples = 0
            return
        self._num_updates += 1
        for name in trained.keys() - self._averages.keys():  # parameters that the task has added
            self._averages[name] = _wide(trained[name].tensor).clone()
        if self._num_updates % ema.every_steps:
            return
        decay = self._averaging.decay_of(self._num_steps, self._num_samples)
        self._num_steps = self._num_samples = 0
        if ema.warmup:
            decay = min(decay, (1 + self._num_updates) / (10 + self._num_updates))
        averages = [self._averages[name] for name in trained]
        weights = [
            local.tensor.detach().to(average.dtype)
            for local, average in zip(trained.values(), averages, strict=True)
        ]
        if is_used is True:
            torch._foreach_lerp_(averages, weights, 1 - decay)
            return
        for average, weight in zip(averages, weights, strict=True):
            average.copy_(torch.where(is_used, torch.lerp(average, weight, 1 - decay), average))

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Replace the weights by the averaged weights in the block, unless ``ema.evaluate`` is false."""
        if not (self._are_evaluated and (self._has_modes or self._averages)):
            yield
            return
        trained = self._trained()
        before = {name: local.tensor.detach().clone() for name, local in trained.items()}
        self._show(trained)
        try:
            yield
        finally:
            if self._has_modes:
                self._optimizer.train()  # type: ignore[attr-defined]
            with torch.no_grad():
                for name, local in self._trained().items():
                    local.tensor.copy_(before[name])

    @torch.no_grad()
    def _show(self, trained: Mapping[str, LocalTensor]) -> None:
        if self._has_modes:
            self._optimizer.eval()  # type: ignore[attr-defined]
            self._strategy.gather_weights()
            return
        for name, local in trained.items():
            local.tensor.copy_(self._averages[name])

    def tensors(self) -> dict[str, LocalTensor]:
        """Return the averaged weights of this rank's local shard, by parameter name."""
        if self._has_modes:
            with self.shown():
                return {
                    name: replace(local, tensor=local.tensor.clone())
                    for name, local in self._trained().items()
                }
        if not self._averages:
            return {}
        return {name: replace(local, tensor=self._averages[name]) for name, local in self._trained().items()}

    def packed(self, cache: Cache) -> tuple[dict[str, Any], dict[str, ArrayBlob]]:
        """Return the averaged weights for a checkpoint: a JSON tree, and the arrays to which it refers."""
        if not (tensors := self.tensors()):
            return {}, {}
        numbers = {"number": self._num_updates, "steps": self._num_steps, "samples": self._num_samples}
        tree = {KEY: {**numbers, "is_default": self._are_evaluated, "weights": tensors}}
        plain, arrays = pack_tree(tree, lambda leaf: isinstance(leaf, LocalTensor))
        assert isinstance(plain, dict)
        return plain, {key: local.blob(cache, key) for key, local in arrays.items()}

    def load(self, tree: Any, arrays: Mapping[str, ArrayBlob]) -> None:
        """Load the result of ``packed``; if ``tree`` lacks it, the average starts with the current weights.

        Raises:
            ValueError: The arrays belong to another model.
        """
        self._averages, self._num_updates = {}, 0
        self._num_steps = self._num_samples = 0
        saved = tree.get(KEY) if isinstance(tree, dict) else None
        if self._averaging is None:
            return
        trained = self._trained()
        self._averages = {name: _wide(local.tensor).clone() for name, local in trained.items()}
        if saved is not None:
            self._num_updates = int(saved["number"])
            self._num_steps, self._num_samples = saved.get("steps", 0), saved.get("samples", 0)
            own = {
                f"{KEY}.weights.{name}": replace(h, tensor=self._averages[name])
                for name, h in trained.items()
            }
            load_model(own, arrays)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in at least 32 bits, in which small changes are not lost to rounding."""
    return tensor.detach().to(wide_type(tensor.dtype))


class RunningStatistics:
    """Running means and variances of a model's normalization layers.

    Attributes:
        buffers: Those of the layers that normalize by the samples of their rank only.
        counts: Number of batches in the statistics of these layers.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        layers = [module for module in model.modules() if isinstance(module, _NormBase)]
        self._of_all_ranks = _present(
            b for m in layers if isinstance(m, SyncBatchNormMixin) for b in (m.running_mean, m.running_var)
        )
        self._counts_of_all = _present(
            m.num_batches_tracked for m in layers if isinstance(m, SyncBatchNormMixin)
        )
        layers = [module for module in layers if not isinstance(module, SyncBatchNormMixin)]
        self.buffers = _present(buffer for m in layers for buffer in (m.running_mean, m.running_var))
        self.counts = _present(module.num_batches_tracked for module in layers)
        self._before: list[torch.Tensor] = []
        self._has_copy = False

    @torch.no_grad()
    def begin(self, step: object = None) -> None:
        """Copy the statistics before a step, always to the same memory (CUDA graphs read fixed addresses)."""
        now = [_flat(kind) for kind in self._kinds()]
        if self._before:
            torch._foreach_copy_(self._before, now)
        else:
            self._before = now
        self._has_copy = True

    @torch.no_grad()
    def after_update(self, *, is_used: torch.Tensor | bool) -> None:
        """Restore the statistics that ``begin`` has copied, if the step was skipped."""
        if not self._has_copy or is_used is True:
            return
        for kind, before in zip(self._kinds(), self._before, strict=True):
            flat = torch.where(is_used, _flat(kind), before) if isinstance(is_used, torch.Tensor) else before
            pieces = torch.split(flat, [buffer.numel() for buffer in kind])
            shaped = [piece.view(buffer.shape) for piece, buffer in zip(pieces, kind, strict=True)]
            torch._foreach_copy_(kind, shaped)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore ``buffers`` and ``counts`` after the passes of the block."""
        before = [buffer.clone() for buffer in (*self.buffers, *self.counts)]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, old in zip((*self.buffers, *self.counts), before, strict=True):
                    buffer.copy_(old)

    def _kinds(self) -> list[list[torch.Tensor]]:
        kinds = ([*self.buffers, *self._of_all_ranks], [*self.counts, *self._counts_of_all])
        return [kind for kind in kinds if kind]


def _present(buffers: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    return [buffer for buffer in buffers if buffer is not None]


def _flat(buffers: list[torch.Tensor]) -> torch.Tensor:
    # Different types are promoted to the widest, so that the conversions in both directions are exact.
    return torch.cat([buffer.flatten() for buffer in buffers])
