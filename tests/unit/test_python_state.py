"""State in Python of a task: found, compared between ranks, saved and restored."""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from enum import Enum
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.worlds import on_ranks
from torch import nn

from horovod_train.checkpoint.arrays import dump_state, parse_state
from horovod_train.collectives.base import SingleRank
from horovod_train.frameworks import python_state
from horovod_train.frameworks.plain_data import WHOLE_BYTES, WHOLE_LENGTH, fingerprint, is_plain
from horovod_train.frameworks.python_state import MAX_BYTES_OF_DATA, PythonState, Root

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


def changed(state: PythonState) -> list[str]:
    return [member.name for member in state.changed()[0].values()]


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
    assert changed(state) == []
    assert state.take() == {}
    task.value = after
    blobs = saved(state)

    resumed = Task(value=copy.deepcopy(before))
    new = state_of(resumed)
    new.load([blobs])

    assert is_same(resumed.value, after)
    assert new.examined()[0] == state.examined()[0]
    assert changed(new) == ["task.value"]
    assert new.not_restored == []


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

    assert changed(state) == [
        "model.scale",
        "model.cache",
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


class Phase(Enum):
    WARM = 1
    HOT = 2


@dataclass(frozen=True)
class Constant:
    tau: float


Pair = namedtuple("Pair", "a b")  # noqa: PYI024
LOW, HIGH = Constant(1.0), Constant(2.0)


class Attrs(dict):
    __getattr__ = dict.__getitem__


class Proxy:
    def __getattr__(self, name):
        raise RuntimeError(name)


class Slots:
    __slots__ = ("k",)


@pytest.mark.parametrize(
    ("make", "change", "reason"),
    [
        (lambda: None, lambda task: setattr(task, "it", Lock()), "a lock"),
        (lambda: None, lambda task: setattr(task, "it", "/tmp/folder"), "a str"),  # noqa: S108
        (lambda: None, lambda task: setattr(task, "it", "x" * 40), "a str"),
        (lambda: None, lambda task: setattr(task, "it", Constant(3.0)), "a Constant"),
        (lambda: LOW, lambda task: setattr(task, "it", HIGH), "a Constant"),
        (itertools.count, lambda task: None, "a count"),
        (lambda: np.zeros(4), lambda task: setattr(task, "it", np.zeros(2**18)), "2 MiB"),
        (lambda: [Constant(1.0)], lambda task: task.it.append(3), "a list"),
        (lambda: 5, lambda task: delattr(task, "it"), "it was removed"),
        (lambda: 5, lambda task: setattr(task, "it", 2**5000), "a int"),
        (lambda: 5, lambda task: setattr(task, "it", np.str_("x")), "a str_"),
    ],
)
def test_attributes_of_an_object_are_saved_together_or_not_at_all(make, change, reason):
    """Others may describe what cannot be saved: whether a file is open, which shard is loaded."""

    def made():
        task = Task(config=SimpleNamespace(tau=1.0), number=0, it=make())
        return task, PythonState(SingleRank(), [Root("task", task, max_bytes=2**20)])

    task, state = made()
    change(task)
    task.number, task.config.tau = 1, 2.0

    assert state.examined()[1] == {"task.it": reason, "task.number": "its object is not saved"}
    resumed, new = made()
    new.load([saved(state)])

    assert (resumed.number, resumed.config.tau) == (0, 2.0)
    assert new.not_restored == [f"task.it ({reason})", "task.number (its object is not saved)"]
    assert (LOW.tau, HIGH.tau) == (1.0, 2.0)


@pytest.mark.parametrize(
    "value",
    [
        Attrs(a=1),
        Proxy(),
        Slots(),
        torch.eye(2).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
        nn.LazyLinear(3),
        random.SystemRandom(),
        np.ma.masked_array([1.0], [True]),
        np.array(["a"]),
        np.array([None]),
        sys,
        int,
        print,
        Lock(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_of_any_type_may_be_an_attribute(value):
    task, resumed = Task(value=value, k=0), Task(value=value, k=0)
    state, new = state_of(task), state_of(resumed)
    task.k = 1

    new.load([saved(state)])

    assert (resumed.k, state.examined()[1], new.not_restored) == (1, {}, [])


def test_members_of_enumerations_and_named_tuples_are_exchanged():
    task, resumed = (Task(phase=Phase.WARM, pair=Pair(1, 2)) for _ in range(2))
    state, new = state_of(task), state_of(resumed)
    task.phase, task.pair = Phase.HOT, Pair(3, [4])

    new.load([saved(state)])

    assert resumed.phase is Phase.HOT
    assert resumed.pair == Pair(3, [4])
    assert [phase.name for phase in Phase] == ["WARM", "HOT"]


def test_weights_of_the_model_are_not_state():
    def made():
        model = nn.LSTM(2, 2)
        task = Task(model=model, parameters=list(model.parameters()), named=dict(model.named_parameters()))
        return model, task, state_of(model, task)

    model, task, state = made()
    model(torch.ones(1, 2))[0].sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    task.last = model(torch.ones(1, 2))[0]

    assert state.changed() == ({}, {})


def test_generators_that_are_made_later_and_in_containers_continue():
    task, resumed = (Task(rng=None, all={"a": [random.Random(1)]}) for _ in range(2))
    state, new = state_of(task), state_of(resumed)
    task.rng = np.random.default_rng(3)
    task.rng.random()
    task.all["a"][0].random()
    own = resumed.all["a"][0]

    new.load([saved(state)])

    assert resumed.rng.random() == task.rng.random()
    assert resumed.all["a"][0] is own
    assert own.random() == task.all["a"][0].random()


def test_names_of_modules_and_attributes_do_not_meet():
    """A task of a module `task`, whose variables have the names of its attributes."""
    task, resumed = Task(k=0), Task(k=0)
    state, new = (
        PythonState(SingleRank(), [Root(__name__, task)]),
        PythonState(SingleRank(), [Root(__name__, resumed)]),
    )
    task.k = 1

    new.load([saved(state)])

    assert resumed.k == 1
    assert "k" not in globals()


def test_values_that_had_not_changed_at_the_checkpoint_are_set_back():
    task = Task(a=0, b=[0])
    state = state_of(task)
    task.a = 1
    blobs = saved(state)
    task.a, task.b[0] = 2, 5

    state.load([blobs])

    assert (task.a, task.b) == (1, [0])


def test_many_layers_do_not_hide_the_task(monkeypatch):
    monkeypatch.setattr(python_state, "MAX_OBJECTS", 10)
    model, task = nn.Sequential(*(nn.Linear(1, 1) for _ in range(20))), Task(k=0)
    state = state_of(model, task)
    task.k = 1

    assert changed(state) == ["task.k"]
    assert state.examined()[1] == {"model": "it has too many objects"}


def test_a_data_set_with_a_cache_is_neither_saved_nor_reported():
    data = Task(cache={}, file=None, reads=0)
    root = Root("train_data", data, is_shared=False, max_bytes=MAX_BYTES_OF_DATA, is_reported=False)
    state = PythonState(SingleRank(), [root])
    data.cache[0] = np.zeros(2**18)

    assert state.changed() == ({}, {})


def test_a_value_whose_place_is_gone_is_named():
    task = Task(config=SimpleNamespace(tau=1.0))
    state = state_of(task)
    task.config.tau = 2.0
    new = state_of(Task())

    new.load([saved(state)])

    assert new.not_restored[0].startswith("task.config.tau (")


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


class HasTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.zeros(4)


@pytest.mark.parametrize(
    ("read", "sizes", "expected"),
    [
        ({"model.table"}, [4, 4], ["model.table"]),
        ({"model.table"}, [4, 6], []),  # grows with the longest sequence
        ({"model.table"}, [0, 4], ["model.table"]),  # has changed on one rank only
        (set(), [4, 4], []),  # an activation
    ],
)
def test_tensors_of_modules_are_compared_if_passes_read_them(read, sizes, expected):
    def rank(world):
        model = HasTable()
        state = state_of(model, world=world)
        state.read |= read
        if size := sizes[world.rank]:
            model.table = torch.full((size,), float(world.rank + 1))
        return list(state.differences())

    assert on_ranks(2, rank) == [expected] * 2


def test_rank_0_saves_for_all_unless_they_differ():
    equal = on(3, lambda task, _: vars(task).update(shared=1))
    different = on(3, lambda task, rank: vars(task).update(own=rank // 2))

    assert [bool(taken) for _, taken, _ in equal] == [True, False, False]
    assert [bool(taken) for _, taken, _ in different] == [False, False, True]


def test_only_values_that_differ_are_saved_by_other_ranks():
    def act(world):
        task = Task(large=torch.zeros(1000), own=0)
        state = state_of(task, world=world)
        task.large += 1
        task.own = world.rank
        return sum(len(blob.data) for blob in state.take().values())

    first, second = on_ranks(2, act)
    assert first > 4000
    assert second < 500


def test_further_ranks_keep_their_own_generators():
    def act(world):
        task = Task(generator=random.Random(world.rank), k=0)
        state = state_of(task, world=world)
        if of_ranks is None:
            task.generator.random()
            task.k = 7
            return state.take()
        state.load(of_ranks)
        return task.k, task.generator.random()

    of_ranks = None
    of_ranks = on_ranks(2, act)

    found = on_ranks(3, act)

    assert [k for k, _ in found] == [7, 7, 7]
    assert found[2][1] == random.Random(2).random()
    assert len({value for _, value in found}) == 3


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
    data = Task(generator=np.random.default_rng(3), reads=0)
    state = state_of(data)

    with state.kept():
        first = data.generator.random()
        data.reads += 1

    assert (data.generator.random(), data.reads) == (first, 1)


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
