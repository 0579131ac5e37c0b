"""Local shards of the weights and of the optimizer state that DeepSpeed shards over ranks.

DeepSpeed concatenates parameters into flat tensors, and updates those. This module maps ranges of a flat
tensor to ranges of the model's parameters, which checkpoints contain. Stages 1 and 2 split the flat tensor of
a parameter group into one part per rank. Stage 3 splits each parameter, and concatenates a rank's parts.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from horovod_train.checkpoint.arrays import Part
from horovod_train.frameworks.torch.state.local_tensors import LocalTensor, OptimizedParameter
from horovod_train.frameworks.torch.state.optimizer import clone_optimizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """Slice of a parameter that this rank updates.

    Attributes:
        name: Name of the parameter in the model.
        whole: Shape of the parameter.
        start: Offset of the slice in the flattened parameter.
        length: Number of elements.
        flat: The flat tensor that DeepSpeed updates.
        at: Offset of the slice in ``flat``.
        group: Index of the parameter group.
        number: Index of the flat tensor.
    """

    name: str
    whole: tuple[int, ...]
    start: int
    length: int
    flat: torch.Tensor
    at: int
    group: int
    number: int

    @property
    def stand_in(self) -> torch.Tensor:
        """A placeholder of the slice's length with memory for one element: weights may be on a disk."""
        return torch.zeros((), dtype=self.flat.dtype, device=self.flat.device).expand(self.length)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the slice's elements of a tensor with the layout of ``flat``."""
        return tensor.detach()[self.at : self.at + self.length]


class FlatState:
    """Access to this rank's shards in DeepSpeed, for saving and loading.

    Args:
        model: The model.
        made: DeepSpeed's wrapper of the optimizer.
        names: Names of the parameters, by ``id``.
        stage: Stage of ZeRO.
        rank: This rank.
    """

    def __init__(
        self, model: torch.nn.Module, made: Any, names: Mapping[int, str], stage: int, rank: int
    ) -> None:
        self._model, self._made, self._stage, self._rank = model, made, stage, rank
        find = pieces_of_stage_3 if stage == 3 else pieces_of_stages_1_and_2
        self._pieces = sorted(find(made, names, rank), key=lambda piece: piece.group)

    def local_tensors(self) -> dict[str, LocalTensor]:
        """Return weights and buffers by name; with stage 3, this rank's shards of the weights."""
        self._reshard()
        tensors = self._model.state_dict(keep_vars=True)
        return {name: self._local_tensor_of(tensor) for name, tensor in tensors.items()}

    def _reshard(self) -> None:
        """Reshard the parameters that passes have left gathered or in flight (stage 3)."""
        if self._stage == 3:
            self._made._partition_all_parameters()  # noqa: SLF001  (no public API)

    def _local_tensor_of(self, tensor: Any) -> LocalTensor:
        if not hasattr(tensor, "ds_tensor"):
            return LocalTensor(tensor.detach())
        own, whole = tensor.ds_tensor, tuple(tensor.ds_shape)
        start, length = own_part(tensor, self._rank)
        return LocalTensor(own.detach()[:length], Part(whole, (start,)))

    def optimized(self) -> Sequence[OptimizedParameter]:
        """Return this rank's shards of the optimized parameters."""
        return [
            OptimizedParameter(p.name, LocalTensor(p.stand_in, Part(p.whole, (p.start,))))
            for p in self._pieces
        ]

    def gradients(self) -> Iterator[tuple[str, Part, torch.Tensor]]:
        """Yield this rank's shards of the gradients; valid after the backward pass and before the update.

        Flat tensors whose gradients DeepSpeed has moved to the host or to a disk are omitted.
        """
        flat: dict[int, torch.Tensor] = {}
        for piece in self._pieces:
            if piece.number not in flat:
                pieces = self._made.averaged_gradients.get(piece.number)
                if not pieces:
                    continue
                flat[piece.number] = self._made.flatten(pieces)
            yield piece.name, Part(piece.whole, (piece.start,)), piece.of(flat[piece.number])

    def optimizer(self) -> torch.optim.Optimizer:
        """Return an optimizer over the slices, with views of DeepSpeed's state; copies if it is on disk."""
        base = self._made.optimizer
        weights = [piece.stand_in for piece in self._pieces]
        groups = [
            {**group, "params": [w for w, p in zip(weights, self._pieces, strict=True) if p.group == number]}
            for number, group in enumerate(base.param_groups)
        ]
        shown = clone_optimizer(base, groups)
        for same in self._by_flat(weights):
            flat = same[0][0].flat
            with self._in_memory(same[0][0], is_changed=False) as is_on_disk:
                for piece, weight in same if flat in base.state else ():
                    shown.state[weight] = {
                        key: _copied(piece.of(value), is_on_disk) if is_like(value, flat) else value
                        for key, value in base.state[flat].items()
                    }
        return shown

    @torch.no_grad()
    def update_from(self, shown: torch.optim.Optimizer) -> None:
        """Copy the model's weights and the state of ``shown``, a result of ``optimizer``, to DeepSpeed."""
        self._reshard()
        for same in self._by_flat([weight for group in shown.param_groups for weight in group["params"]]):
            number, flat = same[0][0].number, same[0][0].flat
            with self._in_memory(same[0][0], is_changed=True):
                flat.data.copy_(self._weights_of(number))
                entries = [(piece, shown.state.get(weight) or {}) for piece, weight in same]
                replace_state(self._made.optimizer.state[flat], joined(flat, entries))

    def _weights_of(self, number: int) -> torch.Tensor:
        """Return the model's weights that correspond to a flat tensor, which may be the same memory."""
        if self._stage == 3:
            weights: torch.Tensor = self._made.fp16_partitioned_groups_flat[number]
        else:
            weights = self._made.parallel_partitioned_bit16_groups[number][self._rank]
        return weights.data

    def _by_flat(self, others: Sequence[Any]) -> list[list[tuple[Piece, Any]]]:
        """Group the slices by flat tensor, each with its item of ``others``."""
        found: dict[int, list[tuple[Piece, Any]]] = defaultdict(list)
        for piece, other in zip(self._pieces, others, strict=True):
            found[piece.number].append((piece, other))
        return list(found.values())

    @contextmanager
    def _in_memory(self, piece: Piece, *, is_changed: bool) -> Iterator[bool]:
        """Load a slice's flat tensor and its state into memory for the block; yield whether it is on disk."""
        made = self._made
        if self._stage != 3 or not made._swappable_optimizer_subgroup(piece.number):  # noqa: SLF001
            yield False
            return
        made._optimizer_states_and_gradient_swap_in(piece.number)  # noqa: SLF001
        yield True
        if is_changed:
            made._optimizer_states_and_gradient_swap_out(piece.number)  # noqa: SLF001
        else:
            made._release_swap_buffers(piece.number)  # noqa: SLF001


