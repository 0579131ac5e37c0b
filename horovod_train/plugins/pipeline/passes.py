"""Passes of one rank of a pipeline through its stages, and the messages between stages.

Messages         sends activations to the next stage, and gradients to the previous one
order_of         pipeline schedules: the order of a rank's forward and backward passes
bubble           idle time of a schedule
Stage            stage of a pipeline
Pieces           the smaller pieces of a model that form stages
PipelinePasses   runs the forward and backward passes of a rank
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic
from typing import Any, Literal

import torch
import torch.distributed as dist

from horovod_train.collectives.base import Collective, Communicator
from horovod_train.errors import UserError, WorldError, translated
from horovod_train.plugins.pipeline.values import seed_of_stage, seeded

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
HEAD_LENGTH = 128
"""Length of a head (shapes and data types), sufficient for about ten tensors with eight dimensions."""
TENSORS_PER_MESSAGE = 32
"""Number of tags per message; the first one is the tag of the head."""


@dataclass(frozen=True)
class Route:
    """Peer and identity of a message.

    Attributes:
        peer: The other rank, numbered among all ranks.
        group: Process group of the pipeline for this direction, in which messages are ordered.
        number: Number of the message, unique within a step and direction.
        name: Human-readable name.
    """

    peer: int
    group: Any
    number: int
    name: str


@dataclass(frozen=True)
class Kind:
    """Properties of a tensor that the receiver requires."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


Kinds = list[Kind | None]
Tensors = list[torch.Tensor | None]
_PendingReceive = tuple[Tensors, list[Any]]


