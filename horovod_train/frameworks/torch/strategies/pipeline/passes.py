"""Forward and backward passes of one rank of a pipeline through its stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from horovod_train.errors import UserError, translated
from horovod_train.frameworks.torch.strategies.pipeline.messages import Messages, Route, Tensors
from horovod_train.frameworks.torch.strategies.pipeline.orders import Pass
from horovod_train.frameworks.torch.strategies.pipeline.stages import Stage
from horovod_train.frameworks.torch.strategies.pipeline.stand_ins import seed_of_stage, seeded

AHEAD = 3
"""Number of passes by which a receive is posted before it is needed."""


@dataclass(frozen=True)
class Place:
    """Position of a rank in its pipeline.

    Attributes:
        rank: Rank within the pipeline.
        ranks: Ranks of the pipeline, numbered among all ranks.
        groups: Process groups of the pipeline for ``activations`` and for ``gradients``.
        stages: Stages of this rank; ``stages[k]`` is stage ``k x number of ranks + rank`` of the model.
    """

    rank: int
    ranks: Sequence[int]
    groups: Mapping[str, Any]
    stages: Sequence[Stage]

    def is_first(self, chunk: int) -> bool:
        """Return whether ``stages[chunk]`` is the model's first stage."""
        return self.rank == 0 and chunk == 0

    def is_last(self, chunk: int) -> bool:
        """Return whether ``stages[chunk]`` is the model's last stage."""
        return self.rank == len(self.ranks) - 1 and chunk == len(self.stages) - 1

    def route(self, kind: str, chunk: int, micro_batch: int, *, to_next: bool) -> Route:
        """Return the route between ``stages[chunk]`` and the model's next or previous stage."""
        stage = chunk * len(self.ranks) + self.rank
        edge = stage if to_next else stage - 1
        peer = self.ranks[(self.rank + (1 if to_next else -1)) % len(self.ranks)]
        number = micro_batch * len(self.stages) * len(self.ranks) + edge
        name = f"{kind} of micro-batch {micro_batch} between stages {edge} and {edge + 1}"
        return Route(peer, self.groups[kind], number, name)


