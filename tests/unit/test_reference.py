"""docs/job.md and docs/arguments.md are what a job description does: its defaults, and the limits of numbers.

A field of docs/arguments.md is written as ``lr.decay_args cosine.end_factor``.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import yaml

from horovod_train.config.arguments import ARGUMENT_FIELDS
from horovod_train.config.fields import Duration
from horovod_train.config.load import load_job
from horovod_train.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs"
FIELDS = {field.path: field for field in ARGUMENT_FIELDS}
# Arguments without which a row cannot be named.
NEEDED = {
    "step": {"milestones": [1]},
    "points": {"points": [[0, 1.0]]},
    "cosine_restarts": {"first_cycle": 1},
    "plateau": {"metric": "loss", "mode": "min"},
    "local_sgd": {"every_steps": 2},
    "top-k": {"keep": 0.1},
    "tokens": {"length": 8},
}
# A section that may be left out, with what it cannot do without.
SECTIONS = {
    "ema": {},
    "train.compile": {},
    "allreduce.codec": {"name": "fp16"},
    "metrics.tls": {"certificate": "/c", "key": "/k"},
    "metrics.basic_auth": {"username": "u", "password_file": "/p"},
    "metrics.trackers.0": {"name": "csv"},
    "evaluation.early_stopping": {"metric": "loss", "mode": "min"},
    "strategy.args local_sgd.outer": {},
    "checkpoint.best": {"metric": "loss", "mode": "min"},
    "launch.elastic": {"min_ranks": 2},
    "launch.container": {"image": "/apps/image.sif"},
    "launch.host_settings.HOST": {},
    "launch.kubernetes.volumes.0": {"mount_path": "/data", "claim": "data"},
    "launch.kubernetes.tolerations.0": {"key": "spot"},
    "data.eval": {"files": "*.jsonl"},
    "data.mixture.0": {"source": "jsonl", "files": "*.jsonl"},
    "health.inject.0": {"kind": "slow", "step": 3},
    "data.sampling": {"length": "json:loads"},
}
NUM_ENTRIES = {"data.mixture.0": 2}


def rows():
    """Return path, type and default of every field on the page."""
    section, found = "", []
    for line in [
        line for page in ("job.md", "arguments.md") for line in (DOCS / page).read_text().splitlines()
    ]:
        if line.startswith("## "):
            title = line.removeprefix("## ")
            section = "" if title == "Top level" else f"{title}."
        elif line.startswith("### "):
            section = f"{title} {line.rpartition(' ')[2]}."
        elif row := re.match(r"\| `([\w.\[\]]+)` \| (.*?) \| (.*?) ?\| ", line):
            path = (section + row[1]).replace("[]", ".0")
            found.append((path, row[2], row[3].strip("`")))
    return found


ROWS = rows()
NUMBER = re.compile(r"(integer|number) (≥|>) (\S+?)(?:, (≤|<) (\S+))?(?: or null)?$")

BEYOND = re.compile(r"must be (at least|at most|greater than|less than) [0-9.e+-]+\b.*")


def job_with(section, **fields):
    """Return a job that says no more than it has to, and this."""
    job = {"name": "j", "task": "digits"}
    if not section:
        return {**job, **fields}
    if section in SECTIONS:  # some are about hosts
        job["launch"] = {"hosts": ["HOST:2"]}
    if " " in section:
        return job_with_arguments(job, section, fields)
    at = job
    if section.startswith("data."):
        job["data"] = {"source": "jsonl", "files": "*.jsonl"} if "mixture" not in section else {}
    *outer, last = section.removesuffix(".0").split(".")
    for part in outer:
        at = at.setdefault(part, {})
    content = {**SECTIONS.get(section, {}), **fields}
    at[last] = [content] * NUM_ENTRIES.get(section, 1) if section.endswith(".0") else content
    return job


def job_with_arguments(job, section, fields):
    path, _, rest = section.partition(" ")
    row, *inner = rest.split(".")
    args = dict(NEEDED.get(row, {}))
    for part in inner:
        args = {**args, part: fields}
    if not inner:
        args |= fields
    *outer, last = path.split(".")
    at = job
    for part in outer:
        at = at.setdefault(part, {})
    if path == "data.source_args":
        at["files"] = "*"
    at.update({FIELDS[path].name: row, last: args})
    return job


def read(tmp_path, document):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(document))
    return load_job(file, environ={})


def complaints(tmp_path, document):
    """Return what is said of each field."""
    try:
        read(tmp_path, document)
    except ConfigError as error:
        return {problem.path: problem.message for problem in error.problems}
    return {}


def value_at(job, path):
    path, _, rest = path.partition(" ")
    for part in path.split("."):
        job = job[int(part)] if part == "0" else job[part] if isinstance(job, dict) else getattr(job, part)
    if rest:
        row, _, inner = rest.partition(".")
        return value_at(FIELDS[path].model(row).model_validate(job), inner)
    return job


def as_reported(path):
    """The path of a field in a problem."""
    return re.sub(r" [\w-]+\.", ".", path)


def test_every_section_is_on_the_page():
    assert len(ROWS) > 140
    assert SECTIONS.keys() <= {path.rpartition(".")[0] for path, *_ in ROWS}


@pytest.mark.parametrize(
    ("path", "default"),
    [(p, d) for p, kind, d in ROWS if d not in ("required", "null") and kind != "section"],
)
def test_a_field_that_is_left_out_has_the_default_of_the_page(tmp_path, path, default):
    value = value_at(read(tmp_path, job_with(path.rpartition(".")[0])), path)

    if default == "auto" and path == "lr.scaling":
        default = "linear"  # of the optimizer that is left out, too
    if path.removeprefix("data.") in {"eval.files", "mixture.0.files"}:
        return  # required as soon as there is a source
    text = str(value) if isinstance(value, str | Duration) else json.dumps(value, default=str)
    assert text == default


def limits():
    """Yield each number on the page with values at its limits, and with those just beyond."""
    for path, kind, _ in ROWS:
        if found := NUMBER.match(kind):
            what, sign, lowest, upper_sign, highest = found.groups()
            as_written = int if what == "integer" else float
            low, high = (None if bound is None else as_written(bound) for bound in (lowest, highest))
            inside, outside = ([low], [low - 1]) if sign == "≥" else ([math.ulp(0.0)], [low])
            if upper_sign == "≤":
                inside.append(high)
                outside.append(high + 1)
            elif upper_sign == "<":
                inside.append(math.nextafter(high, low))
                outside.append(high)
            yield path, inside, outside


@pytest.mark.parametrize(("path", "inside", "outside"), list(limits()))
def test_a_number_may_be_what_the_page_says_and_no_more(tmp_path, path, inside, outside):
    section, _, name = path.rpartition(".")
    for value in inside:
        said = complaints(tmp_path, job_with(section, **{name: value})).get(as_reported(path), "")
        assert not BEYOND.fullmatch(said), value
    for value in outside:
        assert BEYOND.match(complaints(tmp_path, job_with(section, **{name: value}))[as_reported(path)]), (
            value
        )
