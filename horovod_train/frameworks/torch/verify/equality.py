"""Compare tensors that several ranks hold, by a sum of their bits, on any device."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from horovod_train.collectives.base import Communicator, allgather_json
from horovod_train.errors import UserError, describe_ranks
from horovod_train.frameworks.torch.state.local_tensors import LocalTensor
from horovod_train.frameworks.torch.step.statistics import RunningStatistics
from horovod_train.frameworks.torch.strategies.base import Strategy

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Equality:
    """What several ranks hold of a replica is equal.

    Args:
        model: The model.
        strategy: Knows what this rank has of it.
        statistics: Running statistics, of which each rank has its own in training.
        data_ranks: Those that share the samples of a step.
        all_ranks: Those and others, if there are others.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        strategy: Strategy,
        statistics: RunningStatistics,
        data_ranks: Communicator,
        all_ranks: Communicator,
    ) -> None:
        self._model, self._strategy, self._statistics = model, strategy, statistics
        self._data_ranks, self._all_ranks = data_ranks, all_ranks

    def _weights(self) -> set[str]:
        return {name for name, _ in self._model.named_parameters(remove_duplicate=False)}

    @torch.no_grad()
    def sync_buffers(self) -> None:
        """Average running statistics over ranks; check that all other buffers are equal.

        Raises:
            UserError: Another buffer differs between ranks.
        """
        if self._data_ranks.size == 1:
            return
        for buffer in self._statistics.buffers:
            mine = (buffer.detach().double().flatten() / self._data_ranks.size).tolist()
            mean = torch.tensor(self._data_ranks.allreduce_sum(mine), dtype=torch.float64)
            buffer.copy_(mean.view(buffer.shape))
        check_buffers(self._all_ranks, self._strategy.local_tensors(), self._weights())

    def check(self) -> None:
        """Check weights and buffers after the first step.

        Raises:
            UserError: Something differs.
        """
        if self._all_ranks.size == 1 or not self._strategy.replicas_identical:
            return
        averaged = {id(buffer) for buffer in self._statistics.buffers}
        named = self._model.named_buffers(remove_duplicate=False)
        own = {name for name, buffer in named if id(buffer) in averaged}
        local_tensors = {
            name: each for name, each in self._strategy.local_tensors().items() if name not in own
        }
        check_weights(self._all_ranks, local_tensors, self._weights())
        check_buffers(self._all_ranks, local_tensors, self._weights())


def check_weights(
    world: Communicator, local_tensors: Mapping[str, LocalTensor], names: Collection[str]
) -> None:
    """Refuse weights that differ between ranks.

    Args:
        world: All ranks.
        local_tensors: This rank's part of the model, by name.
        names: Of parameters.

    Raises:
        UserError: They differ.
    """
    if (
        found := _first_difference(
            world, {name: local_tensors[name] for name in local_tensors if name in names}
        )
    ) is not None:
        name, ranks = found
        raise UserError(
            f"the weight {name!r} differs between ranks after the first step: {ranks}",
            hint="weights must change by the optimizer, or in the same way on all ranks: a forward pass that "
            "changes them in place does so for this rank's samples alone (Embedding(max_norm=...))",
        )


def check_buffers(
    world: Communicator, local_tensors: Mapping[str, LocalTensor], weights: Collection[str]
) -> None:
    """Refuse buffers that differ between ranks: each rank would resume from its own, or lose it.

    Args:
        world: All ranks.
        local_tensors: This rank's part of the model, by name: weights and saved buffers.
        weights: Names of parameters.

    Raises:
        UserError: They differ.
    """
    if (
        found := _first_difference(
            world, {name: local_tensors[name] for name in local_tensors if name not in weights}
        )
    ) is not None:
        name, ranks = found
        raise UserError(
            f"the buffer {name!r} differs between ranks: {ranks}; passes change it by the rank's own samples",
            hint="name it in train.average_buffers, if a mean over ranks is what one process would have; "
            "make it with persistent=False, if it is this rank's own; or do not let it depend on samples",
        )


def _first_difference(
    world: Communicator, local_tensors: Mapping[str, LocalTensor]
) -> tuple[str, str] | None:
    """Return the first tensor that differs between ranks, and which ranks differ from which."""
    mine = {
        _key(name, each): value
        for (name, each), value in zip(local_tensors.items(), _sums(local_tensors), strict=True)
    }
    everyone: list[dict[str, object]] = allgather_json(world, mine)
    first: dict[str, tuple[int, object]] = {}
    for rank, of_rank in enumerate(everyone):
        for key, value in of_rank.items():
            owner, expected = first.setdefault(key, (rank, value))
            if value != expected:
                return key.partition("\0")[0], f"{describe_ranks([rank])} against {describe_ranks([owner])}"
    return None


def _key(name: str, local: LocalTensor) -> str:
    return name if local.part is None else f"{name}\0{local.part.start}"


def _sums(local_tensors: Mapping[str, LocalTensor]) -> list[object]:
    """Return shape, type and sum of the bits of each tensor: no rounding, and the same in any order."""
    tensors = [each.tensor.detach() for each in local_tensors.values()]
    sums = [_bits(tensor).sum(dtype=torch.int64) for tensor in tensors]
    numbers = torch.stack([each.cpu() for each in sums]).tolist() if sums else []
    return [
        [list(tensor.shape), str(tensor.dtype), number]
        for tensor, number in zip(tensors, numbers, strict=True)
    ]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    return flat.view(torch.int8) if flat.dtype == torch.bool else flat.view(INTEGERS[flat.element_size()])
