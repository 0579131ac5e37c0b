"""The engine's build takes no more of a machine than it has, and no CUDA that it was not planned with."""

from __future__ import annotations

import pytest

from horovod_train.horovod import build

GB = 10**9


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

    environment = build.build_environment(build.make_plan(without_cuda=True), build.Path("/nowhere"))

    assert environment["MAKEFLAGS"] == f"-j{compilers}"


def test_a_build_for_cpus_does_not_see_the_variables_of_cuda(monkeypatch):
    variables = ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDACXX", "HOROVOD_GPU_OPERATIONS", "NVCC_PREPEND_FLAGS")
    for name in variables:
        monkeypatch.setenv(name, "/broken")

    environment = build.build_environment(build.make_plan(without_cuda=True), build.Path("/nowhere"))

    assert environment.keys().isdisjoint(variables)
    assert environment["HOME"]
