"""Parts of a step recorded as CUDA graphs: one launch in place of hundreds, for steps that are short.

    eager steps, until everything is set up
    then each kind of work is done once as usual, recorded when it comes again, and replayed from then on

A step has two such parts: forward and backward of a micro-batch, and the update. Between them gradients
travel, which Horovod's thread launches itself; they leave when backward is complete, and nothing hides them.

What is recorded is the device's work and not the Python around it: numbers that Python had at that moment
stay. Those that belong to a step as we know it (the shapes and shares of batches, what is trained, the
settings of the optimizer) are compared in each step; a change causes a new capture. The learning rate, the
loss scale, dropout and what is clipped live on the device. What else a task's Python decides from step to
step does not happen any more: this is why graphs have to be asked for.

A graph writes gradients to where they were when it was recorded. Each parameter has memory that is kept for
them; it becomes ``parameter.grad`` in steps in which some work gives it a gradient, and in no others.
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
"""Steps in which libraries and optimizers set up what they need, which cannot be recorded."""

MEASURED_STEPS = 10
MAX_GRAPHS = 8
"""Kinds of work that are recorded; others are done as they come."""

MAX_KINDS = 64
"""Kinds of work that are looked out for, to see them again."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""What tells batches apart by its value."""


class Recorder(Protocol):
    """Records work of the device."""

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Return what does the work each time it is called, and what the work returned.

        The work is not done by recording it. The tensors that it returned are written by each call.

        Raises:
            RuntimeError: It cannot be recorded.
        """
        ...

    def discard(self) -> None:
        """Nothing that was recorded so far is replayed any more."""
        ...


class CudaRecorder:
    """CUDA's graphs. This thread's work goes to its own stream: the default one cannot be recorded.

    It has to be made before the model: what belongs to backward stays on the stream on which it began.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(self._stream)
        self._pool: Any = None

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Return what replays the work, and what it returned."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with ExitStack() as on_error:
            on_error.callback(self._abandon)
            # Horovod's thread may use CUDA meanwhile: that is not of this graph.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                result = work()
            on_error.pop_all()
        return graph.replay, result

    def _abandon(self) -> None:
        """Give back the memory of a recording that has failed: PyTorch would keep it, and free no other."""
        device = torch.cuda.current_device()
        with suppress(AttributeError, RuntimeError):  # calls that PyTorch has for itself
            torch._C._cuda_endAllocateToPool(device, self._pool)  # noqa: SLF001
            torch._C._cuda_releasePool(device, self._pool)  # noqa: SLF001
        self._pool = None
        torch.cuda.empty_cache()

    def discard(self) -> None:
        """Nothing is replayed any more: its memory has no owner, and must not be added to."""
        self._pool = None


@dataclass
class _Recorded:
    replay: Callable[[], None]
    inputs: list[torch.Tensor]
    result: Any


@dataclass
class _Kind:
    """Some work that comes again.

    Attributes:
        trained: Parameters that get a gradient by it.
        recorded: Its graph, when it has come twice.
        is_refused: It cannot be recorded.
    """

    trained: Sequence[torch.Tensor]
    recorded: _Recorded | None = None
    is_refused: bool = False


@dataclass
class _Race:
    """How long steps take without graphs and with them.

    Attributes:
        sum_over_ranks: Sums numbers over ranks.
        eager_s, graphed_s: Seconds from one step's begin to the next one's.
        begun_s: When the last step began.
        is_plain: Nothing was recorded in it.
    """

    sum_over_ranks: Callable[[Sequence[float]], list[float]]
    eager_s: list[float] = field(default_factory=list)
    graphed_s: list[float] = field(default_factory=list)
    begun_s: float = 0.0
    is_plain: bool = True

    first_eager = WARM_UP_STEPS + 1
    last_eager = WARM_UP_STEPS + MEASURED_STEPS
    first_graphed = last_eager + 4  # some to record in
    last_graphed = first_graphed + MEASURED_STEPS

    def begin(self, number: int) -> bool | None:
        """A step begins, the first is 1; after the last, return whether those with graphs were faster."""
        now_s = perf_counter()
        taken_s, before = now_s - self.begun_s, number - 1
        if self.first_eager <= before <= self.last_eager:
            self.eager_s.append(taken_s)
        if self.first_graphed <= before <= self.last_graphed and self.is_plain:
            self.graphed_s.append(taken_s)
        self.begun_s, self.is_plain = now_s, True
        return self._decide() if before == self.last_graphed else None

    def _decide(self) -> bool:
        """Compare medians: an evaluation, or a checkpoint, may lie between two steps."""
        mine = [median(seconds) if seconds else math.inf for seconds in (self.eager_s, self.graphed_s)]
        # Each rank measures a little different, and all have to do the same.
        eager_s, graphed_s, num_ranks = self.sum_over_ranks([*mine, 1.0])
        is_faster = graphed_s < eager_s
        with_them = f"{1e3 * graphed_s / num_ranks:.2f} ms" if graphed_s < math.inf else "not possible"
        log.warning(
            "train.cuda_graph: auto: %.2f ms a step without graphs, %s with: steps go on %s",
            1e3 * eager_s / num_ranks,
            with_them,
            "with them" if is_faster else "without",
        )
        return is_faster


