"""Messages between the stages of a pipeline: activations to the next stage, gradients to the previous one.

A tensor is sent asynchronously as soon as it is computed, and its receiver requires its shape. For the first
micro-batches of a kind, shapes are sent before the tensors, and both ranks store them. Later, only tensors
are sent, and receives are posted some passes before they are needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from horovod_train.collectives.base import Communicator
from horovod_train.collectives.log import Collective
from horovod_train.errors import WorldError

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
    """Sender and receiver of one rank's messages; the communicator ``ranks`` records pending waits."""

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
