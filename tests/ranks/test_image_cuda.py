"""The image for GPUs, built on a machine without one: all of CUDA that is in it comes from PyPI."""

from __future__ import annotations

import re

import pytest
from support.image import builder

pytestmark = [pytest.mark.ranks, pytest.mark.campaign, pytest.mark.timeout(3600)]
TAG = "localhost/horovod_train:test-gpu"


@pytest.fixture(scope="module")
def image():
    made = builder()
    # "===": PyPI's own, which has CUDA, and no 2.13.0+cpu that may lie at hand.
    made.build(torch="torch===2.13.0", tag=TAG)
    print(f"\nsize of the image for GPUs: {made.size(TAG)}")
    with made.container(TAG) as container:
        yield container


def test_its_engine_has_nccl_and_says_what_it_cannot_try(image):
    said = image.run("horovod-train", "engine", "check")

    assert not re.search("^fail", said, re.MULTILINE)
    assert re.search(r"torch 2\.13\.0\+cu130, CUDA 13\.0 for .*90.*, NCCL 2\.", said)
    assert "operations     mpi, gloo, nccl" in said
    assert "no GPU: NCCL was not tested" in said


def test_its_libraries_are_all_there(image):
    library = next((image.root / "opt/horovod_train").rglob("horovod/torch/mpi_lib_v2*.so"))
    linked = image.run("ldd", f"/{library.relative_to(image.root)}")

    assert "not found" not in linked
    assert "/site-packages/horovod/torch/../../nvidia/nccl/lib/libnccl.so.2" in linked


def test_the_compiler_is_gone(image):
    assert not list((image.root / "opt").rglob("nvcc"))
    assert not list((image.root / "opt").rglob("libcudart_static.a"))
