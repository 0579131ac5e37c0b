"""State in Python of a task: found, compared between ranks, saved and restored."""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.worlds import on_ranks
from torch import nn

from horovod_train.checkpoint.arrays import dump_state, parse_state
from horovod_train.collectives.base import SingleRank
from horovod_train.errors import CheckpointError
from horovod_train.frameworks.plain_data import WHOLE_BYTES, WHOLE_LENGTH, fingerprint, is_plain
from horovod_train.frameworks.python_state import PythonState
from horovod_train.frameworks.python_values import Root

MODULE = frozenset(vars(nn.Module()))


class Task:
    """A task whose attributes tests set."""

    calls = 0

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Dropout(0.1)])
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("saved", torch.zeros(2))


def state_of(*objects: Any, world: Any = None) -> PythonState:
    roots = [
        Root("model", each, MODULE, is_trained=True) if isinstance(each, nn.Module) else Root("task", each)
        for each in objects
    ]
    return PythonState(world or SingleRank(), roots)


def saved(state: PythonState) -> Any:
    """The state as a checkpoint contains it."""
    return parse_state(dump_state(None, state.take()))[1]


@pytest.fixture(autouse=True)
def no_calls():
    Task.calls = 0


VALUES = {
    "a number": (1, 3),
    "no number any more": (1.5, float("nan")),
    "a text": ("a", "b"),
    "bytes": (b"a", b"\x00b"),
    "a complex number": (1j, 2 + 1j),
    "a number of NumPy": (np.float32(1), np.float32(2.5)),
    "an array": (np.zeros(3), np.arange(3.0)),
    "a tensor": (torch.zeros(2, 2), torch.ones(2, 2)),
    "a tensor of bfloat16": (torch.zeros(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
    "a list": ([1], [1, [2.0, "x", None]]),
    "a tuple": ((1,), (2, (3,))),
    "a dictionary": ({"a": 1}, {"a": 2, 3: torch.ones(2), (1, 2): "tuple", "__kind__": 4}),
    "a set": ({1}, {1, (2, 3)}),
    "a frozen set": (frozenset({1}), frozenset({2})),
    "a queue": (deque([1], 3), deque([1, 2, 3], 3)),
    "a counter": (Counter("a"), Counter("aab")),
    "an ordered dictionary": (OrderedDict(a=1), OrderedDict(b=2, a=1)),
    "a dictionary with a default": (defaultdict(list, a=[1]), defaultdict(list, a=[1], b=[2])),
    "nothing at first": (None, {"a": [np.float64(1)]}),
}


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor | np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and bool((a == b).all())
    return type(a) is type(b) and (a == b or a != a)  # noqa: PLR0124  (NaN)


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_has_changed_is_restored(name):
    before, after = VALUES[name]
    task = Task(value=before)
    state = state_of(task)
    assert state.changed() == []
    assert state.take() == {}
    task.value = after
    blobs = saved(state)

    resumed = Task(value=copy.deepcopy(before))
    new = state_of(resumed)
    new.load([blobs])

    assert is_same(resumed.value, after)
    assert new.digests() == state.digests()
    assert [each.name for each in new.changed()] == ["task.value"]


GENERATORS = {
    "random.Random": (lambda: random.Random(1), lambda made: made.random()),
    "numpy.random.RandomState": (lambda: np.random.RandomState(1), lambda made: made.rand()),
    "numpy.random.Generator": (lambda: np.random.default_rng(1), lambda made: made.random()),
    "torch.Generator": (
        lambda: torch.Generator().manual_seed(1),
        lambda made: torch.rand((), generator=made).item(),
    ),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_continues_where_it_was(name):
    make, draw = GENERATORS[name]
    task, resumed = Task(generator=make()), Task(generator=make())
    state, new = state_of(task), state_of(resumed)
    draw(task.generator)

    new.load([saved(state)])

    assert draw(resumed.generator) == draw(task.generator)


def test_objects_are_restored_in_place_because_others_refer_to_them():
    def made():
        schedule = {"tau": 1.0}
        return Task(config=SimpleNamespace(tau=1.0), schedule=schedule), lambda: schedule["tau"]

    task, _ = made()
    resumed, read = made()
    config = resumed.config
    state, new = state_of(task), state_of(resumed)
    task.config.tau, task.schedule["tau"] = 2.0, 3.0

    new.load([saved(state)])

    assert (config.tau, read()) == (2.0, 3.0)


def test_modules_of_the_model_and_of_the_task_are_restored():
    def made():
        model, task = Net(), Task(teacher=nn.Linear(2, 2))
        with torch.no_grad():
            task.teacher.weight.fill_(1.0)
        task.model = model
        task.optimizer = torch.optim.SGD(task.teacher.parameters(), lr=0.1, momentum=0.9)
        return model, task, state_of(model, task)

    model, task, state = made()
    model.scale = 2.0
    model.layers[1].p = 0.5
    model.cache += 1
    model.saved += 1  # a checkpoint contains it anyway
    with torch.no_grad():
        model.layers[0].weight += 1
    task.teacher(torch.ones(1, 2)).sum().backward()
    task.optimizer.step()

    assert [each.name for each in state.changed()] == [
        "model.cache",
        "model.scale",
        "model.layers.1.p",
        "task.teacher",
        "task.optimizer",
    ]
    other_model, other_task, other = made()
    other.load([saved(state)])

    assert (other_model.scale, other_model.layers[1].p) == (2.0, 0.5)
    assert other_model.cache.tolist() == [1.0, 1.0]
    assert torch.equal(other_task.teacher.weight, task.teacher.weight)
    assert is_same(other_task.optimizer.state_dict(), task.optimizer.state_dict())


def test_class_attributes_and_new_attributes_are_restored():
    task = Task()
    state = state_of(task)
    Task.calls, task.added = 5, [1]
    blobs = saved(state)
    Task.calls = 0
    resumed = Task()
    new = state_of(resumed)

    new.load([blobs])

    assert (Task.calls, resumed.added) == (5, [1])


def test_a_task_with_state_dict_decides_what_is_saved():
    class Own(Task):
        def state_dict(self):
            return {"k": self.k}

        def load_state_dict(self, state):
            self.k = state["k"]

    task, resumed = Own(k=1, other=1), Own(k=1, other=1)
    state, new = state_of(task), state_of(resumed)
    task.k = task.other = 2

    new.load([saved(state)])

    assert (resumed.k, resumed.other) == (2, 1)


@dataclass
class Handle:
    """An object that no checkpoint can contain, with an attribute that one can."""

    count: int = 0
    lock: Any = field(default_factory=lambda: (i for i in ()))


def test_what_cannot_be_saved_is_named_with_the_reason():
    task = Task(numbers=itertools.count(), handle=Handle(), large=np.zeros(4))
    state = PythonState(SingleRank(), [Root("task", task, max_bytes=1000)])
    assert list(state.unsaved()) == ["task.numbers", "task.handle.lock"]
    task.large = np.zeros(1000)
    task.handle.count = 3

    assert state.unsaved() == {
        "task.numbers": "a count",
        "task.handle.lock": "a generator",
        "task.large": "0 MiB",
    }
    resumed = Task(numbers=itertools.count(), handle=Handle(), large=np.zeros(4))
    new = state_of(resumed)
    new.load([saved(state)])

    assert resumed.handle.count == 3
    assert [each.partition(" ")[0] for each in new.not_restored] == [
        "task.numbers",
        "task.handle.lock",
        "task.large",
    ]


def test_a_value_whose_place_is_gone_is_named():
    task = Task(config=SimpleNamespace(tau=1.0))
    state = state_of(task)
    task.config.tau = 2.0
    new = state_of(Task())

    new.load([saved(state)])

    assert "config" in new.not_restored[0]


def test_the_state_of_a_generator_needs_a_generator():
    task = Task(generator=random.Random(1))
    state = state_of(task)
    task.generator.random()

    with pytest.raises(CheckpointError, match="random generator, and the job has none"):
        state_of(Task(generator=None)).load([saved(state)])


# -- ranks


def on(size, change):
    """The state of each rank after a change by its number."""

    def act(world):
        task = Task(shared=0, own=0)
        state = state_of(task, world=world)
        change(task, world.rank)
        return state.differences(), state.take(), state

    return on_ranks(size, act)


def test_values_that_differ_between_ranks_are_found_with_two_ranks():
    def change(task, rank):
        task.shared = 1
        task.own = 0.5 * rank

    for differences, _, _ in on(3, change):
        assert differences == {"task.own": "0.0 on rank 0, 0.5 on rank 1"}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda rank: f"secret-{rank}", "a str"),
        (lambda rank: [rank], "a list"),
        (lambda rank: np.full(3, rank), "an array of shape [3]"),
        (lambda rank: torch.tensor(1.5 if rank else 1.5001), "1.5"),
    ],
)
def test_only_numbers_are_shown(make, text):
    for differences, _, _ in on(2, lambda task, rank: vars(task).update(own=make(rank))):
        assert differences["task.own"].endswith(f"{text} on rank 1")
        assert "secret" not in differences["task.own"]


