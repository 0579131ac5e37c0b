"""The engine's build takes no more of a machine than it has, and no CUDA that it was not planned with."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from horovod_train.horovod import build
from horovod_train.horovod.mpi import Mpi, find_mpi

ROOT = Path(__file__).parents[2]
GB = 10**9


MPI = Mpi("MPICH", "5.0.2", Path("/mpi/bin"), Path("/mpi/lib/libmpi.so.12"), "libmpi.so.12")


@pytest.mark.parametrize(
    ("cores", "free_bytes", "named", "compilers"),
    [
        (8, 64 * GB, "", 8),
        (8, 3 * GB, "", 3),
        (8, GB // 2, "", 1),
        (2, 64 * GB, "", 2),
        (2, GB, "6", 6),
        (2, 64 * GB, "many", 2),
    ],
)
def test_there_are_as_many_compilers_as_cores_and_gigabytes(monkeypatch, cores, free_bytes, named, compilers):
    monkeypatch.setattr(build, "usable_cores", lambda: cores)
    monkeypatch.setattr(build, "usable_memory_bytes", lambda: free_bytes)
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", named)
    monkeypatch.setenv("MAKEFLAGS", "")  # as make sets it for its commands

    environment = build.build_environment(
        build.make_plan(MPI, without_cuda=True), MPI, build.Path("/nowhere")
    )

    assert environment["MAKEFLAGS"] == f"-j{compilers}"


def test_a_build_for_cpus_does_not_see_the_variables_of_cuda(monkeypatch):
    variables = ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDACXX", "HOROVOD_GPU_OPERATIONS", "NVCC_PREPEND_FLAGS")
    for name in variables:
        monkeypatch.setenv(name, "/broken")

    environment = build.build_environment(
        build.make_plan(MPI, without_cuda=True), MPI, build.Path("/nowhere")
    )

    assert environment.keys().isdisjoint(variables)
    assert environment["HOME"]


def files_of_the_engine_layer() -> list[str]:
    """Return the sources that the Dockerfile copies before it builds the engine."""
    lines = (ROOT / "docker" / "Dockerfile").read_text().splitlines()
    before = lines[: next(n for n, line in enumerate(lines) if "horovod.build import" in line)]
    return [name for line in before if line.startswith("COPY") for name in line.split()[1:-1]]


def test_the_image_builds_the_engine_from_the_files_of_its_layer(tmp_path):
    for name in files_of_the_engine_layer():
        copied = tmp_path / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, copied)

    planned = "from horovod_train.horovod import build, cuda; print(build.__file__, build.make_plan(None))"
    done = subprocess.run(
        [sys.executable, "-c", planned],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))


def test_the_image_calls_the_build_with_its_parameters():
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    (code,) = re.findall(r"python -c '(from horovod_train\.horovod\.build .*?)'", dockerfile, re.DOTALL)

    calls = [node for node in ast.walk(ast.parse(code.replace("\\\n", ""))) if isinstance(node, ast.Call)]
    functions = {
        "build": build.build,
        "install": build.install,
        "make_plan": build.make_plan,
        "find_mpi": find_mpi,
    }
    assert {call.func.id for call in calls} == functions.keys()
    for call in calls:
        signature = inspect.signature(functions[call.func.id])
        signature.bind(*call.args, **{keyword.arg: keyword.value for keyword in call.keywords})
