"""The gradient noise scale and AdaScale under real Horovod are the same with every strategy that has them."""

from __future__ import annotations

import pytest
from support.launching import cli

from horovod_train.events.file import read_events
from horovod_train.events.types import Progress, Summary

pytestmark = [pytest.mark.ranks, pytest.mark.campaign]


def trained(folder, strategy):
    """Train digits with AdaScale on two ranks; return its noise scales by step, and its summary."""
    settings = [
        f"strategy={strategy}", "lr.scaling=adascale", "lr.warmup=0", "lr.decay=constant",
        "train.epochs=2", "metrics.noise_scale_every_steps=1", f"run_dir={folder / strategy}",
        "launch.threads_per_rank=1",
    ]  # fmt: skip
    cli(
        "run", "digits", "-n", "2", *(word for setting in settings for word in ("--set", setting)), cwd=folder
    )
    (path,) = (folder / strategy / "digits").glob("*/events.jsonl")
    events = [record.event for record in read_events(path)]
    scales = {event.step: event.numbers["noise_scale"] for event in events if isinstance(event, Progress)}
    (summary,) = (event for event in events if isinstance(event, Summary))
    return scales, summary


def test_every_strategy_measures_the_same(tmp_path):
    scales, summary = trained(tmp_path, "allreduce")

    assert summary.epochs > 2  # AdaScale trains until its scale-invariant progress is complete
    for strategy in ("zero", "ddp"):
        found, of_strategy = trained(tmp_path, strategy)
        common = scales.keys() & found.keys()
        assert common
        for step in common:
            assert found[step] == pytest.approx(scales[step], rel=1e-3)
        assert of_strategy.steps == summary.steps
        assert of_strategy.metrics["loss"] == pytest.approx(summary.metrics["loss"], rel=1e-3)
