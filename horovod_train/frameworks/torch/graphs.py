"""Parts of a step recorded as CUDA graphs: one launch in place of hundreds, for steps that are short.

    eager steps, until everything is set up
    then, for each kind of work: recorded once, and replayed from then on

A step has two such parts: forward and backward of a micro-batch, and the update. Between them gradients
travel, which Horovod's thread launches itself; they leave when backward is complete, and nothing hides them.

What is recorded is the device's work and not the Python around it: numbers that Python had at that moment
stay. Those that belong to a step as we know it (the shapes and shares of batches, what is trained, the
settings of the optimizer) are looked at in each step, and a change is recorded anew. The learning rate, the
loss scale, dropout and what is clipped live on the device. What else a task's Python decides from step to
step does not happen any more: this is why graphs have to be asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

log = logging.getLogger(__name__)

WARM_UP_STEPS = 3
"""Steps in which libraries and optimizers set up what they need, which cannot be recorded."""

MEASURED_STEPS = 10
MAX_GRAPHS = 8
"""Kinds of work that are kept; others are done as they come."""


class Recorder(Protocol):
    """Records work of the device."""

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Return what does the work each time it is called, and what the work returned.

        The work is not done by recording it. The tensors that it returned are written by each call.

        Raises:
            RuntimeError: It cannot be recorded.
        """
        ...

    def synchronize(self) -> None:
        """Return when all work is done."""
        ...


class CudaRecorder:
    """CUDA's graphs. This thread's work goes to a stream of its own: the default one cannot be recorded."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(self._stream)
        self._pool: Any = None

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Return what replays the work, and what it returned."""
        graph = torch.cuda.CUDAGraph()
        # Horovod's thread may use CUDA meanwhile: that is not of this graph.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = work()
        self._pool = graph.pool()
        return graph.replay, result

    def synchronize(self) -> None:
        """Return when all work is done."""
        torch.cuda.synchronize()


@dataclass
class _Recorded:
    replay: Callable[[], None]
    inputs: list[torch.Tensor]
    result: Any


class StepGraphs:
    """Replays what was recorded of earlier steps.

    Args:
        recorder: Records work.
        optimizer: Its rates are put on the device before each replay.
        fingerprint: Returns what a graph depends on besides its inputs.
        forget: Called when recording has failed in the middle of something.
        sum_over_ranks: Sums times over ranks; None: nothing is measured, graphs are used.
    """

    def __init__(
        self,
        recorder: Recorder,
        optimizer: torch.optim.Optimizer,
        fingerprint: Callable[[], Hashable],
        forget: Callable[[], None],
        sum_over_ranks: Callable[[Sequence[float]], list[float]] | None = None,
    ) -> None:
        self._recorder = recorder
        self._optimizer = optimizer
        self._fingerprint = fingerprint
        self._forget = forget
        self._sum_over_ranks = sum_over_ranks
        self._graphs: dict[Hashable, _Recorded | None] = {}
        self._made_with: Hashable = None
        self._num_steps = 0
        self._is_off = self._has_changed = False
        self._window_s: list[float] = []
        self._rates: list[torch.Tensor] = []

    @property
    def _is_warm(self) -> bool:
        """Whether work may be recorded, or has been, in this step."""
        num_eager = WARM_UP_STEPS + (MEASURED_STEPS if self._sum_over_ranks is not None else 0)
        return not self._is_off and self._num_steps > num_eager and not self._has_changed

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients stay where graphs write them: they are cleared by zeros, and never let go."""
        return self._is_warm

    def begin(self) -> None:
        """A step begins."""
        if self._is_off:
            return
        self._num_steps += 1
        if self._sum_over_ranks is not None:
            self._measure()
        now = self._fingerprint()
        # Then this step is made without graphs: gradients come to lie where they will.
        self._has_changed = now != self._made_with
        if self._has_changed:
            self._graphs.clear()
            self._made_with = now

    def forget(self) -> None:
        """Record all anew: the optimizer's state, say, has come to lie elsewhere."""
        self._made_with = None

    def _measure(self) -> None:
        """Time eager steps, then recorded ones; keep what is faster, on all ranks alike."""
        eager, graphed = WARM_UP_STEPS + 1, WARM_UP_STEPS + MEASURED_STEPS + 4  # some to record in
        if self._num_steps in {eager, eager + MEASURED_STEPS, graphed, graphed + MEASURED_STEPS}:
            self._recorder.synchronize()
            self._window_s.append(perf_counter())
        if self._num_steps == graphed + MEASURED_STEPS:
            assert self._sum_over_ranks is not None
            begun, ended, begun_again, ended_again = self._window_s
            # Each rank measures a little different, and all have to do the same.
            eager_s, graphed_s, num_ranks = self._sum_over_ranks(
                [ended - begun, ended_again - begun_again, 1.0]
            )
            self._sum_over_ranks = None
            log.warning(
                "train.cuda_graph: auto: %.2f ms a step without graphs, %.2f ms with: steps go on %s",
                1e3 * eager_s / num_ranks / MEASURED_STEPS,
                1e3 * graphed_s / num_ranks / MEASURED_STEPS,
                "with them" if graphed_s < eager_s else "without",
            )
            if graphed_s >= eager_s:
                self._turn_off()

    def run(self, kind: Hashable, inputs: Any, work: Callable[[Any], Any]) -> Any:
        """Do some work on the device by a graph; return what it returned when it was recorded.

        Args:
            kind: Which work it is; what of it is not a tensor.
            inputs: Tensors, in any nest of lists, tuples and mappings.
            work: Called with the inputs once, to record it.

        Returns:
            None where it was not done: it has to be done as without graphs.
        """
        if not self._is_warm:
            return None
        leaves, structure = pytree.tree_flatten(inputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        rest = tuple(repr(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))
        layout = tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)
        key = (kind, structure, rest, layout)
        if key not in self._graphs:
            if len(self._graphs) >= MAX_GRAPHS:
                return None
            self._graphs[key] = self._recorded(leaves, structure, work)
        found = self._graphs[key]
        if found is None:
            return None
        for static, tensor in zip(found.inputs, tensors, strict=True):
            static.copy_(tensor, non_blocking=True)
        self._set_rates()
        found.replay()
        return found.result

    def _recorded(self, leaves: list[Any], structure: Any, work: Callable[[Any], Any]) -> _Recorded | None:
        static = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        try:
            with self._recordable_optimizer():
                replay, result = self._recorder.record(lambda: work(pytree.tree_unflatten(static, structure)))
        except Exception as error:  # noqa: BLE001  (whatever it is, the step can be made without)
            log.warning(
                "train.cuda_graph: a step cannot be recorded (%s: %s): steps are made without",
                type(error).__name__,
                str(error).partition("\n")[0],
            )
            self._turn_off()
            self._forget()
            return None
        return _Recorded(replay, [leaf for leaf in static if isinstance(leaf, torch.Tensor)], result)

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

    def _turn_off(self) -> None:
        self._is_off = True
        self._graphs.clear()