def _copied(tensor: torch.Tensor, is_needed: bool) -> torch.Tensor:
    return tensor.clone() if is_needed else tensor


def replace_state(state: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Replace the state of a tensor; overwrite its tensors in place, because DeepSpeed may refer to them."""
    for key, value in new.items():
        if is_like(state.get(key), value):
            state[key].copy_(value)
        else:
            state[key] = value


def joined(flat: torch.Tensor, pieces: Sequence[tuple[Piece, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the state of a flat tensor, given the state of each of its slices.

    A tensor that is stored once per flat tensor, such as ``step``, becomes the maximum over the slices.
    """
    state: dict[str, Any] = {}
    for piece, entry in pieces:
        for key, value in entry.items():
            if key == "step" and isinstance(value, torch.Tensor):
                value = value.reshape(())  # noqa: PLW2901  (for a scalar weight, it looks like a slice)
            if is_like(value, piece.stand_in):
                piece.of(state.setdefault(key, torch.zeros_like(flat))).copy_(value)
            elif key not in state:
                state[key] = value.clone() if isinstance(value, torch.Tensor) else value
            elif isinstance(value, torch.Tensor) and not torch.equal(value, state[key]):
                state[key] = torch.maximum(value, state[key])
                log.warning(
                    "parameters have differing %r in the checkpoint, and DeepSpeed knows one for all: %s",
                    key,
                    state[key],
                )
    return state


def is_like(value: object, flat: object) -> bool:
    """Return whether a value of an optimizer's state is elementwise: 1-D, with the shape of a flat tensor."""
    if not isinstance(value, torch.Tensor) or not isinstance(flat, torch.Tensor):
        return False
    return value.dim() == 1 and value.shape == flat.shape


def own_part(parameter: Any, rank: int) -> tuple[int, int]:
    """Return offset and length, without padding, of a rank's shard of a parameter (stage 3)."""
    length = parameter.ds_tensor.numel()
    start = min(rank * length, parameter.ds_numel)
    return start, min(length, parameter.ds_numel - start)


def pieces_of_stages_1_and_2(made: Any, names: Mapping[int, str], _rank: int) -> list[Piece]:
    """Return this rank's slices if DeepSpeed splits flat parameter groups."""
    return [
        Piece(
            names[id(parameter)],
            tuple(parameter.shape),
            linked.lp_fragment_address.start,
            linked.lp_fragment_address.numel,
            flat,
            linked.hp_fragment_address.start,
            number,
            number,
        )
        for number, (group, flat) in enumerate(
            zip(made.bit16_groups, made.single_partition_of_fp32_groups, strict=True)
        )
        for parameter in group
        if (linked := parameter._hp_mapping) is not None  # noqa: SLF001
    ]


def pieces_of_stage_3(made: Any, names: Mapping[int, str], rank: int) -> list[Piece]:
    """Return a rank's slices if DeepSpeed splits each parameter."""
    found = []
    for number, group in enumerate(made.fp16_groups):
        for parameter in group:
            _, at, _ = made.grad_position[made.get_param_id(parameter)]
            start, length = own_part(parameter, rank)
            flat = made.fp32_partitioned_groups_flat[number]
            of_group = made.sub_group_to_group_id[number]
            whole = tuple(parameter.ds_shape)
            found.append(Piece(names[id(parameter)], whole, start, length, flat, at, of_group, number))
    return [piece for piece in found if piece.length]
