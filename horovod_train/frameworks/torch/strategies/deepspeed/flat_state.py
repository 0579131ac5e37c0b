"""What a rank has of weights and optimizer state that DeepSpeed shares between ranks.

DeepSpeed joins parameters to flat tensors, and updates those. Here they are seen as pieces of the parameters
of the model, as a checkpoint knows them. Stages 1 and 2 cut the flat tensor of a group of parameters into one
part for each rank; stage 3 cuts each parameter, and joins a rank's parts.
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
    """What a rank updates of a parameter.

    Attributes:
        name: Of the parameter, in the model.
        whole: Its shape.
        start: Where the piece begins in the flat parameter.
        length: How many numbers it has.
        flat: The tensor that DeepSpeed updates.
        at: Where the piece begins in it.
        group: Number of the group of parameters.
        number: Of the flat tensor.
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
        """Return a tensor of its length without memory, for state that is on a disk."""
        return torch.zeros((), dtype=self.flat.dtype, device=self.flat.device).expand(self.length)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the piece of a tensor that is laid out as the flat one."""
        return tensor.detach()[self.at : self.at + self.length]


class FlatState:
    """Shows, and takes over, what a rank has.

    Args:
        model: Has the parameters.
        made: What DeepSpeed has made of the optimizer.
        names: Of the parameters, by their ids.
        stage: Of ZeRO.
        rank: This rank.
    """

    def __init__(
        self, model: torch.nn.Module, made: Any, names: Mapping[int, str], stage: int, rank: int
    ) -> None:
        self._model, self._made, self._stage, self._rank = model, made, stage, rank
        find = pieces_of_stage_3 if stage == 3 else pieces_of_stages_1_and_2
        self._pieces = sorted(find(made, names, rank), key=lambda piece: piece.group)

    def local_tensors(self) -> dict[str, LocalTensor]:
        """Return weights and buffers by name: with stage 3 this rank's parts of weights."""
        self._give_back()
        tensors = self._model.state_dict(keep_vars=True)
        return {name: self._local_tensor_of(tensor) for name, tensor in tensors.items()}

    def _give_back(self) -> None:
        """Give back what passes have left gathered, or on its way."""
        if self._stage == 3:
            self._made._partition_all_parameters()  # noqa: SLF001  (no public API)

    def _local_tensor_of(self, tensor: Any) -> LocalTensor:
        if not hasattr(tensor, "ds_tensor"):
            return LocalTensor(tensor.detach())
        own, whole = tensor.ds_tensor, tuple(tensor.ds_shape)
        start, length = own_part(tensor, self._rank)
        return LocalTensor(own.detach()[:length], Part(whole, (start,)))

    def optimized(self) -> Sequence[OptimizedParameter]:
        """Return this rank's parts of what is optimized."""
        return [
            OptimizedParameter(p.name, LocalTensor(p.stand_in, Part(p.whole, (p.start,))))
            for p in self._pieces
        ]

    def gradients(self) -> Iterator[tuple[str, Part, torch.Tensor]]:
        """Yield this rank's parts of the gradients, after backward and before the update.

        Yields nothing for a flat tensor whose gradients DeepSpeed has moved to the host or a disk.
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
        """Return an optimizer over the pieces: its state is DeepSpeed's, or a copy of what is on a disk."""
        base = self._made.optimizer
        weights = [piece.stand_in for piece in self._pieces]
        groups = [
            {**group, "params": [w for w, p in zip(weights, self._pieces, strict=True) if p.group == number]}
            for number, group in enumerate(base.param_groups)
        ]
        shown = clone_optimizer(base, groups)
        for same in self._by_flat(weights):
            flat = same[0][0].flat
            with self._at_hand(same[0][0], is_changed=False) as is_on_disk:
                for piece, weight in same if flat in base.state else ():
                    shown.state[weight] = {
                        key: _copied(piece.of(value), is_on_disk) if is_like(value, flat) else value
                        for key, value in base.state[flat].items()
                    }
        return shown

    @torch.no_grad()
    def update_from(self, shown: torch.optim.Optimizer) -> None:
        """Take over the model's weights, and the state of what ``optimizer`` returned."""
        self._give_back()
        for same in self._by_flat([weight for group in shown.param_groups for weight in group["params"]]):
            number, flat = same[0][0].number, same[0][0].flat
            with self._at_hand(same[0][0], is_changed=True):
                flat.data.copy_(self._weights_of(number))
                entries = [(piece, shown.state.get(weight) or {}) for piece, weight in same]
                replace_state(self._made.optimizer.state[flat], joined(flat, entries))

    def _weights_of(self, number: int) -> torch.Tensor:
        """Return the weights in use of which a flat tensor has a copy for the optimizer, or is the same."""
        if self._stage == 3:
            weights: torch.Tensor = self._made.fp16_partitioned_groups_flat[number]
        else:
            weights = self._made.parallel_partitioned_bit16_groups[number][self._rank]
        return weights.data

    def _by_flat(self, others: Sequence[Any]) -> list[list[tuple[Piece, Any]]]:
        """Return the pieces of each flat tensor, each with what belongs to it."""
        found: dict[int, list[tuple[Piece, Any]]] = defaultdict(list)
        for piece, other in zip(self._pieces, others, strict=True):
            found[piece.number].append((piece, other))
        return list(found.values())

    @contextmanager
    def _at_hand(self, piece: Piece, *, is_changed: bool) -> Iterator[bool]:
        """Have a flat tensor and its state in memory, while the block runs; tell if they are on a disk."""
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
    """Replace an optimizer's state of a tensor; tensors that are there are overwritten: others know them."""
    for key, value in new.items():
        if is_like(state.get(key), value):
            state[key].copy_(value)
        else:
            state[key] = value


def joined(flat: torch.Tensor, pieces: Sequence[tuple[Piece, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the state of a flat tensor, given that of its pieces."""
    state: dict[str, Any] = {}
    for piece, entry in pieces:
        for key, value in entry.items():
            if key == "step" and isinstance(value, torch.Tensor):
                value = value.reshape(())  # noqa: PLW2901  (of a weight of no dimension it looks like a part)
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
    """Whether a value of an optimizer's state has a number for each of a flat tensor."""
    if not isinstance(value, torch.Tensor) or not isinstance(flat, torch.Tensor):
        return False
    return value.dim() == 1 and value.shape == flat.shape


def own_part(parameter: Any, rank: int) -> tuple[int, int]:
    """Return where a rank's part of a parameter of stage 3 begins, and how long it is without padding."""
    length = parameter.ds_tensor.numel()
    start = min(rank * length, parameter.ds_numel)
    return start, min(length, parameter.ds_numel - start)


def pieces_of_stages_1_and_2(made: Any, names: Mapping[int, str], _rank: int) -> list[Piece]:
    """Return a rank's pieces where DeepSpeed cuts flat groups."""
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
    """Return a rank's pieces where DeepSpeed cuts each parameter."""
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
