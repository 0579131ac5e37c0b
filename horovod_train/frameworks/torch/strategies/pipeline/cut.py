"""Split a model into stages that are called one after the other.

The first applicable method is used:

* the task's ``pipeline_parts(model)`` returns modules whose sequential call is equivalent to the model;
* the model is a ``torch.nn.Sequential``;
* the code between the model's modules is traced with an example batch (``trace.py``), and split between two
  operations if only tensors and integers cross, preferably few of them.

Stages call the model's own modules, with their own ``forward``, hooks and state, so that names and parameters
do not change. Stages may end inside the modules that contain the model's layers, which are opened for
tracing. If this yields too few pieces, the largest of the other modules are opened, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch

from horovod_train.collectives.base import Communicator, broadcast_json
from horovod_train.errors import UserError, translated
from horovod_train.frameworks.torch.strategies.pipeline.graph_stages import graph_pieces
from horovod_train.frameworks.torch.strategies.pipeline.lengths import PARTS_HINT
from horovod_train.frameworks.torch.strategies.pipeline.stages import NUM_TIMED, Balance, Pieces, Stage

MAX_IMBALANCE = 1.1
"""Largest factor by which cuts that fewer tensors cross may increase the largest cost of a stage."""


def cut_model(
    model: torch.nn.Module,
    parts: Sequence[torch.nn.Module] | None,
    example: Callable[[], dict[str, Any]],
    num_stages: int,
    ranks: Communicator,
    balance: Balance,
    another: Callable[[], torch.nn.Module] | None = None,
) -> list[Stage]:
    """Return the stages of a model. Every rank must call it, and uses the cuts of rank 0.

    Args:
        model: The whole model.
        parts: The task's ``pipeline_parts(model)``; None: the task does not define it.
        example: Returns example inputs of the model, by name.
        num_stages: Number of stages.
        ranks: The communicator of all ranks.
        balance: Equal number of parameters per stage, or equal time for the example.
        another: Returns a new model of the task for test passes; None: a copy is made.

    Raises:
        UserError: The model cannot be split into ``num_stages`` stages.
    """
    if parts is None and type(model).forward is torch.nn.Sequential.forward and not has_hooks(model):
        parts = list(model.children())
    if num_stages == 1 and parts is None:
        return [Stage(model, frozenset(_names_of_tensors(model)))]
    if parts is not None and has_hooks(model):
        raise UserError(
            "strategy pipeline: the model itself has hooks, and is called in parts, which "
            "pipeline_parts(model) "
            "names",
            hint="register the hooks with one of the parts",
        )
    with torch.random.fork_rng():
        tried = copied(model) if another is None else another()
        if tried is model:
            tried = copied(model)
        if parts is None:
            pieces = graph_pieces(model, tried, example(), balance, num_stages)
        else:
            pieces = _chain_pieces(model, tried, parts, example, balance)
    cuts = broadcast_json(ranks, best_cuts(pieces.costs, pieces.widths, num_stages))
    return pieces.stages(cuts)


def has_hooks(module: torch.nn.Module) -> bool:
    """Return whether a module has forward or backward hooks."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)


