"""Split a model into stages that are called one after the other.

    cut_model      the stages of a model
    graph_pieces   pieces of a traced model: graphs that call the model's own modules
    best_cuts      the cuts between stages

Stages call the model's own modules, with their own ``forward``, hooks and state, so that names and
parameters do not change. Stages may end inside the modules that contain the model's layers, which are
opened for tracing. If this yields too few pieces, the largest of the other modules are opened, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import fx

from horovod_train.collectives.base import Communicator, broadcast_json
from horovod_train.errors import UserError, translated
from horovod_train.frameworks.torch.sizes import CONTAINERS, units_of
from horovod_train.plugins.pipeline.passes import NUM_TIMED, Balance, Pieces, Stage
from horovod_train.plugins.pipeline.trace import IS_RANDOM, PARTS_HINT, VALUE, plain_attributes, trace
from horovod_train.plugins.pipeline.values import ValuesRead


def graph_pieces(
    model: torch.nn.Module,
    tried: torch.nn.Module,
    example: Mapping[str, Any],
    balance: Balance,
    num_stages: int,
) -> Pieces:
    """Return the pieces of a traced model; open further modules until there are enough allowed cuts."""
    opened = holding_layers(tried)
    while True:
        pieces = _pieces_of(model, tried, trace(tried, example, opened), example, balance)
        largest = largest_closed(tried, opened)
        if len(pieces.widths) >= num_stages - 1 or largest is None:
            return pieces
        opened |= {largest}


def holding_layers(model: torch.nn.Module) -> set[str]:
    """Return the names of the ancestors of the model's layers, without the model itself."""
    parents: set[str] = set()
    for name in units_of(model):
        parts = name.split(".")
        parents.update(".".join(parts[:length]) for length in range(1, len(parts)))
    return parents


def largest_closed(model: torch.nn.Module, opened: Collection[str]) -> str | None:
    """Return the name of the largest module that has submodules and may be opened next.

    PyTorch's own modules are not opened, except for containers.
    """
    closed: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        is_next = bool(name) and name not in opened and (not parent or parent in opened)
        is_own = not type(module).__module__.startswith("torch.nn") or isinstance(module, CONTAINERS)
        if is_next and is_own and any(True for _ in module.children()):
            closed[name] = module
    return max(closed, key=lambda name: sum(p.numel() for p in closed[name].parameters()), default=None)


def _pieces_of(
    model: torch.nn.Module,
    tried: torch.nn.Module,
    graph: fx.Graph,
    example: Mapping[str, Any],
    balance: Balance,
) -> Pieces:
    nodes = list(graph.nodes)
    *body, output = nodes
    places = {node: at for at, node in enumerate(nodes)}
    last_use = {node: max((places[user] for user in node.users), default=-1) for node in body}

    def crossing(place: int) -> list[fx.Node]:
        """Return the nodes before a cut whose values are used after it, except for parameters."""
        return [node for node in body[:place] if last_use[node] >= place and node.op != "get_attr"]

    def join(first: int, last: int) -> Stage:
        inputs = [node for node in body if node.op == "placeholder"] if first == 0 else crossing(first)
        results = None if last == len(body) else crossing(last)
        return _stage_of(model, nodes, (first, last), inputs, results, output)

    first_place = sum(node.op == "placeholder" for node in body)
    candidates = {place: crossing(place) for place in range(first_place + 1, len(body))}
    widths = {
        place: len(values)
        for place, values in candidates.items()
        if values
        and all(_can_cross(node.meta[VALUE]) for node in values)
        and not _share_memory(tried, [node.meta[VALUE] for node in values])
    }
    costs = _times_of_graph(tried, graph, example) if balance == "time" else _numbers_of_graph(tried, body)
    return Pieces(costs, widths, join)


def _share_memory(model: torch.nn.Module, values: Sequence[object]) -> bool:
    """Return whether any tensors share memory with each other, or with weights or buffers."""
    places = [v.untyped_storage().data_ptr() for v in values if isinstance(v, torch.Tensor) and v.numel()]
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers()) if t.numel()}
    return len(set(places)) < len(places) or not own.isdisjoint(places)


def _can_cross(value: object) -> bool:
    return isinstance(value, torch.Tensor) or type(value) is int


def _numbers_of_graph(model: torch.nn.Module, body: Sequence[fx.Node]) -> list[float]:
    """Return the number of parameter elements that each node uses, without those of previous nodes."""
    seen: set[int] = set()
    costs = []
    for node in body:
        used: Iterator[torch.Tensor] = iter(())
        if node.op == "call_module":
            used = model.get_submodule(str(node.target)).parameters()
        elif node.op == "get_attr" and isinstance(node.meta[VALUE], torch.nn.Parameter):
            used = iter([node.meta[VALUE]])
        own = [p for p in used if id(p) not in seen]
        seen.update(id(p) for p in own)
        costs.append(float(sum(p.numel() for p in own)))
    return costs


class _Timed(fx.Interpreter):
    """Interpreter that measures the time of each node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seconds: list[float] = []

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and record its time."""
        begun = perf_counter()
        found = super().run_node(n)
        self.seconds.append(perf_counter() - begun)
        return found


@torch.no_grad()
def _times_of_graph(model: torch.nn.Module, graph: fx.Graph, example: Mapping[str, Any]) -> list[float]:
    rounds = []
    for _ in range(NUM_TIMED):
        timed = _Timed(fx.GraphModule(model, graph))
        timed.run(*example.values())
        rounds.append(timed.seconds[:-1])
    return [min(times) for times in zip(*rounds, strict=True)]


