"""The benchmarks run; what they measure is for `make bench` on a quiet machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.browser import needs_browser
from support.prometheus import needs_prometheus

from benchmarks.frameworks import FRAMEWORKS
from benchmarks.monitoring import MEASURES

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.campaign
@pytest.mark.ranks
@pytest.mark.parametrize("only", ["hand-written H", "hand-written, in", "DDP over", "metrics"])
def test_each_comparison_prints_a_ratio(only):
    output = run("benchmarks.run", "--models", "transformer", "--pairs", "1", "--steps", "9", "--only", only)

    (row,) = output.splitlines()[1:]
    assert row.startswith("transformer")
    assert row.endswith(("met", "MISSED"))


@pytest.mark.campaign
@pytest.mark.ranks
def test_another_version_can_be_compared_with():
    output = run(
        *("benchmarks.run", "--against", str(ROOT), "--models", "transformer", "--pairs", "1", "--steps", "9")
    )

    (row,) = output.splitlines()[1:]
    assert row.startswith("transformer")


@pytest.mark.campaign
@pytest.mark.ranks
def test_a_framework_can_be_compared_with_another_version():
    output = run(
        *("benchmarks.frameworks", "--against", str(ROOT), "--only", "jax", "--pairs", "1", "--steps", "9")
    )

    (row,) = output.splitlines()[1:]
    assert row.startswith("jax")
    assert f"the version in {ROOT.name}" in row


@pytest.mark.campaign
def test_the_time_of_the_host_can_be_compared_with_another_version():
    output = run("benchmarks.host_time", "--against", str(ROOT), "--pairs", "2", "--steps", "60")

    first, second, median = output.splitlines()
    assert first.count(" us") == second.count(" us") == 3
    assert median.startswith("median ")


@pytest.mark.campaign
@pytest.mark.ranks
@needs_browser
@needs_prometheus
@pytest.mark.parametrize("only", MEASURES)
def test_what_watching_costs_is_printed(only):
    output = run("benchmarks.monitoring", "--only", only, "--steps", "400", "--ranks", "8")

    assert output.startswith(only)


@pytest.mark.campaign
@pytest.mark.ranks
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_each_framework_is_compared_with_a_loop_by_hand(framework):
    output = run("benchmarks.frameworks", "--pairs", "1", "--steps", "9", "--only", framework)

    (row,) = output.splitlines()[1:]
    assert row.startswith(framework)
    assert row.endswith(("met", "MISSED"))


def test_what_is_measured_on_a_gpu_runs_on_a_cpu():
    output = run("benchmarks.gpu", "--smoke")

    for comparison in ("the same optimizer", "defaults of each", "reducer / DDP"):
        assert len(re.findall(rf"{comparison} +\d+\.\d{{3}}  \[", output)) == 4


def test_where_there_is_no_gpu_nothing_is_measured():
    assert "no GPU here: nothing was measured" in run("benchmarks.gpu", CUDA_VISIBLE_DEVICES="")
