"""What can be named in a job: rows of ours, rows of other packages, and what it takes to add one."""

from __future__ import annotations

import ast
import inspect
import re
from copy import deepcopy
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from horovod_train import registry
from horovod_train.config.load import job_from
from horovod_train.errors import ConfigError, UnknownNameError, UserError
from horovod_train.launch.base import Launcher
from horovod_train.registry import (
    CODECS,
    LAUNCHERS,
    STRATEGIES,
    TRACKERS,
    Registry,
    optimizers_of,
)

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


def test_a_row_whose_module_fails_affects_only_jobs_that_use_it(monkeypatch, tmp_path, table):
    (tmp_path / "broken_package.py").write_text("import json\njson.no_such\n")
    monkeypatch.syspath_prepend(tmp_path)
    offered(monkeypatch, theirs="broken_package:SUPPORT")

    assert table.support_or_none("theirs") is None
    with pytest.raises(UserError, match=r"cannot import 'broken_package': AttributeError: .*no_such"):
        table.load("theirs")


def test_a_class_is_made_from_a_file(tmp_path):
    file = tmp_path / "own_optimizers.py"
    file.write_text("def twice(lr):\n    return 2 * lr\n")
    table = optimizers_of("torch")

    assert table.make(f"{file}:twice", lambda factory: factory(lr=0.5), args_field="optimizer.args") == 1.0
    with pytest.raises(UserError, match="has no 'thrice'"):
        table.make(f"{file}:thrice", lambda factory: factory(), args_field="optimizer.args")


@pytest.mark.parametrize(
    ("path", "section"),
    [
        ("optimizer.name", {"optimizer": {"name": "own.py:Made"}}),
        ("allreduce.codec.name", {"allreduce": {"codec": {"name": "own.py:Made"}}}),
        ("metrics.trackers.0.name", {"metrics": {"trackers": [{"name": "own.py:Made"}]}}),
    ],
)
def test_a_file_is_found_beside_the_job(tmp_path, path, section):
    (tmp_path / "own.py").write_text("class Made: pass\n")
    fields = {"name": "j", "task": "digits", "lr": {"scaling": "none"}, **section}
    tree = job_from(deepcopy(fields), tmp_path, "job.yaml", environ={}).model_dump(mode="json")
    for part in path.split("."):
        tree = tree[int(part) if part.isdecimal() else part]

    assert tree == f"{tmp_path}/own.py:Made"
    (tmp_path / "own.py").unlink()
    with pytest.raises(ConfigError) as error:
        job_from(fields, tmp_path, "job.yaml", environ={})
    assert [problem.path for problem in error.value.problems] == [path]


@pytest.mark.parametrize("name", LAUNCHERS.builtin)
def test_a_launcher_is_made_without_arguments_and_has_what_is_called(name):
    launcher = LAUNCHERS.load(name)()

    for method, called in inspect.getmembers(Launcher, inspect.isfunction):
        if not method.startswith("_"):
            wanted = list(inspect.signature(called).parameters)
            given = list(inspect.signature(getattr(type(launcher), method)).parameters.values())
            assert [parameter.name for parameter in given[: len(wanted)]] == wanted, method
            assert all(parameter.default is not parameter.empty for parameter in given[len(wanted) :]), method
    assert all(isinstance(getattr(launcher, name), bool) for name in Launcher.__annotations__)


ROWS = [
    (name, location)
    for table in (LAUNCHERS, STRATEGIES, CODECS, TRACKERS)
    for name, location in table.builtin.items()
    if location.startswith("horovod_train.plugins.") and name != "pipeline"  # which `mesh` is made of
]


@pytest.mark.parametrize(("name", "location"), ROWS, ids=[name for name, _ in ROWS])
def test_what_is_added_is_one_file_or_folder_and_one_row(name, location):
    """No other file of the package names it or imports it; so the next one takes as much."""
    module = location.partition(":")[0]
    own = PACKAGE.parent / Path(*module.split("."))
    others = [file for file in PACKAGE.rglob("*.py") if own not in file.parents]

    knowing = {file for file in others if names_in(file) & {name, location} or module in imported_by(file)}

    assert knowing - {own.with_suffix(".py")} == {PACKAGE / "registry.py"}


@cache
def names_in(file):
    """The strings in a file."""
    tree = ast.parse(file.read_text())
    return {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is str
    }


@cache
def imported_by(file):
    """The modules of this package that a file imports, and the packages in which they are."""
    tree = ast.parse(file.read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    return {name.rsplit(".", depth)[0] for name in names for depth in range(name.count("."))}


def locations():
    """Every ``module:name`` in the source of this package."""
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        own = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = file.read_text().replace("{__name__}", own)
        for found in re.findall(r"\"(horovod_train(?:\.\w+)+:\w+)\"", text):
            yield pytest.param(found, id=f"{file.name} {found}")


@pytest.mark.parametrize("location", list(locations()))
def test_what_is_named_by_its_location_is_there(location):
    """Without importing it: it may need another package."""
    module, _, name = location.partition(":")
    path = PACKAGE.parent / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(file.read_text())
    defined = {
        name.id
        for node in tree.body
        for target in (node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)])
        for name in ast.walk(target or ast.Pass())
        if isinstance(name, ast.Name)
    } | {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}

    assert name in defined
