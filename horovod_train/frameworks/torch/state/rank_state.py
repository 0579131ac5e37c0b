"""State of a rank other than weights, buffers and optimizer state.

RankState        per-rank state by parameter, saved in checkpoints, loaded on any number of ranks
python_state     state of a task and a model in Python: other than parameters and buffers
rng_state        state of the random generators of Python, NumPy and PyTorch
seed_generators  seeds of these generators
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum, auto
from types import CellType, FunctionType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from horovod_train.checkpoint.arrays import ArrayBlob
from horovod_train.frameworks import reader
from horovod_train.frameworks.reader import mix

StateKey = tuple[str, str]
"""Name of a parameter and key of its state. A ``residual`` is saved under the parameter's name only."""
Tensors = Mapping[str, torch.Tensor]
RESIDUAL = "residual"


class Rule(Enum):
    """Rule by which a state is loaded on another number of ranks.

    The rule of a key defines what a rank loads from a checkpoint of another number of ranks:

        SUM   only the sum over ranks matters (residuals): each of M ranks loads the sum divided by M
        SAME  equal on all ranks: rank 0 saves it, and all ranks load it
        RANK  specific to a rank: each rank loads its own state; additional ranks load nothing
    """

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


MAX_DEPTH = 6
MAX_LENGTH = 10_000
PLAIN = (bool, int, float, complex, str, bytes, type(None))
CONTAINERS = (Mapping, list, tuple, AbstractSet)
BATCH_NORM_CLASSES = {"_parameters", "_buffers", "_modules", "training"}


def python_state(*objects: object) -> str:
    """Return a text that differs if the Python state of the objects differs.

    Numbers, strings, containers, random generators and small arrays are compared by value, tensors by
    identity and version, and other objects by attributes. Objects without attributes, below ``MAX_DEPTH`` or
    above ``MAX_LENGTH`` are compared by identity.
    """
    seen: set[int] = set()
    return repr([_frozen(each, seen, MAX_DEPTH) for each in objects])


def _frozen(value: Any, seen: set[int], depth: int) -> object:
    if isinstance(value, PLAIN):
        return value
    if id(value) in seen or depth == 0:
        return id(value)
    seen.add(id(value))
    for kinds, freeze in KINDS:
        if isinstance(value, kinds):
            return freeze(value)
    if isinstance(value, type) or not (hasattr(value, "__dict__") or isinstance(value, CONTAINERS)):
        return id(value)
    children = _children(value)
    if len(children) > MAX_LENGTH:
        return id(value), len(children)
    # Modules do not count, because the layers of a model may be nested deeply.
    below = depth if isinstance(value, torch.nn.Module) else depth - 1
    return [_frozen(child, seen, below) for child in children]


def _children(value: Any) -> list[Any]:
    """Return the members of a container, or the captured values or attributes of an object."""
    if isinstance(value, Mapping):
        return [each for pair in value.items() for each in pair]
    if isinstance(value, CONTAINERS):
        return list(value)
    if isinstance(value, FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        return [*cells, *(value.__defaults__ or ()), *vars(value).values()]
    attributes = dict(vars(value))
    if not isinstance(value, torch.nn.Module):
        return [each for pair in attributes.items() for each in pair]
    modules = list(value._modules.values())  # noqa: SLF001
    own = [each for name, each in attributes.items() if name not in BATCH_NORM_CLASSES]
    return [*modules, *own, *(attributes.keys() - BATCH_NORM_CLASSES)]


def _content(cell: CellType) -> object:
    """Return the content of a closure cell; None: it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _array(value: npt.NDArray[Any]) -> object:
    return id(value), hash(value.tobytes()) if value.nbytes <= MAX_LENGTH else 0


def _tensor(value: torch.Tensor) -> object:
    return id(value), 0 if value.is_meta or value.is_inference() else value._version  # noqa: SLF001


KINDS: list[tuple[type, Callable[[Any], object]]] = [
    (torch.Tensor, _tensor),
    (np.ndarray, _array),
    (random.Random, lambda value: hash(value.getstate())),
    (np.random.Generator, lambda value: repr(value.bit_generator.state)),
    (np.random.RandomState, lambda value: repr(value.get_state(legacy=False))),
    (torch.Generator, lambda value: hash(value.get_state().numpy().tobytes())),
]
"""Types whose values are compared by a special function."""


def rng_state() -> tuple[object, dict[str, ArrayBlob]]:
    """Return the state of Python's, NumPy's and PyTorch's generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return reader.rng_state(
        {"torch": torch.get_rng_state().numpy(), "cuda": [state.numpy() for state in cuda]}
    )


def load_rng_state(tree: object, arrays: Mapping[str, ArrayBlob]) -> None:
    """Load a state that ``rng_state`` returned. CUDA states are loaded if the number of GPUs agrees."""
    own = reader.load_rng_state(tree, arrays)
    torch.set_rng_state(torch.from_numpy(own["torch"]))
    if own["cuda"] and len(own["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([torch.from_numpy(state) for state in own["cuda"]])


def seed_generators(seed: int, rank: int, epoch: int) -> None:
    """Seed Python's, NumPy's and PyTorch's generators with a mix of seed, rank and epoch."""
    mixed = mix(seed, rank, epoch)
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    torch.manual_seed(mixed)
