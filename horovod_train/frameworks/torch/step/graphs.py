"""CUDA graphs of parts of a step: one launch instead of hundreds, for short steps.

    warm-up steps              eager
    then each kind of work     eager the first time, captured the second time, and then replayed

A step has two such parts: forward and backward pass of a micro-batch, and the update. Horovod's own thread
sums the gradients between them, after the backward pass is complete: communication does not overlap it.

A graph contains the device's work, but not the Python code around it: Python numbers retain their values at
the capture. The numbers of a step that are known (shapes and shares of batches, trained parameters, settings
of the optimizer) are compared in each step, and a change causes a new capture. The learning rate, the loss
scale, dropout and clipping are computed from values on the device. Other decisions of a task's Python code
have no effect in a replay; for this reason, graphs must be enabled in the job.

A graph writes gradients to fixed addresses. Each parameter therefore has permanent gradient memory, which is
``parameter.grad`` only in steps in which some work computes its gradient.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils import _pytree as pytree

from horovod_train.errors import result_of

log = logging.getLogger(__name__)

WARM_UP_STEPS = 3
"""Eager steps in which libraries and optimizers are initialized, which cannot be captured."""

MEASURED_STEPS = 10
MAX_GRAPHS = 8
"""Largest number of captured kinds of work; others run eagerly."""

MAX_KINDS = 64
"""Largest number of kinds of work whose second occurrence is recognized."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types of values, other than tensors and arrays, by which kinds of batches are distinguished."""


class Recorder(Protocol):
    """A component that captures the device's work."""

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Capture work without performing it; return a function that replays it, and its result.

        Each replay overwrites the tensors of the result.

        Raises:
            RuntimeError: The work cannot be captured.
        """
        ...

    def discard(self) -> None:
        """Discard all captures: none of them is replayed again."""
        ...


class CudaRecorder:
    """Recorder of CUDA graphs. This thread then uses its own stream: the default one cannot be captured.

    It must be created before the model, because autograd retains the stream on which work began.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(self._stream)
        self._pool: Any = None

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Capture work in a CUDA graph; return the function that replays it, and its result."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with ExitStack() as on_error:
            on_error.callback(self._abandon)
            # Horovod's thread may use CUDA during the capture; its work is not part of the graph.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                result = work()
            on_error.pop_all()
        return graph.replay, result

    def _abandon(self) -> None:
        """Release the memory of a failed capture: PyTorch would retain it, and would free no other memory."""
        device = torch.cuda.current_device()
        with suppress(AttributeError, RuntimeError):  # private functions of PyTorch
            torch._C._cuda_endAllocateToPool(device, self._pool)  # noqa: SLF001
            torch._C._cuda_releasePool(device, self._pool)  # noqa: SLF001
        self._pool = None
        torch.cuda.empty_cache()

    def discard(self) -> None:
        """Discard all captures, and their memory pool: later graphs must not use a pool without an owner."""
        self._pool = None


@dataclass
class _Recorded:
    replay: Callable[[], None]
    inputs: list[torch.Tensor]
    result: Any


@dataclass
class _Kind:
    """Work that occurs repeatedly; ``trained`` are the parameters that receive a gradient from it."""

    trained: Sequence[torch.Tensor]
    recorded: _Recorded | None = None
    is_refused: bool = False


@dataclass
class _GraphBenchmark:
    """Comparison of step times without and with graphs.

    Times are those between the starts of successive steps. If ``is_plain``, the step contains neither a
    capture nor new work.
    """

    sum_over_ranks: Callable[[Sequence[float]], list[float]]
    eager_s: list[float] = field(default_factory=list)
    graphed_s: list[float] = field(default_factory=list)
    begun_s: float = 0.0
    is_plain: bool = True

    first_eager = WARM_UP_STEPS + 1
    last_eager = WARM_UP_STEPS + MEASURED_STEPS
    first_graphed = last_eager + 4  # some steps for captures
    last_graphed = first_graphed + MEASURED_STEPS

    def begin(self, number: int) -> bool | None:
        """Begin a step (from 1); after the last measured step, return whether graphs are faster."""
        now_s = perf_counter()
        taken_s, before = now_s - self.begun_s, number - 1
        if self.first_eager <= before <= self.last_eager:
            self.eager_s.append(taken_s)
        if self.first_graphed <= before <= self.last_graphed and self.is_plain:
            self.graphed_s.append(taken_s)
        self.begun_s, self.is_plain = now_s, True
        return self._decide() if before == self.last_graphed else None

    def _decide(self) -> bool:
        """Compare medians, because an evaluation or a checkpoint may occur between two steps."""
        mine = [median(seconds) if seconds else math.inf for seconds in (self.eager_s, self.graphed_s)]
        # Measurements differ between ranks, and all ranks must make the same decision.
        eager_s, graphed_s, num_ranks = self.sum_over_ranks([*mine, 1.0])
        is_faster = graphed_s < eager_s
        with_them = f"{1e3 * graphed_s / num_ranks:.2f} ms" if graphed_s < math.inf else "not possible"
        log.warning(
            "train.cuda_graph: auto: %.2f ms a step without graphs, %s with: training continues %s",
            1e3 * eager_s / num_ranks,
            with_them,
            "with graphs" if is_faster else "without graphs",
        )
        return is_faster


