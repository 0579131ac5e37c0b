"""Change one thing in the core code, see that a unit test fails; three hundred times. `make mutants` runs it.

The mutation operators are Cosmic Ray's (https://github.com/sixty-north/cosmic-ray), and one more: a call that
stands for itself is left out. Places are drawn with a seed, one mutant each. A mutant is tried with the unit
tests that reach its line, the quickest first, in a process forked from one that has imported the libraries.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import difflib
import json
import math
import os
import py_compile
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import cache_from_source
from itertools import accumulate
from pathlib import Path

import parso
import pytest
from cosmic_ray.ast import ast_nodes
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.operators.provider import OperatorProvider

from horovod_train.system.machine import usable_cores

ROOT = Path(__file__).parent.parent
CORE = (
    *("data", "lr", "checkpoint", "health", "training", "telemetry", "frameworks/torch", "config"),
    "launch",
)
NOT_USED = {
    # These need arguments.
    "VariableReplacer",
    "VariableInserter",
    # These change what no test can see: an abstract method's decorator, equality of what is one object.
    "RemoveDecorator",
    "ReplaceComparisonOperator_Eq_Is",
    "ReplaceComparisonOperator_Is_Eq",
    "ReplaceComparisonOperator_NotEq_IsNot",
    "ReplaceComparisonOperator_IsNot_NotEq",
}
REACHED = "tests.json"
FORK_FAILED = 70
SAME_FILE_LIMIT_S = 30.0
IMPORTED_LIMIT_S = 120.0
PYTEST = ("-q", "--no-header", "--durations=0", "--durations-min=9")


class DropCall(Operator):
    """Leave out a call whose result nobody uses."""

    def mutation_positions(self, node):
        if node.type == "simple_stmt" and node.children[0].type == "atom_expr":
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node, index):
        call = node.children[0]
        node.children[0] = parso.python.tree.Keyword("pass", call.start_pos, call.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls):
        return ()


@cache
def operators() -> dict[str, Operator]:
    provider = OperatorProvider()
    found = {name: provider[name]() for name in sorted(provider) if name not in NOT_USED}
    return {**found, "DropCall": DropCall()}


@dataclass(frozen=True)
class Mutant:
    """One change: the text of a file with it, and what it is."""

    path: str
    operator: str
    occurrence: int
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line} ({self.operator})"

    def text(self) -> str | None:
        """Return the changed file; None: it would be no Python."""
        source = (ROOT / self.path).read_text(encoding="utf-8")
        # The operator for exceptions stumbles over names with a dot.
        with suppress(SyntaxError, AttributeError):
            changed = mutate_code(source, operators()[self.operator], self.occurrence)
            with warnings.catch_warnings(action="ignore"):
                compile(changed, self.path, "exec")
            return changed
        return None

    def difference(self) -> str:
        before = (ROOT / self.path).read_text(encoding="utf-8").splitlines()
        lines = difflib.unified_diff(before, self.text().splitlines(), n=0, lineterm="")
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


# -- places: what can be changed


def left_to_the_type_checker(tree: ast.AST) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return begin and end of annotations, and of decorators: what is not frozen works as well."""
    annotations = [
        part
        for node in ast.walk(tree)
        for name in ("annotation", "returns")
        if (part := getattr(node, name, None)) is not None
    ]
    decorators = [part for node in ast.walk(tree) for part in getattr(node, "decorator_list", [])]
    return [
        ((part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset))
        for part in (*annotations, *decorators)
    ]


def places(path: str) -> dict[tuple, list[Mutant]]:
    """Return the places of a file where something can be changed, each with its mutants."""
    source = (ROOT / path).read_text(encoding="utf-8")
    nodes = list(ast_nodes(parso.parse(source)))
    skipped = left_to_the_type_checker(ast.parse(source))
    found = defaultdict(list)
    for name, operator in operators().items():
        positions = [position for node in nodes for position in operator.mutation_positions(node)]
        for occurrence, (begin, end) in enumerate(positions):
            if not any(first <= begin and end <= last for first, last in skipped):
                found[begin, end].append(Mutant(path, name, occurrence, begin[0]))
    return found


