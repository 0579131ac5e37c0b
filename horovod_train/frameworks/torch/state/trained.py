"""The trained parameters of a model. They may change between steps, identically on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from horovod_train.errors import UserError, describe_ranks

Named = Mapping[str, torch.nn.Parameter]


class TrainedParameters(Protocol):
    """The parameters of an optimizer, which change when layers are unfrozen or groups are added."""

    def count(self) -> int:
        """Return the number of parameters. This is called in each step, so it must be cheap."""
        ...

    def named(self) -> Named:
        """Return the parameters by name, in model order; raise ``UserError`` if the model lacks one."""
        ...


@dataclass(frozen=True)
class OptimizedParameters:
    """The current parameters of an optimizer of a model."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def count(self) -> int:
        """Return the number of parameters."""
        return sum(len(group["params"]) for group in self.optimizer.param_groups)

    def named(self) -> Named:
        """Return the parameters by name, in model order; raise ``UserError`` if the model lacks one."""
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        found = {name: p for name, p in self.model.named_parameters() if id(p) in trained}
        if len(trained) > len(found):
            raise UserError(
                "the optimizer trains parameters that are not in the model: ranks could not keep them equal",
                hint="make them part of the model, as a submodule or with register_parameter",
            )
        return found

    def check(self) -> None:
        """Raise ``UserError`` if no parameter requires a gradient, or if one is not in the model."""
        if not any(parameter.requires_grad for parameter in self.named().values()):
            raise UserError(
                "the optimizer trains no parameter", hint="does any parameter require a gradient?"
            )


def check_same_trained(everyone: Sequence[tuple[str, list[list[str]]]]) -> None:
    """Raise ``UserError`` if ranks train different parameters, or a rank's optimizer has a problem.

    Args:
        everyone: For each rank, the problem of its optimizer (empty: none), and [name, shape, type] of each
            parameter that it trains.
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
