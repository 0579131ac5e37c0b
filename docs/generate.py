"""Write the parts of the documentation that follow from the code.

    docs/job.md                      every field of a job description
    docs/arguments.md                arguments of strategies, codecs, schedules and trackers
    docs/events.md                   every kind of event
    docs/cli.md                      every command
    docs/api.md                      what a program may import
    docs/images/learning-rate.svg    the schedule on 1, 4 and 16 ranks
    docs/monitoring.md               the tables of metrics

usage: python docs/generate.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from references import api_reference, cli_reference

from horovod_train.config.arguments import ARGUMENT_FIELDS, arguments_schema
from horovod_train.config.optimization import LearningRate
from horovod_train.config.schema import Job
from horovod_train.events.types import KINDS
from horovod_train.lr.policy import LearningRatePolicy
from horovod_train.monitor.runs import JOB_CATALOG
from horovod_train.plugins.dashboards.rules import recordings_as_markdown
from horovod_train.telemetry.catalog import CATALOG, as_markdown

DOCS = Path(__file__).parent
MONITORING = DOCS / "monitoring.md"
EPOCHS = 30
RANKS = (1, 4, 16)


def learning_rate(path: Path) -> None:
    """Draw the schedule of one job on 1, 4 and 16 ranks."""
    figure, all_axes = plt.subplots(1, 3, figsize=(11, 3.2), sharey=True)
    for axes, scaling in zip(all_axes, ("linear", "sqrt", "none"), strict=True):
        section = LearningRate(
            base_lr=0.1, reference_batch_size=32, scaling=scaling, warmup=5, decay="cosine"
        )
        points = [step / 20 for step in range(20 * EPOCHS + 1)]
        for ranks in RANKS:
            policy = LearningRatePolicy(section, 32 * ranks, EPOCHS)
            label = f"{ranks} rank{'s' * (ranks > 1)}, batch {32 * ranks}"
            axes.plot(points, [policy.at(point) for point in points], label=label)
        axes.set_title(f"scaling: {scaling}")
        axes.set_xlabel("epochs")
        axes.set_yscale("log")
        axes.set_ylim(1e-3, 3)
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel("learning rate")
    all_axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


ANNOTATED_JOB = """\
name: spiral                     # label of its metrics; its runs are in runs/spiral
task: spiral.py:Spiral           # your class: model(), train_data(), loss(model, batch), ...
task_args: {width: 64}           # keyword arguments of the class
train:
  epochs: 20                     # or max_steps, or max_samples
  batch_size_per_rank: 64        # of each rank and micro-batch; or global_batch_size, for any number of ranks
  precision: bf16
optimizer:
  name: sgd
  args: {momentum: 0.9}
lr:
  base_lr: 0.1                   # right for a global batch of reference_batch_size;
  reference_batch_size: 64       # on 8 ranks of 64 samples, "linear" makes it 0.8
  scaling: linear
  warmup: 5 epochs               # also "500 steps" or "100000 samples"
  decay: cosine
evaluation:
  every: 1 epochs
checkpoint:
  every: [1 epochs]              # a restarted job resumes from the newest one, on any number of ranks
  keep_last: 3
launch:
  num_ranks: 8                   # -n and -H on the command line win
  hosts: ["node01:4", "node02:4"]
metrics:
  trackers: [{name: tensorboard}]
"""


def job_reference() -> str:
    """Return a table of fields for each section of a job description."""
    schema = Job.model_json_schema()
    lines = [
        "# The job description",
        "",
        "A YAML, TOML or JSON file. Environment variables win over the file, `--set` wins over both:",
        "",
        "```text",
        "train: {epochs: 3}                      in the file",
        "HOROVOD_TRAIN__TRAIN__EPOCHS=3          in the environment",
        "--set train.epochs=3                    on the command line",
        "```",
        "",
        "An example; a field that is left out has its default:",
        "",
        "```yaml",
        ANNOTATED_JOB.rstrip(),
        "```",
        "",
        "In the tables, `best.metric` is the field `metric` of the section `best`, `volumes[].claim` the",
        "field `claim` of each element of the list `volumes`, and HOST the name of a host.",
        "A duration is a text such as `5 epochs`, `500 steps` or `100000 samples`; a number without a unit",
        "is a number of epochs.",
        "",
        "<!-- The rest is written by docs/generate.py from horovod_train/config/schema.py. -->",
    ]
    fields = schema["properties"]
    top_level = {name: field for name, field in fields.items() if not _section(field)}
    sections = {"Top level": {**schema, "properties": top_level}} | {
        name: schema["$defs"][_section(field)] for name, field in fields.items() if name not in top_level
    }
    for title, section in sections.items():
        lines += ["", f"## {title}", "", _first_line(section), ""]
        lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
        lines += _rows(section, schema["$defs"])
    return "\n".join(lines) + "\n"


ARGUMENTS = """# Arguments

The arguments of what a job names, such as `strategy: {name: zero, args: {stage: 1}}`. `horovod-train config
schema` contains them, also those of other packages that are installed.

