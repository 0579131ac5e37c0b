"""Stages of a traced model: graphs that call the model's own modules."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import fx

from horovod_train.errors import UserError
from horovod_train.frameworks.torch.sizes.units import CONTAINERS, units_of
from horovod_train.frameworks.torch.strategies.pipeline.lengths import VALUE
from horovod_train.frameworks.torch.strategies.pipeline.stages import NUM_TIMED, Balance, Pieces, Stage
from horovod_train.frameworks.torch.strategies.pipeline.trace import IS_RANDOM, plain_attributes, trace
from horovod_train.frameworks.torch.strategies.pipeline.values_read import ValuesRead


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
    """Return the stage ``nodes[first:last]``, which returns ``results`` (None: the model's output)."""
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
