"""The rooms of the package and who may import whom: the table of docs/architecture.md, held by this test."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "horovod_train"

BASICS = {"errors", "registry", "system", "checks.consistency"}
ROOMS = {
    # room: rooms of ours it may import
    "errors": set(),
    "system": {"errors"},
    "checks.consistency": set(),
    "registry": {"errors"},
    "events": {"errors", "system", "__init__"},
    "config": BASICS,
    "lr": BASICS | {"config"},
    "data": BASICS | {"config"},
    "horovod": BASICS | {"config"},
    "checks": BASICS | {"horovod"},
    "collectives": BASICS | {"config", "horovod.environment", "horovod.launched", "horovod.counters"},
    "checkpoint": BASICS | {"config", "collectives.base"},
    "health": BASICS
    | {"config", "collectives.base", "collectives.log", "horovod.fingerprint"}
    | {"checkpoint.arrays", "checkpoint.holders"},
    "telemetry": BASICS
    | {"config", "events", "collectives.base", "collectives.log", "checkpoint.write_report"},
    "frameworks": BASICS
    | {
        "config",
        "events",
        "lr",
        "collectives",
        "horovod.environment",
        "horovod.launched",
        "data",
        "health.heartbeat",
        "health.join_watch",
        "health.device_watch",
        "health.finite",
        "health.same_data",
        "checkpoint.arrays",
        "checkpoint.stored_arrays",
        "checkpoint.plain_weights",
        "checkpoint.tree",
    },
    "training": BASICS
    | {
        "config",
        "events",
        "lr",
        "data",
        "collectives.base",
        "collectives.mesh",
        "checkpoint",
        "telemetry",
        "health",
        "frameworks.base",
    },
    "scripts": BASICS
    | {"config", "events", "collectives.base", "telemetry"}
    | {"horovod.environment", "horovod.launched", "horovod.counters"},
    "launch": set(),
    "launch.hosts": BASICS
    | {
        "__init__",
        "config",
        "events.channel",
        "horovod.fingerprint",
        "horovod.build",
        "horovod.installed",
        "horovod.mpi",
        "checks",
    },
    "launch.base": BASICS | {"config", "launch.console", "launch.hosts"},
    "launch.commands": {"errors", "horovod.toolchain"},
    "launch.mpi": BASICS
    | {"horovod.environment", "horovod.mpi", "horovod.toolchain"}
    | {"launch.hosts", "launch.base", "launch.commands"},
    "launch.jobs": BASICS | {"config", "launch.base"},
    "launch.console": BASICS | {"config", "events"},
    "launch.supervise": BASICS
    | {"config", "events", "checks", "horovod.fingerprint", "launch.hosts"}
    | {"launch.base", "launch.jobs", "launch.console", "launch.mpi"},
    "launch.launchers": BASICS
    | {"config", "events", "horovod.mpi", "horovod.toolchain"}
    | {"launch.hosts", "launch.base", "launch.commands", "launch.jobs", "launch.console"}
    | {"launch.mpi", "launch.supervise"},
    "launch.submit": BASICS
    | {"config", "events", "horovod.mpi"}
    | {"launch.mpi", "launch.hosts", "launch.base", "launch.jobs", "launch.console", "launch.supervise"},
    "client": BASICS | {"config", "events", "launch.base", "launch.jobs", "launch.submit"},
    "monitor": BASICS
    | {"config", "events", "launch.base", "launch.jobs"}
    | {"telemetry.metric", "telemetry.catalog", "telemetry.waiting"},
    "serve": BASICS
    | {"config", "events", "launch.base", "launch.jobs", "client", "monitor", "report", "__init__"},
    "report": BASICS | {"config", "events", "launch.base", "monitor"},
    "study": BASICS | {"checkpoint", "config", "events", "lr", "client", "report", "horovod"},
    "doctor": BASICS | {"config", "events", "checks", "launch"},
    "tasks": set(),
    # Composition roots: the services of a rank, the trainer, and the library.
    "rank": BASICS
    | {
        "config",
        "events",
        "lr",
        "data",
        "collectives",
        "checkpoint",
        "telemetry",
        "health",
        "training",
        "frameworks.base",
    },
    "worker": BASICS
    | {
        "rank",
        "config",
        "events",
        "lr",
        "data",
        "collectives",
        "horovod",
        "checkpoint",
        "telemetry",
        "health",
        "training",
        "scripts",
    }
    | {"frameworks.base"},
    "own_loop": BASICS
    | {"rank", "config", "events", "lr", "data", "collectives", "checkpoint", "health", "training"}
    | {"frameworks"},
    "session": BASICS
    | {
        "rank",
        "own_loop",
        "config",
        "events",
        "lr",
        "data",
        "collectives",
        "horovod",
        "checkpoint",
        "telemetry",
        "health",
        "training",
        "frameworks",
    },
    "cli": None,  # anything
    "__init__": None,
    "__main__": {"cli"},
}

# Only these rooms may import these packages.
OUTSIDE = {
    "torch": {"frameworks", "own_loop", "session", "tasks", "scripts"},
    "wrapt": {"scripts"},
    "horovod": {"frameworks", "collectives", "horovod"},
    "tensorflow": {"frameworks", "tasks", "scripts"},
    "keras": {"frameworks", "tasks"},
    "jax": {"frameworks", "tasks"},
    "optax": {"frameworks", "tasks"},
    "lightning": {"frameworks", "tasks"},
    "transformers": {"frameworks", "tasks"},
    "mxnet": {"frameworks", "tasks"},
    "click": {"cli"},
    "rich": {"launch", "cli"},
    "prometheus_client": {"telemetry", "monitor", "serve"},
    "fastapi": {"serve"},
    "starlette": {"serve"},
    "uvicorn": {"serve"},
    "plotly": {"serve"},
    "pydantic": {"config", "checkpoint", "events", "frameworks", "launch", "lr", "serve"},
    "mpi4py": {"frameworks"},
}

# The control side starts ranks; it runs where no framework is installed.
CONTROL_SIDE = [
    "horovod_train.launch.submit",
    "horovod_train.launch.launchers.supervised",
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

    assert callers == {"framework.py", "allreduce_benchmark.py", "join.py"}


@pytest.mark.parametrize(
    ("name", "file"),
    [
        (r"\w+Framework", "framework.py"),
        (r"\w+Replica", "replica.py"),
        (r"\w+Communicator", "collectives.py"),
        (r"\w+Task", "task.py"),
        ("Exchange", "exchange.py"),
    ],
)
def test_what_every_framework_has_lies_in_files_of_the_same_name(name, file):
    found = {
        path.name
        for pattern in ("*/*.py", "torch/step/*.py", "torch/comm/*.py")
        for path in (PACKAGE / "frameworks").glob(pattern)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and re.fullmatch(name, node.name)
    }

    assert found == {file}
