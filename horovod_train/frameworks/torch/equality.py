"""Are tensors that several ranks hold the same on all of them? A sum of their bits answers it, on any device."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from horovod_train.collectives.base import Communicator, allgather_json
from horovod_train.errors import UserError, describe_ranks
from horovod_train.frameworks.torch.held import Held

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_weights(world: Communicator, held: Mapping[str, Held], names: Collection[str]) -> None:
    """Refuse weights that differ between ranks.

    Args:
        world: All ranks.
        held: What this rank has of the model.
        names: Of parameters.

    Raises:
        UserError: They differ.
    """
    if (found := _first_difference(world, {name: held[name] for name in held if name in names})) is not None:
        name, ranks = found
        raise UserError(
            f"the weight {name!r} differs between ranks after the first step: {ranks}",
            hint="weights must change by the optimizer, or in the same way on all ranks: a forward pass that "
            "changes them in place does so for this rank's samples alone (Embedding(max_norm=...))",
        )


def check_buffers(world: Communicator, held: Mapping[str, Held], weights: Collection[str]) -> None:
    """Refuse buffers that differ between ranks: each rank would go on from its own, or lose it.

    Args:
        world: All ranks.
        held: What this rank has of the model: buffers that are saved, besides weights.
        weights: Names of parameters.

    Raises:
        UserError: They differ.
    """
    if (found := _first_difference(world, {name: held[name] for name in held if name not in weights})) is not None:
        name, ranks = found
        raise UserError(
            f"the buffer {name!r} differs between ranks: {ranks}; passes change it by the rank's own samples",
            hint="name it in train.average_buffers, if a mean over ranks is what one process would have; "
            "make it with persistent=False, if it is this rank's own; or do not let it depend on samples",
        )


def _first_difference(world: Communicator, held: Mapping[str, Held]) -> tuple[str, str] | None:
    """Return the first tensor that differs between ranks, and which ranks differ from which."""
    mine = {_key(name, each): value for (name, each), value in zip(held.items(), _sums(held), strict=True)}
    everyone: list[dict[str, object]] = allgather_json(world, mine)
    first: dict[str, tuple[int, object]] = {}
    for rank, of_rank in enumerate(everyone):
        for key, value in of_rank.items():
            owner, expected = first.setdefault(key, (rank, value))
            if value != expected:
                return key.partition("\0")[0], f"{describe_ranks([rank])} against {describe_ranks([owner])}"
    return None


def _key(name: str, held: Held) -> str:
    return name if held.part is None else f"{name}\0{held.part.start}"


def _sums(held: Mapping[str, Held]) -> list[object]:
    """Return shape, type and sum of the bits of each tensor: no rounding, and the same in any order."""
    tensors = [each.tensor.detach() for each in held.values()]
    sums = [_bits(tensor).sum(dtype=torch.int64) for tensor in tensors]
    numbers = torch.stack([each.cpu() for each in sums]).tolist() if sums else []
    return [
        [list(tensor.shape), str(tensor.dtype), number] for tensor, number in zip(tensors, numbers, strict=True)
    ]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    return flat.view(torch.int8) if flat.dtype == torch.bool else flat.view(INTEGERS[flat.element_size()])
