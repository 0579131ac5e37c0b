"""Shared fixtures. A test that leaves a process, an environment variable or a thread behind fails."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import psutil
import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "programs")]


@pytest.fixture(autouse=True)
def leaves_nothing_behind():
    environment = dict(os.environ)
    threads = set(threading.enumerate())
    yield
    left = psutil.Process().children(recursive=True)
    for process in left:
        process.kill()
    # PyTest notes the running test there, and torch where its compiler may cache.
    changed = {
        name
        for name in environment.keys() | os.environ.keys()
        if environment.get(name) != os.environ.get(name)
        and not name.startswith(("PYTEST_", "TORCHINDUCTOR_"))
    }
    os.environ.clear()
    os.environ.update(environment)
    extra = [t for t in set(threading.enumerate()) - threads if t.is_alive() and not t.daemon]
    assert not left, f"processes left behind: {left}"
    assert not changed, f"environment changed: {sorted(changed)}"
    assert not extra, f"threads left behind: {extra}"


@pytest.fixture(params=["mpi", "gloo"])
def controller(request):
    return request.param
