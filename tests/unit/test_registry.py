"""What can be named in a job: rows of ours, rows of other packages, and what it takes to add one."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from horovod_train import registry
from horovod_train.errors import UnknownNameError, UserError
from horovod_train.launch.base import Launcher
from horovod_train.registry import CODECS, HOOKS, LAUNCHERS, STRATEGIES, TRACKERS, Registry

PACKAGE = Path(registry.__file__).parent


@pytest.fixture
def table():
    return Registry("codec", "horovod_train.codecs", {"ours": "json:dumps"})


def offered(monkeypatch, **rows):
    def entry_points(group):
        return [EntryPoint(name, value, group) for name, value in rows.items()]

    monkeypatch.setattr(registry, "entry_points", entry_points)


def test_a_row_of_ours_needs_no_look_at_other_packages(monkeypatch, table):
    monkeypatch.setattr(registry, "entry_points", lambda **_: pytest.fail("that takes long"))

    assert table.location("ours") == "json:dumps"


def test_other_packages_add_rows_and_replace_none(monkeypatch, table):
    offered(monkeypatch, theirs="json:loads", ours="os:remove")

    assert table.load("theirs")("[1]") == [1]
    assert table.location("ours") == "json:dumps"
    assert table.rows == {"theirs": "json:loads", "ours": "json:dumps"}


def test_a_name_that_nobody_has_is_answered_with_those_there_are(monkeypatch, table):
    offered(monkeypatch, theirs="json:loads")

    with pytest.raises(UnknownNameError, match=r"(?s)our.*"):
        table.location("our")


@pytest.mark.parametrize(
    ("value", "said"), [("no_such_module:X", "cannot import"), ("json:no_such", "has no 'no_such'")]
)
def test_a_broken_row_is_an_error_for_who_names_it(monkeypatch, table, value, said):
    offered(monkeypatch, theirs=value)

    with pytest.raises(UserError, match=f"codec 'theirs'.*{said}"):
        table.load("theirs")
    assert table.load("ours")([1]) == "[1]"


@pytest.mark.parametrize("table", [LAUNCHERS, CODECS, STRATEGIES], ids=lambda table: table.kind)
def test_a_class_with_a_former_name_of_a_member_is_refused_with_the_new_name(monkeypatch, table):
    for old, new in table.renamed.items():
        monkeypatch.setattr(Theirs, old, None, raising=False)
        with pytest.raises(UserError, match=f"defines '{old}', which is called '{new}' now"):
            table.make(f"{__name__}:Theirs", lambda kind: kind(), args_field="args")
        monkeypatch.delattr(Theirs, old)

    assert isinstance(table.make(f"{__name__}:Theirs", lambda kind: kind(), args_field="args"), Theirs)
    changes = (PACKAGE.parent / "CHANGELOG.md").read_text()
    assert all(f"| `{old}` | `{new}` |" in changes for old, new in table.renamed.items())


class Theirs:
    """A class of another package."""


@pytest.mark.parametrize("name", LAUNCHERS.builtin)
def test_a_launcher_is_made_without_arguments_and_has_what_is_called(name):
    launcher = LAUNCHERS.load(name)()

    for method, called in inspect.getmembers(Launcher, inspect.isfunction):
        if not method.startswith("_"):
            wanted = list(inspect.signature(called).parameters)
            given = list(inspect.signature(getattr(type(launcher), method)).parameters.values())
            assert [parameter.name for parameter in given[: len(wanted)]] == wanted, method
            assert all(parameter.default is not parameter.empty for parameter in given[len(wanted) :]), method
    assert isinstance(launcher.has_local_files, bool)


@pytest.mark.parametrize(
    "location",
    [
        STRATEGIES.location("local_sgd"),
        CODECS.location("top-k"),
        LAUNCHERS.location("slurm-allocation"),
        TRACKERS.location("csv"),
        next(hook for hook in HOOKS if ".track:" in hook),
    ],
)
def test_what_is_added_is_one_file_and_one_row(location):
    """No other file of the package knows the module; so the next one takes as much."""
    module = location.partition(":")[0]
    own = PACKAGE.parent / Path(*module.split(".")).with_suffix(".py")
    pattern = re.compile(rf"\b{re.escape(module.rpartition('.')[2])}\b")

    knowing = {
        file for file in PACKAGE.rglob("*.py") if any(map(pattern.search, imports_and_rows(file.read_text())))
    }

    assert own.is_file()
    assert knowing - {own} == {PACKAGE / "registry.py"}


def imports_and_rows(text):
    return [line for line in text.splitlines() if "import" in line or '"horovod_train.' in line]
