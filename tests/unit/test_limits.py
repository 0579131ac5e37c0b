"""How long files and functions may be, how often ``Any`` is used, and what is imported or caught where."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "horovod_train"
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
MAX_FILE_LINES = 900
MAX_FUNCTION_LINES = 60
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of(node: ast.AST) -> int:
    """Return how many lines a function has."""
    return node.end_lineno - node.lineno + 1


def names_of_any(trees: list[ast.Module]) -> set[str]:
    """Return ``Any`` and the names of types that have ``Any`` in them, or another of these names."""
    names = {"Any"}
    while True:
        more = {
            node.targets[0].id
            for tree in trees
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Name | ast.Subscript | ast.BinOp)
            and any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node.value))
        }
        if more <= names:
            return names
        names |= more


def count_any(tree: ast.Module, names: set[str]) -> int:
    """Return how often one of the names is used in a file, or ``typing.Any``."""
    return sum(
        (isinstance(node, ast.Name) and node.id in names)
        or (isinstance(node, ast.Attribute) and node.attr == "Any")
        for node in ast.walk(tree)
    )


def test_files_are_short():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in TREES}

    assert {path.name: n for path, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_functions_are_short():
    lengths = {
        f"{path.name}: {node.name}": lines_of(node)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS)
    }

    assert {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES} == {}


CLASSES: dict[str, list[ast.ClassDef]] = {}
for each in (node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
    CLASSES.setdefault(each.name, []).append(each)


def documented_by(node: ast.ClassDef, seen: frozenset[ast.ClassDef] = frozenset()) -> set[str]:
    """Return the names of the methods that a class and its bases in this package document."""
    found = {each.name for each in node.body if isinstance(each, FUNCTIONS) and ast.get_docstring(each)}
    for base in (part for each in node.bases for part in ast.walk(each)):
        for known in CLASSES.get(getattr(base, "id", getattr(base, "attr", "")), ()):
            if known not in seen | {node}:
                found |= documented_by(known, seen | {node})
    return found


def test_each_public_method_is_documented_where_it_is_introduced():
    undocumented = [
        f"{node.name}.{method.name}"
        for nodes in CLASSES.values()
        for node in nodes
        if not node.name.startswith("_")
        for method in node.body
        if isinstance(method, FUNCTIONS)
        and not method.name.startswith("_")
        and method.name not in documented_by(node)
        and not any(getattr(each, "attr", "") in {"overload", "setter"} for each in method.decorator_list)
    ]

    assert undocumented == []


UNTYPED = {"frameworks", "plugins"}  # the package that handles what frameworks have made


@pytest.mark.parametrize(("inside", "limit"), [(False, 3), (True, 30)], ids=["elsewhere", "frameworks"])
def test_any_is_rare(inside, limit):
    chosen = {path: tree for path, tree in TREES.items() if bool(UNTYPED & set(path.parts)) is inside}
    names = names_of_any(list(chosen.values()))
    num_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in chosen)

    assert sum(count_any(tree, names) for tree in chosen.values()) / num_lines * 1000 <= limit


def test_aliases_of_any_count():
    tree = ast.parse("Tree = dict[str, Any]\nForest = list[Tree]\ndef f(x: Forest) -> typing.Any: ...")

    names = names_of_any([tree])

    assert names == {"Any", "Tree", "Forest"}
    assert count_any(tree, names) == 6


BROAD = {"Exception", "BaseException"}
BROAD_EXCEPTS = {
    "errors.py": 2,  # the two helpers for code that may raise any exception: a user's, or a driver's
    "worker.py": 1,  # the end of a rank: each exception is reported, with its exit code
    "launch/hosts/agent.py": 1,  # the launcher decides what an error of an action means
    "launch/launchers/hosts.py": 1,  # the end of a launch: its state is written, whatever ended it
    "plugins/keras/data.py": 1,  # the exception is raised again; TensorFlow must not read on after it
    "plugins/jax/framework.py": 1,  # a callback of XLA: the error is raised again after the computation
    "plugins/jax/in_place.py": 1,  # a callback of C: nothing else would carry the error on
}


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler catches every exception."""
    names = (
        {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} if handler.type else BROAD
    )
    return bool(names & BROAD)


def test_few_places_catch_every_exception():
    found = {
        str(path.relative_to(PACKAGE)): number
        for path, tree in TREES.items()
        if (number := sum(is_broad(n) for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler)))
    }

    assert found == BROAD_EXCEPTS


LAZY_IMPORTS = {
    "events/file.py": 1,  # NumPy, which clients do not need
    "frameworks/torch/comm/buckets.py": 1,  # DTensor takes long to import, and few models have one
    "frameworks/torch/comm/collectives.py": 1,  # importing mpi4py starts MPI
    "worker.py": 1,  # a script's rank must not import a framework before the script does
}


def test_few_functions_import_modules():
    """Except commands, which import what they need, and the registry; optional packages have one helper."""
    found = {}
    for path, tree in TREES.items():
        name = str(path.relative_to(PACKAGE))
        inside = {
            node
            for function in ast.walk(tree)
            if isinstance(function, FUNCTIONS)
            for node in ast.walk(function)
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        if inside and not name.startswith("cli/") and path.name != "command.py":
            found[name] = len(inside)

    assert found == LAZY_IMPORTS
