"""Compare tensors of several ranks by a sum of their bits, on any device."""

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
    """Checks that copies of weights and buffers on several ranks are equal.

    Args:
        model: The model.
        strategy: Provides this rank's shard of the model.
        statistics: Running statistics of normalization layers, which differ between ranks in training.
        data_ranks: Communicator of the data-parallel ranks.
        all_ranks: Communicator of all ranks.
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
        """Average running statistics over ranks; raise ``UserError`` if other buffers differ. Collective."""
        if self._all_ranks.size == 1:
            return
        for buffer in self._statistics.buffers if self._data_ranks.size > 1 else ():
            mine = (buffer.detach().double().flatten() / self._data_ranks.size).tolist()
            mean = torch.tensor(self._data_ranks.allreduce_sum(mine), dtype=torch.float64)
            buffer.copy_(mean.view(buffer.shape))
        check_buffers(self._all_ranks, self._strategy.local_tensors(), self._weights())

    def check(self) -> None:
        """Raise ``UserError`` if weights or buffers differ after the first step. Collective."""
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
    """Raise ``UserError`` if a weight differs between ranks; ``names`` are all weights. Collective."""
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
    """Raise ``UserError`` if a buffer differs between ranks. Collective.

    A checkpoint contains one copy of a buffer, so a resumed run would lose the other values.
    ``local_tensors`` contains weights and saved buffers; ``weights`` contains the names of all weights.
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
    """Return the name of the first tensor that differs between ranks, and a text with two such ranks."""
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
    """Return shape, dtype and bit sum of each tensor. An integer sum depends on no rounding or order."""
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
