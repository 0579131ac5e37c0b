"""The image for GPUs, built on a machine without one: all of CUDA that is in it comes from PyPI."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support.image import builder

pytestmark = [pytest.mark.ranks, pytest.mark.campaign, pytest.mark.timeout(3600)]
TAG = "localhost/horovod_train:test-gpu"


@pytest.fixture(scope="module")
def root():
    made = builder()
    # "===": PyPI's own, which has CUDA, and no 2.13.0+cpu that may lie at hand.
    made.build(torch="torch===2.13.0", tag=TAG)
    print(f"\nsize of the image for GPUs: {made.size(TAG)}")
    container = made.call("from", TAG)
    yield Path(made.call("mount", container))
    made.call("rm", container)


def inside(root, *command):
    settings = [
        "PATH=/opt/horovod_train/bin:/usr/bin:/bin",
        "OPAL_PREFIX=/opt/horovod_train",
        "OMPI_ALLOW_RUN_AS_ROOT=1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    ]
    words = ["chroot", str(root), "env", *settings, *command]
    found = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    return found.stdout + found.stderr


def test_its_engine_has_nccl_and_says_what_it_cannot_try(root):
    said = inside(root, "horovod-train", "engine", "check")

    assert "FAIL" not in said
    assert re.search(r"torch 2\.13\.0\+cu130, CUDA 13\.0 for .*90.*, NCCL 2\.", said)
    assert "operations   mpi, gloo, nccl" in said
    assert "none here: whether NCCL works was not tried" in said


def test_its_libraries_are_all_there(root):
    library = next((root / "opt/horovod_train").rglob("horovod/torch/mpi_lib_v2*.so"))
    linked = inside(root, "ldd", f"/{library.relative_to(root)}")

    assert "not found" not in linked
    assert "/site-packages/horovod/torch/../../nvidia/nccl/lib/libnccl.so.2" in linked


def test_the_compiler_is_gone(root):
    assert not list((root / "opt").rglob("nvcc"))
    assert not list((root / "opt").rglob("libcudart_static.a"))