class StepGraphs:
    """Replays what was recorded of earlier steps.

    Args:
        recorder: Records work.
        optimizer: Its rates are put on the device before each replay.
        parameters: Returns those that may get gradients.
        fingerprint: Returns what a graph depends on besides its inputs.
        forget: Called when recording has failed in the middle of something.
        sum_over_ranks: Sums times over ranks; None: nothing is measured, graphs are used.
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
        self._race = None if sum_over_ranks is None else _Race(sum_over_ranks)
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
        """Whether work may be recorded, or has been, in this step."""
        return not self._is_off and self._num_steps > self._num_eager and not self._has_changed

    def begin(self, step: object = None) -> None:
        """Begin a step; no parameter has a gradient."""
        self._num_steps += 1
        # On all ranks alike, also where nothing could be recorded: they compare.
        if self._race is not None and (is_faster := self._race.begin(self._num_steps)) is not None:
            self._race = None
            if not is_faster:
                self._disable()
        if self._is_off:
            if self._race is not None:
                self._race.is_plain = False
            return
        now = self._fingerprint()
        # Then this step runs eagerly, with gradients at any address.
        self._has_changed = now != self._made_with
        if self._has_changed:
            self._drop()
            self._made_with = now

    def discard(self) -> None:
        """Discard all graphs: the optimizer's state, for example, has other addresses."""
        self._made_with = None

    def run(self, kind: Hashable, inputs: Any, work: Callable[[Any], Any]) -> Any:
        """Do some work on the device, by a graph if there is one; return what it returned.

        Args:
            kind: Which work it is; what of it is not a tensor.
            inputs: Tensors, in any nest of lists, tuples and mappings.
            work: Called with the inputs, or with static copies of them that a graph reads.

        Returns:
            None where it was not done: it has to be done as without graphs.
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
        """Return a key that is equal for work of one kind; None: it cannot be determined."""
        parts: list[Hashable] = [kind, structure]
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                parts.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
            elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
                parts.append((leaf.shape, leaf.dtype, leaf.tobytes()))
            elif isinstance(leaf, PLAIN):
                parts.append((type(leaf), leaf))
            else:
                self._report_once(f"batches hold a {type(leaf).__name__}: such are computed without graphs")
                return None
        return tuple(parts)

    def _seen_first(self, key: Hashable, work: Callable[[Any], Any], inputs: Any) -> Any:
        """Do work as without graphs, and note which parameters get a gradient by it."""
        if self._race is not None:
            self._race.is_plain = False
        if len(self._kinds) >= MAX_KINDS:
            self._report_once(
                f"steps come in more than {MAX_KINDS} kinds, by shapes or by what is not a tensor: others "
                "are made without graphs"
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
        """Record work that has come twice; return whether that was done."""
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
        if recorded is None:  # whatever the error is, the step can be made without a graph
            kind.is_refused = True
            self._report_once(
                f"a step cannot be recorded ({type(error).__name__}: {str(error).partition(chr(10))[0]}): "
                "such are made without"
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
        """Let the optimizer read its rates from the device, and know that it is recorded."""
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
    """Return a learning rate as a graph reads it, in 32 bits: steps that are made without take the same."""
    return float(np.float32(rate))