def test_rank_0_saves_for_all_unless_they_differ():
    equal = on(3, lambda task, _: vars(task).update(shared=1))
    different = on(3, lambda task, rank: vars(task).update(own=rank // 2))

    assert [bool(taken) for _, taken, _ in equal] == [True, False, False]
    assert [bool(taken) for _, taken, _ in different] == [False, False, True]


@pytest.mark.parametrize(("size", "owns"), [(2, [0, 1]), (4, [0, 1, 0, 0])])
def test_a_rank_resumes_with_its_own_state_or_that_of_rank_0(size, owns):
    of_ranks = [taken for _, taken, _ in on(2, lambda task, rank: vars(task).update(shared=7, own=rank))]

    def act(world):
        task = Task(shared=0, own=0)
        left = state_of(task, world=world).load([*of_ranks])
        return task.shared, task.own, left

    assert on_ranks(size, act) == [(7, own, [{}, {}]) for own in owns]


def test_generators_and_data_sets_are_not_compared():
    def act(world):
        task, data = Task(generator=random.Random(1)), Task(reads=0)
        state = PythonState(world, [Root("task", task), Root("data", data, is_shared=False)])
        for _ in range(world.rank):
            task.generator.random()
            data.reads += 1
        return state.differences()

    assert on_ranks(2, act) == [{}, {}]


# -- fingerprints


def test_reading_data_does_not_move_their_generators():
    data = Task(generator=np.random.default_rng(3), reads=0, cache={})
    state = state_of(data)

    with state.kept():
        first = data.generator.random()
        data.reads += 1
        data.cache[1] = "x"

    assert (data.generator.random(), data.reads, data.cache) == (first, 0, {})


@pytest.mark.parametrize(
    "value",
    [np.zeros(WHOLE_BYTES), torch.zeros(WHOLE_BYTES), [0.0] * (2 * WHOLE_LENGTH)],
    ids=["array", "tensor", "list"],
)
def test_a_large_value_that_changes_somewhere_has_another_fingerprint(value):
    before = fingerprint(value, by_identity=True)
    assert fingerprint(value, by_identity=True) == before
    value[-1] = 1.0

    assert fingerprint(value, by_identity=True) != before


def test_a_value_that_contains_itself_is_not_plain():
    loop: list[Any] = []
    loop.append(loop)

    assert not is_plain(loop)
    assert not is_plain({"a": object()})
    assert is_plain({"a": [1, {2: (None, torch.ones(2))}]})
