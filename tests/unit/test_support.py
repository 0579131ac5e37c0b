"""What a framework cannot do is refused with the reason, and said beforehand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.once import once

from horovod_train.cli.main import cli
from horovod_train.config.rules import broken_rules
from horovod_train.config.schema import Job
from horovod_train.config.support import framework_support
from horovod_train.registry import FRAMEWORKS

OTHER_VALUES = {
    "lr.momentum_correction": True,
    "train.compile": {"backend": "aot_eager"},
    "train.cuda_graph": True,
    "train.matmul_precision": "high",
    "train.channels_last": True,
    "train.activation_checkpointing": ["layers.*"],
    "train.activation_memory_mib": 100,
    "train.initial_weights": "weights.safetensors",
    "train.sync_batch_norm": True,
    "train.average_buffers": ["norm.*"],
    "ema": {"decay": 0.9},
    "lr.scaling": "adascale",
    "metrics.noise_scale_every_steps": 10,
    "optimizer.schedules": {"momentum": [[0, 0.9]]},
    "train.batch_warmup": {"start": 8, "length": 1.0},
    "train.randomness": "sample",
    "health.non_finite": "skip",
    "train.precision": "bf16",
    "train.deterministic": True,
    "allreduce.wire_dtype": "fp16",
    "launch.threads_per_rank": 1,
}
SUPPORT = {name: framework_support(name) for name in FRAMEWORKS.builtin}
CASES = [(name, refused) for name, support in SUPPORT.items() for refused in support.refused]


@pytest.mark.parametrize(("framework", "refused"), CASES, ids=lambda value: getattr(value, "field", value))
def test_a_field_that_cannot_be_honoured_is_refused_with_the_reason(framework, refused):
    section, _, field = refused.field.rpartition(".")
    job = {"name": "x", "framework": framework, "task": "m:Task"}

    assert not broken_rules(Job.model_validate(job))
    value = {field: refused.values[0] if refused.values else OTHER_VALUES[refused.field]}
    (problem,) = broken_rules(Job.model_validate({**job, **({section: value} if section else value)}))

    assert problem.path == refused.field
    assert refused.reason in problem.message
    assert problem.hint == refused.instead


@pytest.mark.parametrize("field", OTHER_VALUES)
def test_torch_does_all_of_them(field):
    section, _, name = field.rpartition(".")
    value = {name: OTHER_VALUES[field]}
    job = {"name": "x", "task": "m:Task", **({section: value} if section else value)}

    assert not broken_rules(Job.model_validate(job))


def test_the_table_is_printed_without_importing_a_framework(monkeypatch):
    import sys

    for name in FRAMEWORKS.builtin:
        monkeypatch.setitem(sys.modules, name, None)

    done = CliRunner().invoke(cli, ["frameworks"])

    assert done.exit_code == 0
    for name, support in SUPPORT.items():
        assert re.search(rf"^{name} +\S+ +{re.escape(support.tested)} ", done.output, re.MULTILINE)
    assert "refuses health.non_finite: a step cannot be undone" in done.output


def test_versions_said_to_be_tested_are_those_installed_for_tests():
    pins = dict(
        line.split("==")
        for file in ("constraints.txt", "constraints-mxnet.txt")
        for line in (Path(__file__).parents[2] / file).read_text().splitlines()
        if "==" in line
    )
    names = {name.lower().replace("_", "-"): version for name, version in pins.items()}

    for support in SUPPORT.values():
        found = [names[d] for d in support.distributions if d in names]
        assert found == [support.tested]


def test_what_is_prepared_once_is_not_tried_again_after_an_error():
    calls = []

    @once
    def prepared(name, *, fails):
        calls.append(name)
        if fails:
            raise ValueError(name)
        return name * 2

    for _ in range(3):
        assert prepared("a", fails=False) == "aa"
        with pytest.raises(ValueError, match="b"):
            prepared("b", fails=True)

    assert calls == ["a", "b"]