class Messages:
    """Sender and receiver of one rank's messages; the communicator ``ranks`` records pending waits.

    Messages between stages are activations to the next stage, and gradients to the previous one. A tensor
    is sent asynchronously as soon as it is computed, and its receiver requires its shape. For the first
    micro-batches of a kind, shapes are sent before the tensors, and both ranks store them. Later, only
    tensors are sent, and receives are posted some passes before they are needed.
    """

    def __init__(self, ranks: Communicator, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device
        self._known: dict[Hashable, dict[Route, Kinds]] = defaultdict(dict)
        self._signature: Hashable = None
        self._sent: list[tuple[Route, Any, torch.Tensor]] = []
        self._coming: dict[Route, _PendingReceive] = {}

    def begin(self, signature: Hashable) -> None:
        """Begin a step; ``signature`` identifies the kind of its micro-batches."""
        self._signature = signature

    def end(self) -> None:
        """Wait until all messages are sent."""
        for route, work, tensor in self._sent:
            self._wait(route, work.wait, tensor)
        self._sent.clear()

    def send(self, tensors: Sequence[torch.Tensor | None], route: Route) -> None:
        """Send tensors asynchronously.

        Raises:
            WorldError: Shapes or data types differ from those of previous micro-batches of this kind.
        """
        known = self._known[self._signature]
        kinds: Kinds = [t if t is None else Kind(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]
        if route not in known:
            self._send(_encode_specs(kinds), route, 0)
            known[route] = kinds
        elif known[route] != kinds:
            raise WorldError(
                f"strategy pipeline: {route.name}: {kinds}, which were {known[route]} for micro-batches of "
                "the same shapes",
                hint="shapes of tensors between stages must depend only on the shapes of the model's inputs",
            )
        for at, tensor in enumerate(tensors, 1):
            if tensor is not None:
                self._send(tensor.detach().contiguous(), route, at)

    def _send(self, tensor: torch.Tensor, route: Route, at: int) -> None:
        work = dist.isend(tensor, route.peer, group=route.group, tag=_tag(route, at))
        self._sent.append((route, work, tensor))

    def expect(self, route: Route) -> None:
        """Post the receives of a message if its shapes are known."""
        kinds = self._known[self._signature].get(route)
        if kinds is not None and route not in self._coming:
            self._coming[route] = self._begin(kinds, route)

    def receive(self, route: Route) -> Tensors:
        """Receive the tensors of a message; blocks until they have arrived."""
        known = self._known[self._signature]
        if route not in known:
            head = torch.empty(HEAD_LENGTH, dtype=torch.int64)
            work: Any = dist.irecv(head, route.peer, group=route.group, tag=_tag(route, 0))
            self._wait(route, work.wait, head)
            known[route] = _kinds_of(head.tolist())
        self.expect(route)
        tensors, works = self._coming.pop(route)
        present = (tensor for tensor in tensors if tensor is not None)
        for work, tensor in zip(works, present, strict=True):
            self._wait(route, work.wait, tensor)
        for received, kind in zip(tensors, known[route], strict=True):
            if received is not None and kind is not None:
                received.requires_grad_(kind.requires_grad)
        return tensors

    def _begin(self, kinds: Sequence[Kind | None], route: Route) -> _PendingReceive:
        tensors: Tensors = [
            None if kind is None else torch.empty(kind.shape, dtype=kind.dtype, device=self._device)
            for kind in kinds
        ]
        works = [
            dist.irecv(tensor, route.peer, group=route.group, tag=_tag(route, at))
            for at, tensor in enumerate(tensors, 1)
            if tensor is not None
        ]
        return tensors, works

    def _wait(self, route: Route, blocking: Callable[[], Any], tensor: torch.Tensor) -> None:
        entry = Collective(f"{route.name} of rank {route.peer}", tensor.nbytes, monotonic())
        self._ranks.wait_in(entry, blocking)


def _tag(route: Route, at: int) -> int:
    return route.number * TENSORS_PER_MESSAGE + at


def _encode_specs(kinds: Sequence[Kind | None]) -> torch.Tensor:
    numbers = [len(kinds)]
    for kind in kinds:
        if kind is None:
            numbers.append(-1)
        elif kind.dtype in DTYPES:
            numbers += [DTYPES.index(kind.dtype), int(kind.requires_grad), len(kind.shape), *kind.shape]
        else:
            raise WorldError(f"strategy pipeline: a tensor of {kind.dtype} cannot cross between stages")
    if len(numbers) > HEAD_LENGTH or len(kinds) >= TENSORS_PER_MESSAGE:
        raise WorldError(
            f"strategy pipeline: {len(kinds)} tensors cross between two stages, which is too many",
            hint="give the task pipeline_parts(model), with parts between which few tensors cross",
        )
    return torch.tensor(numbers + [0] * (HEAD_LENGTH - len(numbers)), dtype=torch.int64)


def _kinds_of(numbers: Sequence[int]) -> Kinds:
    kinds: Kinds = []
    at = 1
    for _ in range(numbers[0]):
        if numbers[at] < 0:
            kinds.append(None)
            at += 1
        else:
            dtype, requires_grad, num_dims = numbers[at : at + 3]
            shape = tuple(numbers[at + 3 : at + 3 + num_dims])
            kinds.append(Kind(shape, DTYPES[dtype], bool(requires_grad)))
            at += 3 + num_dims
    return kinds


@dataclass(frozen=True, slots=True)
class Pass:
    """Forward or backward pass of a micro-batch through the stage ``chunk`` of this rank."""

    kind: Literal["forward", "backward"]
    chunk: int
    micro_batch: int


def order_of(
    schedule: str, *, rank: int, num_ranks: int, num_chunks: int, num_micro_batches: int
) -> list[Pass]:
    """Return the ordered passes of a rank.

    A model is split into stages, one or several per rank. Rank ``rank`` runs the stages
    ``chunk x num_ranks + rank``. With p ranks, m micro-batches and v stages per rank:

        gpipe        all forward passes, then all backward passes; stores m activations
        1f1b         each backward pass as early as possible; stores p - rank activations
        interleaved  1f1b with v stages per rank; shorter stages shorten fill and drain of the pipeline

    Sources: Huang et al., "GPipe", arXiv:1811.06965; Narayanan et al., "PipeDream-Flush" and the
    interleaved schedule in "Efficient Large-Scale Language Model Training on GPU Clusters",
    arXiv:2104.04473.

    Because messages are sent asynchronously, ranks do not deadlock if their orders respect the dependencies.
    ``num_chunks``, the number of stages per rank, may be larger than 1 only with interleaved.
    """
    # Interleaved stages alternate after num_ranks micro-batches; passes of surplus ones are removed below.
    rounded = num_micro_batches if num_chunks == 1 else -(-num_micro_batches // num_ranks) * num_ranks
    width = rounded if num_chunks == 1 else num_ranks
    groups = [range(first, first + width) for first in range(0, rounded, width)]
    chunks = range(num_chunks)
    forward = [Pass("forward", chunk, at) for group in groups for chunk in chunks for at in group]
    backward = [Pass("backward", chunk, at) for group in groups for chunk in reversed(chunks) for at in group]
    if schedule == "gpipe":
        num_ahead = len(forward)
    elif num_chunks == 1:
        num_ahead = num_ranks - rank - 1
    else:
        num_ahead = (num_chunks - 1) * num_ranks + 2 * (num_ranks - rank - 1)
    num_ahead = min(num_ahead, len(forward))
    order = forward[:num_ahead]
    for at in range(len(forward) - num_ahead):
        order += [forward[num_ahead + at], backward[at]]
    order += backward[len(forward) - num_ahead :]
    return [each for each in order if each.micro_batch < num_micro_batches]


def bubble(num_ranks: int, num_micro_batches: int, num_chunks: int = 1) -> float:
    """Return the fraction of time in which a rank is idle.

    This fraction (the bubble) is (p - 1) / (m + p - 1) for gpipe and 1f1b, and (p - 1) / (v m + p - 1) for
    interleaved, if all passes have the same duration. Symbols are as in ``order_of``.

    >>> bubble(4, 8)
    0.2727272727272727
    >>> bubble(4, 8, num_chunks=2)
    0.15789473684210525
    """
    return (num_ranks - 1) / (num_chunks * num_micro_batches + num_ranks - 1)


Balance = Literal["parameters", "time"]
NUM_TIMED = 3
"""Number of timed runs of the example; the shortest time is used."""


@dataclass(frozen=True)
class Stage:
    """Stage of a pipeline.

    Attributes:
        call: Receives the values from the previous stage (first stage: the model's inputs by name); returns
            a tuple of values for the next stage (last stage: the model's output).
        names: Names of the modules, parameters and buffers of the model that the stage uses.
        first: Name of the module that the stage calls first, and number of calls of this module in previous
            stages of the same forward pass; None: the stage calls no module.
        is_random: Whether the stage draws random numbers.
    """

    call: Callable[..., Any]
    names: frozenset[str]
    first: tuple[str, int] | None = None
    is_random: bool = True

    def owns(self, name: str) -> bool:
        """Return whether the stage uses a parameter or buffer.

        >>> Stage(print, frozenset({"layers.1"})).owns("layers.1.weight")
        True
        >>> Stage(print, frozenset({"layers.1"})).owns("layers.10.weight")
        False
        """
        parts = name.split(".")
        return any(".".join(parts[:length]) in self.names for length in range(1, len(parts) + 1))


@dataclass(frozen=True)
class Pieces:
    """Pieces of a model that are called one after the other; consecutive pieces form a stage.

    Attributes:
        costs: Cost of each piece.
        widths: Number of values that cross each allowed cut, by the number of pieces before it.
        join: Returns the stage of pieces ``[first, last)``.
    """

    costs: Sequence[float]
    widths: Mapping[int, int]
    join: Callable[[int, int], Stage]

    def stages(self, cuts: Sequence[int]) -> list[Stage]:
        """Return the stages between cuts; a cut is the number of pieces before it."""
        bounds = [0, *cuts, len(self.costs)]
        return [self.join(first, last) for first, last in pairwise(bounds)]


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
        end_phase: Ends a phase of the step.
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
        end_phase: Callable[[str], None],
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
        self._lap = end_phase
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
