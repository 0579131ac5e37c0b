"""Per-rank state by parameter, saved in checkpoints and loaded on any number of ranks.

The rule of a key defines what a rank loads from a checkpoint of another number of ranks:

    SUM   only the sum over ranks matters (residuals): each of M ranks loads the sum divided by M
    SAME  equal on all ranks: rank 0 saves it, and all ranks load it
    RANK  specific to a rank: each rank loads its own state; additional ranks load nothing
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto

import torch

StateKey = tuple[str, str]
"""Name of a parameter and key of its state. A ``residual`` is saved under the parameter's name only."""
Tensors = Mapping[str, torch.Tensor]
RESIDUAL = "residual"


class Rule(Enum):
    """Rule by which a state is loaded on another number of ranks."""

    SUM = auto()
    SAME = auto()
    RANK = auto()


def saved_name(key: StateKey) -> str:
    """Return the name of a state in a checkpoint."""
    name, kind = key
    return name if kind == RESIDUAL else f"{name}/{kind}"


def merged(of_ranks: Sequence[Tensors], rule: Rule, rank: int, size: int) -> dict[str, torch.Tensor]:
    """Return the tensors that a rank loads.

    Args:
        of_ranks: Tensors of this rule, by the rank that saved them.
        rule: The rule.
        rank: This rank.
        size: Current number of ranks.
    """
    if not of_ranks:
        return {}
    if rule is Rule.SAME:
        return dict(of_ranks[0])
    if rule is Rule.RANK or len(of_ranks) == size:
        return dict(of_ranks[rank]) if rank < len(of_ranks) else {}
    return {name: torch.stack([state[name] for state in of_ranks]).sum(0) / size for name in of_ranks[0]}


class RankState:
    """Per-parameter state that persists across bucket layouts and runs.

    Messages store the state of trained parameters; this object stores the state of frozen parameters.

    Args:
        rules: Rule of each key.
    """

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self._rules = rules
        self._waiting: dict[str, torch.Tensor] = {}

    def store(self, state: Mapping[StateKey, torch.Tensor]) -> None:
        """Move the state of messages to this object. The messages' tensors are set to zero."""
        for key, tensor in state.items():
            self._waiting[saved_name(key)] = tensor.clone()
            tensor.zero_()

    def restore(self, state: Mapping[StateKey, torch.Tensor]) -> None:
        """Move the stored state of these parameters to their messages."""
        for key, tensor in state.items():
            if (name := saved_name(key)) in self._waiting:
                tensor.copy_(self._waiting.pop(name))

    def save(self, state: Mapping[StateKey, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
        """Return the state that this rank writes to a checkpoint, given the state of the messages."""
        found = {**self._waiting, **{saved_name(key): tensor for key, tensor in state.items()}}
        return {name: t for name, t in found.items() if rank == 0 or self._rule(name) is not Rule.SAME}

    def load(self, of_ranks: Sequence[Tensors], rank: int, size: int) -> None:
        """Load the states that ranks saved. A later ``restore`` moves them to messages."""
        self._waiting = {}
        for rule in Rule:
            of_rule = [{n: t for n, t in state.items() if self._rule(n) is rule} for state in of_ranks]
            self._waiting |= merged(of_rule, rule, rank, size)

    def _rule(self, name: str) -> Rule:
        key = name.rpartition("/")[2] if "/" in name else RESIDUAL
        return self._rules.get(key, Rule.SUM)
