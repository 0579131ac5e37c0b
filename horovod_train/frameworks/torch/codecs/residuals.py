"""What a rank has not sent yet, by the names of parameters: it outlives messages, layouts and runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

Pieces = Mapping[str, torch.Tensor]
"""Parts of the memories of messages, by parameter: writing to them changes what will be sent."""


class ResidualStore:
    """Holds what waits for a message that can send it: of parameters that are not trained now."""

    def __init__(self) -> None:
        self._waiting: dict[str, torch.Tensor] = {}

    def store_residual(self, pieces: Pieces) -> None:
        """Take what messages have not sent, which they then send no more."""
        for name, piece in pieces.items():
            self._waiting[name] = piece.clone()
            piece.zero_()

    def restore_residual(self, pieces: Pieces) -> None:
        """Give messages what waits for them."""
        for name in pieces.keys() & self._waiting.keys():
            pieces[name].copy_(self._waiting.pop(name))

    def state(self, pieces: Pieces) -> dict[str, torch.Tensor]:
        """Return all of it: what waits, and what messages hold."""
        return {**self._waiting, **pieces}

    def load_state(self, of_ranks: Sequence[Pieces], rank: int, size: int) -> None:
        """Take over what ranks had; of another number of ranks, each takes an equal part of all."""
        self._waiting = {}
        if len(of_ranks) == size:
            self._waiting = dict(of_ranks[rank])
        elif of_ranks:
            names = of_ranks[0]
            self._waiting = {name: torch.stack([s[name] for s in of_ranks]).sum(0) / size for name in names}