<!-- The rest is written by docs/generate.py from the models of the arguments. -->
"""


def arguments_reference() -> str:
    """Return a table of arguments for each row of each registry that declares any."""
    lines = [ARGUMENTS]
    for field in ARGUMENT_FIELDS:
        lines += [f"## {field.path}", ""]
        for name, model in field.models():
            if name not in field.table.builtin:  # of a package that happens to be installed here
                continue
            definitions: dict[str, Any] = {}
            schema = arguments_schema(model, definitions)
            lines += [f"### {field.section}.{field.name}: {name}", "", _first_line(schema), ""]
            lines += ["| argument | type | default | meaning |", "|---|---|---|---|"]
            lines += [*_rows(schema, definitions), ""]
    return "\n".join(lines).rstrip() + "\n"


def _rows(section: dict[str, Any], definitions: dict[str, Any], prefix: str = "") -> list[str]:
    """Return a row for each field of a section, followed by rows for the fields of its sections."""
    lines = []
    for name, field in section["properties"].items():
        inner = _section(field)
        if inner and "$ref" in field:
            description = _first_line(definitions[inner])
            row = f"| `{prefix}{name}` | section | | {description} |"
        else:
            row = _row(prefix + name, field, section.get("required", []))
        lines.append(row)
        if inner:
            element = {"array": "[]", "object": ".HOST"}.get(field.get("type", ""), "")
            lines += _rows(definitions[inner], definitions, f"{prefix}{name}{element}.")
    return lines


def _section(field: dict[str, Any]) -> str | None:
    """Return the name of the section that a field contains, alone, in a list or in a mapping."""
    options = [
        field,
        *field.get("anyOf", []),
        field.get("items", {}),
        *field.get("patternProperties", {}).values(),
    ]
    names = (option["$ref"].rpartition("/")[2] for option in options if "$ref" in option)
    return next(names, None)


def _first_line(section: dict[str, Any]) -> str:
    return str(section["description"]).partition("\n")[0].replace("``", "`")


EVENTS = """# Events of a run

`events.jsonl` in the folder of a run (`runs/<name>/<run>`) records the run for programs: one JSON object per
line, oldest first. `horovod-train run` and the launcher's pod on Kubernetes write it; if ranks are started
without these, rank 0 writes its own events. `run` and the pod mask the values of `launch.secrets`, as in all
logs.

```text
{"time_unix_s": 1763900000.25, "rank": 0, "kind": "progress", "step": 120, "loss": 0.31, ...}
```

- `time_unix_s`: time of writing, by the clock of the host that writes the file.
- `rank`: the rank that reported the event; `null`: the launcher.
- `kind`, and the fields below. Numbers may be `NaN` and `Infinity`, as written by Python's `json`. The HTTP
  API sends null in their place, and the field `not_finite`: a list of their places and values, such as
  `[["metrics", "loss", "nan"]]`.

Each start of a run begins with `opened`; a restarted job appends to the file. `format_version` is 1;
it increases on incompatible changes. New kinds and new fields are compatible: ignore unknown ones. The file
is limited to 16 MiB and 20,000 lines: above that, lines of the most frequent kind, usually `progress`, are
thinned out until it is half full.
If the disk is full, events are lost, and the state of the run reports it; the job continues.

<!-- The rest is written by docs/generate.py from horovod_train/events/types.py. -->
"""


def events_reference() -> str:
    """Return a table of the kinds of events, with their fields."""
    lines = [EVENTS, "| kind | meaning | fields |", "|---|---|---|"]
    for name, kind in KINDS.items():
        schema = kind.model_json_schema()
        sentence = _first_line(schema)
        fields = [f"`{field}` {_type_of_event(found)}" for field, found in schema["properties"].items()]
        lines.append(f"| `{name}` | {sentence} | {'; '.join(fields)} |")
    return "\n".join(lines) + "\n"


def _type_of_event(field: dict[str, Any]) -> str:
    if "$ref" in field.get("items", {}):
        return "list of `address` (text) and `labels` (mapping)"
    return _type(field)


def _row(name: str, field: dict[str, Any], required: list[str]) -> str:
    default = "required" if name.rpartition(".")[2] in required else f"`{_text(field.get('default'))}`"
    meaning = field.get("description", "").replace("``", "`").replace("\n", " ").replace("|", "\\|")
    return f"| `{name}` | {_type(field)} | {default} | {meaning} |"


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _type(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(option) for option in field["anyOf"]))
    if "$ref" in field:
        return "section"
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if isinstance(field["type"], list):  # of the types, only durations have two
        return "duration"
    kind = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false",
            "null": "null", "array": "list", "object": "mapping"}[field["type"]]  # fmt: skip
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {field[name]:.16g}" for name, sign in signs.items() if name in field]
    return f"{kind} {', '.join(limits)}".strip()


def monitoring_with_metrics() -> str:
    """Return the page about monitoring with its tables as they are in the code."""
    page = MONITORING.read_text()
    tables = {
        "metrics": as_markdown(CATALOG),
        "job metrics": as_markdown(JOB_CATALOG),
        "recordings": recordings_as_markdown(),
    }
    for name, table in tables.items():
        marked = f"<!-- {name} -->\n{table}\n<!-- /{name} -->"
        page = re.sub(
            rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, text=marked: text, page, flags=re.DOTALL
        )
    return page


if __name__ == "__main__":
    # Text as text and fixed ids: the picture changes only when the curves do.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "horovod_train"})
    learning_rate(DOCS / "images" / "learning-rate.svg")
    (DOCS / "job.md").write_text(job_reference())
    (DOCS / "arguments.md").write_text(arguments_reference())
    (DOCS / "events.md").write_text(events_reference())
    (DOCS / "cli.md").write_text(cli_reference())
    (DOCS / "api.md").write_text(api_reference())
    MONITORING.write_text(monitoring_with_metrics())
