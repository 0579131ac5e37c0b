"""The rooms of the package and who may import whom: the table of docs/architecture.md, held by this test."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "horovod_train"

BASICS = {"errors", "registry", "system", "version"}
ROOMS = {
    # room: rooms of ours it may import
    "errors": set(),
    "version": set(),
    "system": {"errors"},
    "registry": {"errors"},
    "events": {"errors", "system", "version"},
    "config": BASICS,
    "lr": BASICS | {"config"},
    "data": BASICS | {"config"},
    "horovod": BASICS | {"config"},
    "checks": BASICS | {"events", "horovod"},
    "collectives": BASICS | {"config", "horovod"},
    "checkpoint": BASICS | {"config", "collectives.base"},
    "health": BASICS | {"config", "collectives.base", "checks.hosts", "checkpoint"},
    "telemetry": BASICS | {"config", "events", "collectives.base", "checkpoint.writing"},
    "frameworks": BASICS
    | {"config", "events", "lr", "collectives", "horovod", "data", "health"}
    | {"checkpoint.arrays", "checkpoint.inspect"},
    "training": BASICS
    | {"config", "events", "lr", "data", "collectives.base", "checkpoint", "telemetry", "health"}
    | {"frameworks.base"},
    "scripts": BASICS | {"config", "events", "collectives.base", "telemetry", "horovod"},
    "launch": BASICS | {"config", "events", "horovod", "checks", "version"},
    "client": BASICS | {"config", "events", "launch"},
    "monitor": BASICS | {"config", "events", "launch.base", "launch.jobs"} | {"telemetry"},
    "tasks": set(),
    # Composition roots: the services of a rank, the trainer, and the library.
    "rank": BASICS
    | {"config", "events", "lr", "data", "collectives", "checkpoint", "telemetry", "health", "training"}
    | {"frameworks.base"},
    "worker": BASICS
    | {"rank", "config", "events", "data", "collectives", "horovod", "telemetry", "health", "training"}
    | {"scripts", "frameworks.base"},
    "own_loop": BASICS
    | {"rank", "config", "events", "lr", "data", "collectives", "checkpoint", "health", "training"}
    | {"frameworks"},
    "session": BASICS
    | {"rank", "own_loop", "config", "lr", "data", "collectives", "horovod", "training", "frameworks"},
    "cli": None,  # anything but plugins
    "plugins": None,
    "__init__": None,
    "__main__": {"cli"},
}

# Only these rooms may import these packages.
OUTSIDE = {
    "torch": {"frameworks", "own_loop", "session", "tasks", "scripts", "plugins"},
    "wrapt": {"scripts"},
    "horovod": {"frameworks", "collectives", "horovod", "plugins"},
    "tensorflow": {"plugins", "tasks"},
    "keras": {"plugins", "tasks"},
    "jax": {"plugins", "tasks"},
    "optax": {"plugins", "tasks"},
    "lightning": {"plugins", "tasks"},
    "transformers": {"plugins", "tasks"},
    "mxnet": {"plugins", "tasks"},
    "deepspeed": {"plugins"},
    "kubernetes": {"plugins"},
    "grafana_foundation_sdk": {"plugins"},
    "click": {"cli", "plugins"},
    "rich": {"launch", "cli", "plugins"},
    "prometheus_client": {"telemetry", "monitor", "plugins"},
    "fastapi": {"plugins"},
    "starlette": {"plugins"},
    "uvicorn": {"plugins"},
    "plotly": {"plugins"},
    "pydantic": {"config", "checkpoint", "events", "frameworks", "launch", "lr", "plugins"},
    "mpi4py": {"frameworks", "plugins"},
}

# The control side starts ranks; it runs where no framework is installed.
CONTROL_SIDE = [
    "horovod_train.launch.submit",
    "horovod_train.launch.launchers.hosts",
    "horovod_train.launch.launchers.slurm",
    "horovod_train.cli.main",
    "horovod_train.config.load",
]


def room_of(path: Path) -> str:
    """The innermost room that a file lies in."""
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return max((room for room in ROOMS if (name + ".").startswith(room + ".")), key=len)


def rooms_in(name: str) -> set[str]:
    """The rooms that a name allows: the one it lies in, or all that lie in it."""
    inside = {room for room in ROOMS if (room + ".").startswith(name + ".")}
    return inside or {max((room for room in ROOMS if (name + ".").startswith(room + ".")), key=len)}


def imports(path: Path) -> set[str]:
    """Modules a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_what_its_room_may(path):
    room = room_of(path)
    allowed = ROOMS[room]
    if allowed is None:
        return
    ours = {
        name.removeprefix("horovod_train.") for name in imports(path) if name.startswith("horovod_train.")
    }
    modules = {name for name in ours if (PACKAGE / name.replace(".", "/")).with_suffix(".py").exists()}
    packages = {name for name in ours if (PACKAGE / name.replace(".", "/")).is_dir()}
    wrong = {
        name
        for name in modules | packages
        if not any((name + ".").startswith(prefix + ".") for prefix in allowed | {room})
        and not any(prefix.startswith(name + ".") for prefix in allowed | {room})
    }

    assert not wrong