def draw(seed: int, count: int) -> list[Mutant]:
    """Draw places among all of the core's, and a mutant of each."""
    chance = random.Random(seed)
    files = sorted(
        str(p.relative_to(ROOT)) for room in CORE for p in (ROOT / "horovod_train" / room).rglob("*.py")
    )
    at = [place for path in files for _, place in sorted(places(path).items())]
    chance.shuffle(at)
    drawn = (chance.choice(mutants) for mutants in at)
    found: list[Mutant] = []
    for mutant in drawn:
        if len(found) == count:
            break
        if mutant.text() is not None:
            found.append(mutant)
    return found


# -- tests: who would notice


# In programs that tests start, coverage starts by itself; the test is in their environment.
COVERAGE = """
[run]
source = {folder}/horovod_train
concurrency = thread
parallel = true
data_file = {folder}/reached
context = ${{REACHED_BY-}}
patch = _exit
"""


class Reached:
    """A plugin of pytest: which test reaches which lines, and how long it takes."""

    def __init__(self, folder: Path) -> None:
        import coverage

        config = folder / "coverage.ini"
        config.write_text(COVERAGE.format(folder=folder))
        self.coverage = coverage.Coverage(config_file=str(config), messages=False)
        os.environ["COVERAGE_PROCESS_START"] = str(config)
        self.folder = folder
        self.duration_s: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        start = time.monotonic()
        self.coverage.switch_context(item.nodeid)
        os.environ["REACHED_BY"] = item.nodeid
        try:
            return (yield)
        finally:
            del os.environ["REACHED_BY"]
            self.coverage.switch_context("")
            self.duration_s[item.nodeid] = time.monotonic() - start

    def run(self, arguments: list[str]) -> int:
        self.coverage.start()
        code = pytest.main(arguments, plugins=[self])
        self.coverage.stop()
        self.coverage.save()
        self.coverage.combine()
        data = self.coverage.get_data()
        lines = {
            str(Path(name).relative_to(self.folder)): data.contexts_by_lineno(name)
            for name in data.measured_files()
        }
        (self.folder / REACHED).write_text(json.dumps({"lines": lines, "duration_s": self.duration_s}))
        return code


class Selected:
    """A plugin of pytest: these tests, in this order."""

    def __init__(self, tests: list[str]) -> None:
        self.order = {test: place for place, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda i: self.order[i.nodeid])


@dataclass
class Tests:
    """What is known of the unit tests."""

    lines: dict[str, dict[str, list[str]]]
    duration_s: dict[str, float]

    def reaching(self, mutant: Mutant) -> list[str]:
        """Return the tests that run a mutant's statement, the quickest first; then some that are near.

        A function that remembers its result is only run by its first test: others reach the same file. What
        runs at the import only (a constant, a field) is tried with tests that reach lines which name it, too,
        and then with those that reach the folder.
        """
        lines = self.lines.get(mutant.path, {})
        found = {test for line in statement_lines(mutant) for test in lines.get(str(line), [])} - {""}
        names = names_made_by(mutant)
        if found and not names:
            near = {test for tests in lines.values() for test in tests} - {"", *found}
            return [*self._quickest(found, math.inf), *self._quickest(near, SAME_FILE_LIMIT_S)]
        naming = {test for name in names for test in self._naming(name)} - {""}
        first = self._quickest(found | naming, IMPORTED_LIMIT_S)
        folder = str(Path(mutant.path).parent)
        files = [lines for path, lines in self.lines.items() if str(Path(path).parent) == folder]
        near = {test for lines in files for tests in lines.values() for test in tests} - {"", *first}
        left_s = IMPORTED_LIMIT_S - sum(self.duration_s[test] for test in first)
        return [*first, *self._quickest(near, left_s)]

    def _naming(self, name: str) -> Iterator[str]:
        """Yield the tests that reach a line with a name in it, or have it in their own."""
        yield from (test for test in self.duration_s if re.search(rf"\b{name}\b", test))
        for path, lines in self.lines.items():
            for number, text in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1):
                if re.search(rf"\b{name}\b", text):
                    yield from lines.get(str(number), [])

    def _quickest(self, tests: set[str], limit_s: float) -> list[str]:
        """Return tests, the quickest first, as many as take so long together."""
        order = sorted(tests, key=lambda test: self.duration_s[test])
        ends_s = accumulate(self.duration_s[test] for test in order)
        return [test for test, end_s in zip(order, ends_s, strict=True) if end_s <= limit_s]