class StepGraphs:
    """CUDA graphs of the parts of a step: captures and replays them.

    Args:
        recorder: Captures work.
        optimizer: Its learning rates are copied to the device before each replay.
        parameters: Returns the parameters that may receive gradients.
        fingerprint: Returns the values on which a graph depends in addition to its inputs.
        discard: Called after a failed capture, to reset incomplete state.
        sum_over_ranks: Sums step times over ranks; None: graphs are used without a measurement.
    """

    def __init__(
        self,
        recorder: Recorder,
        optimizer: torch.optim.Optimizer,
        parameters: Callable[[], Sequence[torch.Tensor]],
        fingerprint: Callable[[], Hashable],
        discard: Callable[[], None],
        sum_over_ranks: Callable[[Sequence[float]], list[float]] | None = None,
    ) -> None:
        self._recorder = recorder
        self._optimizer = optimizer
        self._parameters = parameters
        self._fingerprint = fingerprint
        self._discard = discard
        self._race = None if sum_over_ranks is None else _GraphBenchmark(sum_over_ranks)
        self._num_eager = WARM_UP_STEPS if self._race is None else self._race.last_eager
        self._kinds: dict[Hashable, _Kind] = {}
        self._kept: dict[torch.Tensor, torch.Tensor] = {}
        self._made_with: Hashable = None
        self._num_steps = self._num_recorded = 0
        self._is_off = self._has_changed = False
        self._reported: set[str] = set()
        self._rates: list[torch.Tensor] = []

    @property
    def _is_warm(self) -> bool:
        """Whether work may be captured or replayed in this step."""
        return not self._is_off and self._num_steps > self._num_eager and not self._has_changed

    def begin(self, step: object = None) -> None:
        """Begin a step; no parameter may have a gradient."""
        self._num_steps += 1
        # The comparison is collective: all ranks call it, even if they cannot capture work.
        if self._race is not None and (is_faster := self._race.begin(self._num_steps)) is not None:
            self._race = None
            if not is_faster:
                self._disable()
        if self._is_off:
            if self._race is not None:
                self._race.is_plain = False
            return
        now = self._fingerprint()
        # After a change, this step runs eagerly, with gradients at any address.
        self._has_changed = now != self._made_with
        if self._has_changed:
            self._drop()
            self._made_with = now

    def discard(self) -> None:
        """Discard all graphs, for example because the optimizer's state has new addresses."""
        self._made_with = None

    def run(self, kind: Hashable, inputs: Any, work: Callable[[Any], Any]) -> Any:
        """Perform work on the device, by a graph if one exists.

        Args:
            kind: Identifies the work, with all of its arguments that are not in ``inputs``.
            inputs: Tensors, in nested lists, tuples and mappings.
            work: Called with the inputs, or with static copies of them that a graph reads.

        Returns:
            Result of the work; None: it was not performed, and the caller must perform it.
        """
        if not self._is_warm:
            return None
        leaves, structure = pytree.tree_flatten(inputs)
        key = self._key_of(kind, structure, leaves)
        if key is None:
            return None
        found = self._kinds.get(key)
        if found is None:
            return self._seen_first(key, work, inputs)
        self._attach(found.trained)
        if found.is_refused:
            return None
        if found.recorded is None and not self._record(found, leaves, structure, work):
            return None
        assert found.recorded is not None
        tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        for static, tensor in zip(found.recorded.inputs, tensors, strict=True):
            static.copy_(tensor, non_blocking=True)
        self._set_rates()
        found.recorded.replay()
        return found.recorded.result

    # -- kinds of work

    def _key_of(self, kind: Hashable, structure: Any, leaves: Sequence[Any]) -> Hashable:
        """Return a key that identifies a kind of work; None: it cannot be determined."""
        parts: list[Hashable] = [kind, structure]
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                parts.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
            elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
                parts.append((leaf.shape, leaf.dtype, leaf.tobytes()))
            elif isinstance(leaf, PLAIN):
                parts.append((type(leaf), leaf))
            else:
                self._report_once(f"batches contain a {type(leaf).__name__}, and run without CUDA graphs")
                return None
        return tuple(parts)

    def _seen_first(self, key: Hashable, work: Callable[[Any], Any], inputs: Any) -> Any:
        """Perform new work eagerly, and record the parameters that receive a gradient from it."""
        if self._race is not None:
            self._race.is_plain = False
        if len(self._kinds) >= MAX_KINDS:
            self._report_once(
                f"batches have more than {MAX_KINDS} combinations of shapes and of values that are not "
                "tensors: "
                "further ones run without CUDA graphs"
            )
            return None
        trained: dict[torch.Tensor, None] = {}
        removers = [
            parameter.register_post_accumulate_grad_hook(trained.setdefault)  # type: ignore[no-untyped-call]
            for parameter in self._parameters()
            if parameter.requires_grad
        ]
        try:
            result = work(inputs)
        finally:
            for remover in removers:
                remover.remove()
        is_dense = all(p.grad is not None and not p.grad.is_sparse for p in trained)
        if is_dense:
            self._attach(list(trained))
        else:
            self._report_once("gradients are sparse: steps are made without graphs")
        self._kinds[key] = _Kind(list(trained) if is_dense else [], is_refused=not is_dense)
        return result

    def _attach(self, trained: Sequence[torch.Tensor]) -> None:
        """Attach the gradient memory of graphs: zeros, or the gradients accumulated so far."""
        fresh: list[torch.Tensor] = []
        for parameter in trained:
            kept, gradient = self._kept.get(parameter), parameter.grad
            if gradient is kept and kept is not None:
                continue
            if kept is None:
                kept = self._kept[parameter] = torch.zeros_like(parameter if gradient is None else gradient)
            if gradient is None:
                fresh.append(kept)
            else:
                kept.copy_(gradient)
            parameter.grad = kept
        if fresh:
            torch._foreach_zero_(fresh)

    # -- recording

    def _record(self, kind: _Kind, leaves: Sequence[Any], structure: Any, work: Callable[[Any], Any]) -> bool:
        """Capture work that occurs for the second time; return whether this succeeded."""
        if self._race is not None:
            self._race.is_plain = False
        if self._num_recorded >= MAX_GRAPHS:
            self._report_once(f"more than {MAX_GRAPHS} kinds of steps: others are made without graphs")
            kind.is_refused = True
            return False
        static = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        with self._recordable_optimizer():
            recorded, error = result_of(
                lambda: self._recorder.record(lambda: work(pytree.tree_unflatten(static, structure)))
            )
        if recorded is None:  # after any error, the step can be performed without a graph
            kind.is_refused = True
            self._report_once(
                f"a step cannot be captured ({type(error).__name__}: {str(error).partition(chr(10))[0]}): "
                "steps of this kind run without CUDA graphs"
            )
            if self._num_recorded == 0:
                self._disable()
            self._discard()
            return False
        self._num_recorded += 1
        replay, result = recorded
        kind.recorded = _Recorded(replay, [leaf for leaf in static if isinstance(leaf, torch.Tensor)], result)
        return True

    @contextmanager
    def _recordable_optimizer(self) -> Iterator[None]:
        """Make the optimizer read its learning rates from the device, and set ``capturable``."""
        groups = self._optimizer.param_groups
        if len(self._rates) != len(groups):
            device = groups[0]["params"][0].device
            self._rates = [torch.zeros((), device=device) for _ in groups]
        changed = ("lr", "capturable")
        before: list[dict[str, Any]] = [
            {key: group[key] for key in changed if key in group} for group in groups
        ]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for group, old in zip(groups, before, strict=True):
                group.update(old)

    def _set_rates(self) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            rate.fill_(group["lr"])

    def _disable(self) -> None:
        self._is_off = True
        self._drop()

    def _drop(self) -> None:
        self._kinds.clear()
        self._kept.clear()
        self._num_recorded = 0
        self._recorder.discard()

    def _report_once(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            log.warning("train.cuda_graph: %s", text)


def rate_of_graphs(rate: float) -> float:
    """Return a learning rate rounded to 32 bits, as in graphs, so that eager steps use the same rate."""
    return float(np.float32(rate))