class PipelinePasses:
    """Runner of this rank's passes.

    Args:
        place: Position of this rank in the pipeline.
        messages: Messages to and from other ranks.
        inputs: Returns the model's inputs for a micro-batch, by name; called on the rank of the first stage.
        result: Returns the result for a micro-batch and the model's output, such as the loss; called on
            the rank of the last stage.
        autocast: Returns the context of a forward pass.
        lap: Ends a phase of the step.
        seed: Seed of the first micro-batch; each further micro-batch increases it by 1.
        context: Returns the context of a micro-batch's passes.
    """

    def __init__(
        self,
        place: Place,
        messages: Messages,
        *,
        inputs: Callable[[int], Mapping[str, Any]],
        result: Callable[[int, Any], Any],
        autocast: Callable[[], AbstractContextManager[object]],
        lap: Callable[[str], None],
        seed: int,
        context: Callable[[int], AbstractContextManager[object]],
    ) -> None:
        self._place = place
        self._seed = seed
        self._context = context
        self._messages = messages
        self._inputs = inputs
        self._result = result
        self._autocast = autocast
        self._lap = lap
        self._kept: dict[tuple[int, int], tuple[Tensors, Tensors]] = {}

    def make(self, order: Sequence[Pass], before_last: Callable[[], None]) -> None:
        """Run the passes of a step in the given order; call ``before_last`` before the last pass."""
        for at, each in enumerate(order):
            for coming in order[at : at + 1 + AHEAD]:
                if self._has_to_wait(coming):
                    self._messages.expect(self._receiving(coming))
            if at == len(order) - 1:
                before_last()
            with self._context(each.micro_batch):
                if each.kind == "forward":
                    self.forward(each)
                else:
                    self._backward(each)
        self._messages.end()

    def forward(self, each: Pass) -> Any:
        """Run a forward pass; return the result for the model's output if this is the last stage."""
        place, chunk = self._place, each.chunk
        received = self._received(each)
        with self._autocast():
            inputs = self._inputs(each.micro_batch) if place.is_first(chunk) else {}
            # Copies, because received tensors are leaves of the autograd graph: no in-place changes.
            given = [t.clone() if t is not None and t.requires_grad else t for t in received]
            with self._drawing(each):
                found = place.stages[chunk].call(*given, **inputs)
            if place.is_last(chunk):
                result = self._result(each.micro_batch, found)
        if place.is_last(chunk):
            self._keep(each, received, [result] if isinstance(result, torch.Tensor) else [])
            self._lap("forward")
            return result
        results: Tensors = [torch.tensor(value) if isinstance(value, int) else value for value in found]
        _check_can_cross(results, place.route("activations", chunk, each.micro_batch, to_next=True))
        self._keep(each, received, results)
        self._lap("forward")
        self._messages.send(results, place.route("activations", chunk, each.micro_batch, to_next=True))
        return None

    def _drawing(self, each: Pass) -> AbstractContextManager[object]:
        """Return the context that seeds the random generators for a stage."""
        if not self._place.stages[each.chunk].is_random:
            return nullcontext()
        stage = each.chunk * len(self._place.ranks) + self._place.rank
        return seeded(seed_of_stage(self._seed + each.micro_batch, stage))

    def _keep(self, each: Pass, received: Tensors, results: Tensors) -> None:
        if torch.is_grad_enabled():
            self._kept[each.chunk, each.micro_batch] = (received, results)

    def _backward(self, each: Pass) -> None:
        received, results = self._kept.pop((each.chunk, each.micro_batch))
        gradients: Sequence[torch.Tensor | None] = [None]
        if not self._place.is_last(each.chunk):
            gradients = self._received(each)
        pairs = [
            (result, gradient)
            for result, gradient in zip(results, gradients, strict=True)
            if result is not None
            and result.requires_grad
            and (gradient is not None or self._place.is_last(each.chunk))
        ]
        if pairs:
            with translated(_written_in_between):
                torch.autograd.backward([one for one, _ in pairs], [other for _, other in pairs])
        self._lap("backward")
        if not self._place.is_first(each.chunk):
            route = self._place.route("gradients", each.chunk, each.micro_batch, to_next=False)
            self._messages.send([_gradient_of(t) for t in received], route)

    def _has_to_wait(self, each: Pass) -> bool:
        ends = self._place.is_first if each.kind == "forward" else self._place.is_last
        return not ends(each.chunk)

    def _receiving(self, each: Pass) -> Route:
        kind = "activations" if each.kind == "forward" else "gradients"
        return self._place.route(kind, each.chunk, each.micro_batch, to_next=each.kind == "backward")

    def _received(self, each: Pass) -> Tensors:
        if not self._has_to_wait(each):
            return []
        received = self._messages.receive(self._receiving(each))
        self._lap("allreduce_wait")
        return received


def _gradient_of(received: torch.Tensor | None) -> torch.Tensor | None:
    """Return the gradient of a received tensor, zeros if it was not used; None if it requires none."""
    if received is None or not received.requires_grad:
        return None
    return torch.zeros_like(received) if received.grad is None else received.grad


def _check_can_cross(results: Sequence[object], route: Route) -> None:
    for result in results:
        if result is not None and not isinstance(result, torch.Tensor):
            raise UserError(
                f"strategy pipeline: a stage returns a {type(result).__name__} ({route.name}); only "
                "tensors can be sent to the next stage",
                hint="let parts of pipeline_parts(model) return a tensor or a tuple of tensors",
            )


def _written_in_between(error: Exception) -> UserError | None:
    """Return the refusal of weights that are written between a forward and its backward pass."""
    if "modified by an inplace operation" not in str(error):
        return None
    return UserError(
        "strategy pipeline: weights are changed in place while gradients of another micro-batch are "
        f"computed: {error}",
        hint="use strategy: allreduce or zero; the usual place for it is the task's after_update(model)",
    )