def names_made_by(mutant: Mutant) -> list[str]:
    """Return the names to which a statement outside of functions gives a value."""
    tree = ast.parse((ROOT / mutant.path).read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda)]
    if any(node.lineno <= mutant.line <= node.end_lineno for node in functions):
        return []
    targets = [
        target
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.lineno <= mutant.line <= node.end_lineno
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def statement_lines(mutant: Mutant) -> range:
    """Return the lines of the innermost statement, of one with a body those before the body."""
    tree = ast.parse((ROOT / mutant.path).read_text(encoding="utf-8"))
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt | ast.excepthandler) and node.lineno <= mutant.line <= node.end_lineno
    ]
    inner = min(around, key=lambda node: (node.end_lineno - node.lineno, -node.lineno))
    body = getattr(inner, "body", None)
    last = body[0].lineno - 1 if body and body[0].lineno > inner.lineno else inner.end_lineno
    return range(inner.lineno, max(last, mutant.line) + 1)


# -- trials


def copy_of_the_tree(folder: Path) -> Path:
    """Copy what git knows or would take.

    It is compiled without regard to times, since a mutant may look as old as its original.
    """
    names = subprocess.run(
        ["git", "ls-files", "-zco", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    compileall.compile_dir(
        folder / "horovod_train", quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )
    return folder


def fork(folder: Path, log: Path, work) -> int:
    """Let a child of this process, which has imported the libraries, do some work in a folder."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = FORK_FAILED
    try:
        os.setsid()
        nowhere, output = (
            os.open(os.devnull, os.O_RDONLY),
            os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        )
        for number, target in enumerate((nowhere, output, output)):
            os.dup2(target, number)
        os.chdir(folder)
        # Programs that tests start find the changed files, too.
        sys.path[0] = os.environ["PYTHONPATH"] = str(folder)
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        import horovod_train

        assert Path(horovod_train.__file__).is_relative_to(folder)
        code = pytest.ExitCode.INTERNAL_ERROR  # what pytest itself stumbles over
        code = int(work())
    finally:
        sys.stdout.flush()
        os._exit(code)


@dataclass
class Trial:
    """A mutant that is being tried."""

    mutant: Mutant
    folder: Path
    log: Path
    tests: list[str]
    limit_s: float
    start: float = field(default_factory=time.monotonic)
    pid: int = 0

    def begin(self) -> None:
        (self.folder / self.mutant.path).write_text(self.mutant.text(), encoding="utf-8")
        Path(cache_from_source(str(self.folder / self.mutant.path))).unlink(missing_ok=True)
        files = sorted({test.partition("::")[0] for test in self.tests})
        arguments = [*PYTEST, "-x", *files]
        self.pid = fork(self.folder, self.log, lambda: pytest.main(arguments, plugins=[Selected(self.tests)]))

    def is_killed(self) -> bool | None:
        """Tell whether a test failed; nothing as long as nobody knows. Tests that hang have noticed."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0 and time.monotonic() - self.start < self.limit_s:
            return None
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if pid == 0:
            os.waitpid(self.pid, 0)
        shutil.copy2(ROOT / self.mutant.path, self.folder / self.mutant.path)
        code = os.waitstatus_to_exitcode(status)
        if code == FORK_FAILED:
            sys.exit(f"{self.log.read_text()}\nerror: the unit tests cannot be started")
        return pid == 0 or code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def trials(
    mutants: list[Mutant], tests: Tests, folders: list[Path], limit_s: float
) -> Iterator[tuple[Mutant, bool]]:
    """Try mutants, one in each folder at a time; yield each with whether it was killed."""
    deadline = time.monotonic() + limit_s
    free, running = list(folders), []
    waiting = list(reversed(mutants))
    while waiting or running:
        if time.monotonic() > deadline:
            sys.exit(f"error: {len(waiting)} mutants were not tried within {limit_s:.0f} s")
        while free and waiting:
            mutant = waiting.pop()
            reaching = tests.reaching(mutant)
            if not reaching:
                yield mutant, False
                continue
            folder = free.pop()
            duration_s = sum(tests.duration_s[test] for test in reaching)
            running.append(Trial(mutant, folder, folder.with_suffix(".log"), reaching, 30 + 3 * duration_s))
            running[-1].begin()
        for trial in list(running):
            if (killed := trial.is_killed()) is not None:
                running.remove(trial)
                free.append(trial.folder)
                yield trial.mutant, killed
        time.sleep(0.02)


def known(kept: Path | None) -> Tests | None:
    """Return what a run before has measured. Tests written since are tried with no mutant."""
    return Tests(**json.loads(kept.read_text())) if kept and kept.exists() else None


def measure(folder: Path, kept: Path | None) -> Tests:
    """Run all unit tests once, as they are."""
    log = folder.with_suffix(".log")
    pid = fork(folder, log, lambda: Reached(folder).run([*PYTEST, "tests/unit"]))
    _, status = os.waitpid(pid, 0)
    if status:
        sys.exit(f"{log.read_text()}\nerror: the unit tests have to pass before anything is changed")
    if kept:
        shutil.copy(folder / REACHED, kept)
    return Tests(**json.loads((folder / REACHED).read_text()))


def warm() -> None:
    """Import what takes long and is not changed; without threads, which a fork would lose."""
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    import click  # noqa: F401
    import numpy as np  # noqa: F401
    import prometheus_client  # noqa: F401
    import psutil  # noqa: F401
    import pydantic  # noqa: F401
    import rich.console  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch.utils.data  # noqa: F401
    import yaml  # noqa: F401


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=320)
    parser.add_argument("--least", type=float, default=0.85, help="fail if less are killed (default: 0.85)")
    parser.add_argument("--limit-s", type=float, default=2700)
    parser.add_argument("--jobs", type=int, default=usable_cores())
    parser.add_argument("--reached", type=Path, help="file for which test reaches what: kept for next time")
    parser.add_argument("--again", type=Path, help="output of a run before: try what has survived there")
    options = parser.parse_args()
    start = time.monotonic()
    warm()
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        folders = [copy_of_the_tree(Path(name) / str(place)) for place in range(options.jobs)]
        tests = known(options.reached) or measure(folders[0], options.reached)
        print(f"{len(tests.duration_s)} unit tests pass, {time.monotonic() - start:.0f} s", flush=True)
        mutants = draw(options.seed, options.count)
        if options.again:
            survived = options.again.read_text()
            mutants = [mutant for mutant in mutants if f": {mutant}\n" in survived]
            if not mutants:
                sys.exit(f"error: {options.again} names no survivor of this seed")
        killed, all_of = Counter(), Counter()
        for mutant, is_killed in trials(mutants, tests, folders, options.limit_s):
            room = next(room for room in CORE if mutant.path.startswith(f"horovod_train/{room}/"))
            all_of[room] += 1
            killed[room] += is_killed
            if not is_killed:
                number = all_of.total() - killed.total()
                print(f"\nsurvivor {number} of {all_of.total()}: {mutant}\n{mutant.difference()}", flush=True)
    print()
    for room in CORE:
        print(f"{room:20} {killed[room]:4} of {all_of[room]:4} killed")
    share = killed.total() / all_of.total()
    print(f"{'all':20} {killed.total():4} of {all_of.total():4} killed: {share:.1%}")
    print(f"seed {options.seed}, {time.monotonic() - start:.0f} s")
    sys.exit(share < options.least)


if __name__ == "__main__":
    main()
