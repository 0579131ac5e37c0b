"""Each adapter can be imported by itself: it brings no other framework along."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "lightning", "transformers", "mxnet"}
IMPORT = """
import importlib, json, sys
for module in {modules}:
    importlib.import_module(module)
    print(json.dumps([name for name in {frameworks} if name in sys.modules]))
"""
# Horovod has no binding for JAX: its gradients travel through PyTorch's. Trainer is made of PyTorch.
NEEDED = {"jax": {"torch"}, "transformers": {"torch"}}


def imported_after(*modules, back_end="tensorflow"):
    """The frameworks that are there after each import."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT.format(modules=modules, frameworks=sorted(FRAMEWORKS))],
        env={**os.environ, "KERAS_BACKEND": back_end},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "adapter",
    [
        "tensorflow",
        "keras on tensorflow",
        "keras on torch",
        "keras on jax",
        "jax",
        "lightning",
        "transformers",
    ],
)
def test_an_adapter_imports_what_its_framework_imports_and_no_more(adapter):
    framework, _, back_end = adapter.partition(" on ")

    alone, with_adapter = imported_after(
        framework, f"horovod_train.plugins.{framework}", back_end=back_end or "tensorflow"
    )

    assert with_adapter <= alone | NEEDED.get(framework, set())


def test_the_library_for_torch_imports_no_other_framework():
    assert imported_after("horovod_train.session") == [{"torch"}]