CORE = [path for path in FILES if "plugins" not in path.parts and path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_the_core_imports_no_plugin(path):
    """Rows of the registry and of the command line, and the names of the package, lead to them."""
    assert not [name for name in imports(path) if (name + ".").startswith("horovod_train.plugins.")]


def test_modules_import_each_other_in_no_circle():
    """Wherever the imports are: at the top, in functions, or for types only."""
    modules = {module_of(path): path for path in FILES}
    remaining = {}
    for name, path in modules.items():
        found = imports(path) & modules.keys()
        remaining[name] = {each for each in found if not any(o.startswith(each + ".") for o in found)} - {
            name
        }
    while remaining:
        leaves = {name for name, needed in remaining.items() if not needed & remaining.keys()}
        assert leaves, f"a circle among {sorted(remaining)}"
        remaining = {name: needed for name, needed in remaining.items() if name not in leaves}


def module_of(path: Path) -> str:
    """The name by which a file is imported."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("package", OUTSIDE)
def test_a_package_is_imported_only_by_the_rooms_it_belongs_to(package):
    users = {
        room_of(path).partition(".")[0]
        for path in FILES
        if any((n + ".").startswith(package + ".") for n in imports(path))
    }

    assert users <= OUTSIDE[package]


def test_rooms_form_no_cycle():
    edges = {
        room: {each for name in allowed or () for each in rooms_in(name)} - {room}
        for room, allowed in ROOMS.items()
    }
    remaining = dict(edges)
    while remaining:
        leaves = {room for room, allowed in remaining.items() if not allowed & remaining.keys()}
        assert leaves, f"a cycle among {sorted(remaining)}"
        remaining = {room: allowed for room, allowed in remaining.items() if room not in leaves}


@pytest.mark.parametrize("module", CONTROL_SIDE)
def test_the_control_side_loads_no_framework(module):
    code = (
        f"import sys, {module}; "
        "print([m for m in ('torch', 'horovod', 'tensorflow', 'mpi4py', 'numpy') if m in sys.modules])"
    )

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "[]"


def test_help_loads_nothing_but_click():
    code = (
        "import sys; sys.argv = ['horovod-train', '--help']\n"
        "from horovod_train.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('pydantic', 'yaml', 'rich', 'torch') if m in sys.modules])"
    )

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.strip().splitlines()[-1] == "[]"


def test_scripts_of_users_join_and_jobs_connect():
    """The worker looks after the ranks of a job; ranks that join look after each other."""
    callers = {
        path.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "connect"
    }

    assert callers == {"framework.py", "allreduce_benchmark.py", "devices.py"}


def test_each_framework_has_its_class_in_the_same_file():
    found = {
        path.name
        for path in FILES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and re.fullmatch(r"\w+Framework", node.name)
    }

    assert found == {"framework.py"}
