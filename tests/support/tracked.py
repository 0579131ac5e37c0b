"""What trackers have stored, read back by the libraries of their formats."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from horovod_train.plugins.wandb import framed

Stored = dict[str, list[tuple[int, float]]]


def read_json_lines(path: Path) -> Stored:
    """Return the values of a file by name, in its order."""
    found: Stored = {}
    for entry in map(json.loads, path.read_text().splitlines()):
        for name, value in entry.get("values", {}).items():
            found.setdefault(name, []).append((entry["step"], value))
    return found


def read_tensorboard(folder: Path) -> Stored:
    """Return the scalars of one run, as TensorBoard shows them."""
    # TensorBoard would import TensorFlow, which takes ten seconds.
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run,) = folder.iterdir()
    accumulator = EventAccumulator(str(run), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: [(each.step, each.value) for each in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
        if tag != "epochs"
    }


def read_mlflow(uri: str, experiment: str) -> tuple[Stored, Any]:
    """Return the metrics of the only run of an experiment, as MLflow's client does, and the run."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return {
        name: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }, run


def read_wandb(folder: Path) -> tuple[Stored, dict[str, Any]]:
    """Return the rows of all files of the only run in a folder, in W&B's own format, and the last summary."""
    from wandb.proto import wandb_internal_pb2 as records

    found: Stored = {}
    summary: dict[str, Any] = {}
    paths = sorted(folder.glob("offline-run-*/*.wandb"))
    assert len({path.name for path in paths}) == 1, "one run"
    for path in paths:
        for data in framed(path.read_bytes()):
            record = records.Record.FromString(data)
            if record.HasField("summary"):
                summary |= {each.key: json.loads(each.value_json) for each in record.summary.update}
            for each in record.history.item if record.HasField("history") else ():
                name = each.key or "/".join(each.nested_key)
                if not name.startswith("_"):
                    found.setdefault(name, []).append((record.history.step.num, json.loads(each.value_json)))
    return found, summary