def copied(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model for test passes, which change the state of modules.

    Raises:
        UserError: The model cannot be copied.
    """
    with translated(
        lambda error: UserError(
            f"strategy pipeline: {type(model).__name__} cannot be cut into stages, for it cannot be copied: "
            f"{type(error).__name__}: {error}",
            hint=PARTS_HINT,
        )
    ):
        return copy.deepcopy(model)


def _names_of_tensors(model: torch.nn.Module) -> Iterator[str]:
    yield from (name for name, _ in model.named_parameters(remove_duplicate=False))
    yield from (name for name, _ in model.named_buffers(remove_duplicate=False))


_Cuts = tuple[int, float, list[int]]
"""Number of stages without cost, largest cost of a stage, and numbers of pieces before each cut."""


def best_cuts(costs: Sequence[float], widths: Mapping[int, int], num_stages: int) -> list[int]:
    """Return the cuts between stages, as the number of pieces before each cut.

    The largest cost of a stage is minimal, or slightly larger if fewer values cross the cuts. Stages without
    cost, which have no parameters, are avoided if possible.

    Args:
        costs: Costs of the pieces, in order.
        widths: Number of values that cross each allowed cut, by the number of pieces before it.
        num_stages: Number of stages.

    Raises:
        UserError: There are fewer than ``num_stages - 1`` allowed cuts.

    >>> best_cuts([1, 1, 1, 3], {1: 1, 2: 1, 3: 1}, 2)
    [3]
    >>> best_cuts([0, 1, 9, 0, 1], {1: 1, 2: 1, 3: 1, 4: 1}, 3)
    [2, 3]
    """
    if len(widths) < num_stages - 1:
        raise UserError(
            f"strategy pipeline: the model can be cut into {len(widths) + 1} stages, "
            f"and {num_stages} are wanted",
            hint="use fewer stages (strategy.args.stages, chunks_per_rank), or give the task "
            "pipeline_parts(model)",
        )
    num_empty, dearest, cuts = _balanced_cuts(costs, widths, num_stages)
    for width in sorted(set(widths.values())):
        narrow = [place for place, crossing in widths.items() if crossing <= width]
        if len(narrow) >= num_stages - 1:
            narrow_empty, found, narrow_cuts = _balanced_cuts(costs, narrow, num_stages)
            if narrow_empty == num_empty and found <= MAX_IMBALANCE * dearest:
                return narrow_cuts
    return cuts


def _balanced_cuts(costs: Sequence[float], allowed: Collection[int], num_stages: int) -> _Cuts:
    """Return the cuts with the fewest stages without cost and, among these, the minimal largest cost."""
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)

    def with_stage(way: _Cuts, begin: int, end: int) -> _Cuts:
        num_empty, dearest, cuts = way
        cost = before[end] - before[begin]
        return num_empty + (cost == 0), max(dearest, cost), cuts

    # For each allowed cut: the best cuts before it, for a number of stages that increases in the loop.
    ways: dict[int, _Cuts] = {0: (0, 0.0, [])}
    for _ in range(num_stages - 1):
        following: dict[int, _Cuts] = {}
        for place in sorted(allowed):
            choices = [with_stage(way, last, place) for last, way in ways.items() if last < place]
            if choices:
                num_empty, dearest, cuts = min(choices)
                following[place] = num_empty, dearest, [*cuts, place]
        ways = following
    return min(with_stage(way, last, len(costs)) for last, way in ways.items())


# -- modules called one after the other


def _chain_pieces(
    model: torch.nn.Module,
    tried: torch.nn.Module,
    parts: Sequence[torch.nn.Module],
    example: Callable[[], dict[str, Any]],
    balance: Balance,
) -> Pieces:
    names = {id(module): name for name, module in model.named_modules()}
    unknown = [type(part).__name__ for part in parts if id(part) not in names]
    if unknown or not parts:
        raise UserError(
            f"pipeline_parts(model) returns {f'a {unknown[0]}' if unknown else 'nothing'} "
            "that is not a module of the model",
            hint="return modules of the model, in the order in which they are called",
        )
    costs = _numbers_once(parts)
    if balance == "time":
        costs = _times_of_chain([tried.get_submodule(names[id(part)]) for part in parts], example())

    def join(first: int, last: int) -> Stage:
        own = [names[id(part)] for part in parts[first:last]]
        called_before = sum(part is parts[first] for part in parts[:first])
        chain = _Chain(parts[first:last], is_last=last == len(parts))
        return Stage(chain, frozenset(own), (own[0], called_before))

    return Pieces(costs, dict.fromkeys(range(1, len(parts)), 1), join)


class _Chain:
    """Stage that calls modules one after the other."""

    def __init__(self, modules: Sequence[torch.nn.Module], *, is_last: bool) -> None:
        self._modules = modules
        self._is_last = is_last

    def __call__(self, *crossing: Any, **inputs: Any) -> Any:
        found: Any = (*crossing, *inputs.values())
        for module in self._modules:
            found = module(*found) if isinstance(found, tuple) else module(found)
        return found if self._is_last or isinstance(found, tuple) else (found,)


def _numbers_once(parts: Sequence[torch.nn.Module]) -> list[float]:
    """Return the number of elements of each part's parameters, without those of previous parts."""
    seen: set[int] = set()
    costs = []
    for part in parts:
        own = [p for p in part.parameters() if id(p) not in seen]
        seen.update(id(p) for p in own)
        costs.append(float(sum(p.numel() for p in own)))
    return costs


@torch.no_grad()
def _times_of_chain(parts: Sequence[torch.nn.Module], inputs: Mapping[str, Any]) -> list[float]:
    rounds: list[list[float]] = []
    for _ in range(NUM_TIMED):
        found: Any = tuple(inputs.values())
        times = []
        for part in parts:
            begun = perf_counter()
            found = part(*found) if isinstance(found, tuple) else part(found)
            times.append(perf_counter() - begun)
        rounds.append(times)
    return [min(times) for times in zip(*rounds, strict=True)]
