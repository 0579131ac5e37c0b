"""What an optimizer trains of a model, which may change between two steps, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from horovod_train.errors import UserError, describe_ranks

Named = Mapping[str, torch.nn.Parameter]


class TrainedParameters(Protocol):
    """What an optimizer has: layers are unfrozen, groups added."""

    def count(self) -> int:
        """Return how many parameters the optimizer has; cheap, because it is called in each step."""
        ...

    def named(self) -> Named:
        """Return the optimizer's parameters by name, in the order of the model.

        Raises:
            UserError: The optimizer has parameters that are not in the model.
        """
        ...


@dataclass(frozen=True)
class OptimizedParameters:
    """What an optimizer has of a model, at any time."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def count(self) -> int:
        """Return how many parameters the optimizer has."""
        return sum(len(group["params"]) for group in self.optimizer.param_groups)

    def named(self) -> Named:
        """Return the optimizer's parameters by name, in the order of the model.

        Raises:
            UserError: The optimizer trains something that is not in the model.
        """
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        found = {name: p for name, p in self.model.named_parameters() if id(p) in trained}
        if len(trained) > len(found):
            raise UserError(
                "the optimizer trains parameters that are not in the model: ranks could not keep them equal",
                hint="make them part of the model, as a submodule or with register_parameter",
            )
        return found

    def check(self) -> None:
        """Refuse an optimizer that trains nothing.

        Raises:
            UserError: It does, or it trains something that is not in the model.
        """
        if not any(parameter.requires_grad for parameter in self.named().values()):
            raise UserError(
                "the optimizer trains no parameter", hint="does any parameter require a gradient?"
            )


def check_same_trained(everyone: Sequence[tuple[str, list[list[str]]]]) -> None:
    """Refuse ranks that train different parameters.

    Args:
        everyone: For each rank, what is wrong with its optimizer, and [name, shape, type] of each
            parameter that it trains.

    Raises:
        UserError: They do.
    """
    for rank, (problem, _) in enumerate(everyone):
        if problem:
            raise UserError(f"{describe_ranks([rank])}: {problem}")
    trained = [{entry[0] for entry in layout} for _, layout in everyone]
    if all(layout == everyone[0][1] for _, layout in everyone):
        return
    for name in sorted(set().union(*trained)):
        having = [rank for rank, names in enumerate(trained) if name in names]
        if len(having) < len(everyone):
            lacking = [rank for rank in range(len(everyone)) if rank not in having]
            verbs = ["train" if len(having) > 1 else "trains", "do" if len(lacking) > 1 else "does"]
            raise UserError(
                f"{describe_ranks(having)} {verbs[0]} {name!r} and {describe_ranks(lacking)} {verbs[1]} not",
                hint="freeze and unfreeze parameters on all ranks in the same step",
            )
    raise UserError("ranks train parameters of different shapes, types or order")