def _stage_of(
    model: torch.nn.Module,
    nodes: Sequence[fx.Node],
    bounds: tuple[int, int],
    inputs: Sequence[fx.Node],
    results: Sequence[fx.Node] | None,
    output: fx.Node,
) -> Stage:
    first, last = bounds
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    own = [*nodes[first:last], *(results or [output])]
    used = {each for node in own for each in (*node.all_input_nodes, node) if each.op == "get_attr"}
    for at, node in enumerate(nodes[:last]):
        if node not in copies and node.op != "placeholder" and (at >= first or node in used):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    if results is None:
        graph.output(fx.node.map_arg(output.args[0], copies.__getitem__))
    else:
        graph.output(tuple(copies[node] for node in results))
    graph.eliminate_dead_code(lambda node: node.op != "get_attr")
    called = frozenset(str(node.target) for node in graph.nodes if node.op in {"call_module", "get_attr"})
    stage = fx.GraphModule(model, graph)
    numbers = [at for at, node in enumerate(inputs) if first and type(node.meta[VALUE]) is int]
    names = [] if first else [str(node.target) for node in inputs]
    calls = [str(node.target) for node in nodes[:last] if node.op == "call_module"]
    own_calls = [str(node.target) for node in nodes[first:last] if node.op == "call_module"]
    first_call = None
    if own_calls:
        num_before = len(calls) - len(own_calls)
        first_call = (own_calls[0], calls[:num_before].count(own_calls[0]))
    is_random = any(node.meta.get(IS_RANDOM) for node in nodes[first:last])
    return Stage(_Traced(model, stage, numbers, names), called, first_call, is_random)


class _Traced:
    """Callable of a stage's graph, in the model's training or evaluation mode; integers arrive as tensors."""

    def __init__(
        self, model: torch.nn.Module, graph: fx.GraphModule, numbers: Sequence[int], names: Sequence[str]
    ) -> None:
        self._model = model
        self._graph = graph
        self._numbers = frozenset(numbers)
        self._names = list(names)
        opened = dict(self._opened())
        self._attributes = {name: plain_attributes(each) for name, each in opened.items()}
        self._values = ValuesRead(opened)

    def _opened(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield the model and the opened modules that contain modules called in this stage, by name."""
        called = {str(node.target) for node in self._graph.graph.nodes if node.op == "call_module"}
        parents = {""}
        for name in called:
            parts = name.split(".")
            parents.update(".".join(parts[:length]) for length in range(1, len(parts)))
        yield from ((name, self._model.get_submodule(name)) for name in sorted(parents))

    def _check_attributes(self) -> None:
        """Refuse attributes of opened modules that have changed, because the trace contains their values."""
        for name, before in self._attributes.items():
            now = plain_attributes(self._model.get_submodule(name))
            if now != before:
                changed = next(k for k in sorted({*now, *before}) if now.get(k, now) != before.get(k, before))
                raise UserError(
                    f"strategy pipeline: the attribute {f'{name}.{changed}'.removeprefix('.')!r} of "
                    "the model has "
                    "changed since it was split into stages, which contain the previous value",
                    hint="keep it in a buffer, in a module inside of a stage, or give it to the "
                    "model as an input",
                )

        if (found := self._values.changed()) is not None:
            raise UserError(
                f"strategy pipeline: {found} since the model was split into stages, which do not follow it",
                hint="let a module inside of a stage read it, or give it to the model as an input",
            )

    def __call__(self, *crossing: Any, **inputs: Any) -> Any:
        self._check_attributes()
        if list(inputs) != self._names:
            raise UserError(
                f"strategy pipeline: the task calls the model with {', '.join(inputs)}, and called it with "
                f"{', '.join(self._names)} when it was cut into stages",
                hint="call it with the same inputs for each batch",
            )
        values = [*crossing, *inputs.values()]
        self._graph.training = self._model.training
        return self._graph(*(int(each) if at in self._numbers else each for at, each in enumerate(values)))


MAX_IMBALANCE = 1.1
"""Largest factor by which cuts that fewer tensors cross may increase the largest cost of a stage."""


def cut_model(
    model: torch.nn.Module,
    parts: Sequence[torch.nn.Module] | None,
    example: Callable[[], dict[str, Any]],
    num_stages: int,
    ranks: Communicator,
    balance: Balance,
    new_model: Callable[[], torch.nn.Module] | None = None,
) -> list[Stage]:
    """Return the stages of a model. Every rank must call it, and uses the cuts of rank 0.

    The first applicable method is used:

    * the task's ``pipeline_parts(model)`` returns modules whose sequential call is equivalent to the model;
    * the model is a ``torch.nn.Sequential``;
    * the code between the model's modules is traced with an example batch (``trace.py``), and split between
      two operations if only tensors and integers cross, preferably few of them.

    Args:
        model: The whole model.
        parts: The task's ``pipeline_parts(model)``; None: the task does not define it.
        example: Returns example inputs of the model, by name.
        num_stages: Number of stages.
        ranks: The communicator of all ranks.
        balance: Equal number of parameters per stage, or equal time for the example.
        new_model: Returns a new model of the task for test passes; None: a copy is made.

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
        tried = copied(model) if new_model is None else new_model()
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
            hint="use fewer stages (pipeline_parallel_degree, virtual_stages_per_rank), or give the task "
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
