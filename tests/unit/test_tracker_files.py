"""Files of trackers after resumes and returns to checkpoints: each step once, with its last value."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.tracked import read_json_lines, read_tensorboard

from horovod_train.telemetry.trackers.base import TrackedRun
from horovod_train.telemetry.trackers.csv_file import CsvFile
from horovod_train.telemetry.trackers.json_lines import JsonLines
from horovod_train.telemetry.trackers.tensorboard import TensorBoard

JOB = {"name": "j", "train": {"epochs": 2, "max_steps": None}, "data": {"shuffle": True}, "ema": {}}


def run_of(folder, run_id, step):
    return TrackedRun(JOB, run_id, folder, 2, step, {"torch": "2.13.0"})


def trained(make, folder, run_id, start, *calls):
    """Track a run without ending it, as after kill -9; a call is a step and its loss, or an evaluation."""
    tracker = make()
    tracker.start(run_of(folder, run_id, start))
    for step, values in calls:
        tracker.log(step, step / 4, values)
    return tracker


def killed_and_resumed(make, folder):
    """Four steps, killed; resumed from step 2, one step back to step 3 later, then to the end."""
    first = [(step, {"loss": 10.0 - step, "lr": 0.1}) for step in range(1, 5)]
    trained(make, folder, "a", 0, *first, (4, {"eval/acc": 0.1})).end()  # writes nothing more
    again = [(3, {"loss": 2.5, "lr": 0.2}), (4, {"loss": 2.0}), (4, {"eval/acc": 0.5}), (5, {"loss": np.inf})]
    tracker = trained(make, folder, "b", 2, *again, (4, {"loss": 1.5}), (4, {"eval/acc": 0.75}))
    tracker.end()


EXPECTED = {
    "loss": [(1, 9.0), (2, 8.0), (3, 2.5), (4, 1.5)],
    "lr": [(1, 0.1), (2, 0.1), (3, 0.2)],
    "eval/acc": [(4, 0.75)],
}


def test_json_lines_have_each_step_once(tmp_path):
    killed_and_resumed(JsonLines, tmp_path)

    assert read_json_lines(tmp_path / "metrics.jsonl") == EXPECTED


def test_tensorboard_shows_each_step_once(tmp_path):
    killed_and_resumed(TensorBoard, tmp_path)
    found = read_tensorboard(tmp_path / "tensorboard")

    assert found.keys() == EXPECTED.keys()
    for name, points in EXPECTED.items():
        assert found[name] == [(step, np.float32(value)) for step, value in points]


def test_a_training_that_starts_over_leaves_the_values_of_the_one_before(tmp_path):
    for run_id in "ab":
        trained(JsonLines, tmp_path, run_id, 0, (1, {"loss": 1.0}), (2, {"loss": float("nan")}))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]

    assert [(line["run"], line.get("step")) for line in lines] == [
        *[("a", None), ("a", 1), ("a", 2)],
        *[("b", None), ("b", 1), ("b", 2)],
    ]
    assert lines[2]["values"] == {"loss": None}
    assert lines[0] == {
        "run": "a", "from_step": 0, "world_size": 2, "versions": {"torch": "2.13.0"}, "job": JOB,
    }  # fmt: skip


def test_a_line_that_a_kill_has_cut_is_removed_by_the_next_start(tmp_path):
    trained(JsonLines, tmp_path, "a", 0, (1, {"loss": 1.0}))
    file = tmp_path / "metrics.jsonl"
    file.write_text(file.read_text() + '{"run": "a", "st')
    trained(JsonLines, tmp_path, "b", 1, (2, {"loss": 0.5}))

    assert read_json_lines(file) == {"loss": [(1, 1.0), (2, 0.5)]}


def test_fields_and_versions_are_hyperparameters_of_tensorboard(tmp_path):
    trained(TensorBoard, tmp_path, "a", 0).end()
    (file,) = (tmp_path / "tensorboard" / "a").iterdir()
    data = file.read_bytes()

    for name in ("train.epochs", "train.max_steps", "data.shuffle", "torch"):
        assert name.encode() in data


@pytest.mark.parametrize("make", [CsvFile, JsonLines, TensorBoard])
def test_a_folder_that_cannot_be_written_is_an_error(make, tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(OSError, match="file"):
        make("file/below").start(run_of(tmp_path, "a", 0))


@pytest.mark.parametrize("make", [JsonLines, TensorBoard])
def test_an_evaluation_that_a_resume_repeats_is_there_once(make, tmp_path):
    trained(make, tmp_path, "a", 0, (1, {"loss": 1.0}), (1, {"eval/acc": 0.5})).end()
    trained(make, tmp_path, "b", 1, (1, {"eval/acc": 0.5}), (2, {"loss": 0.5}), (2, {"eval/acc": 0.75})).end()
    found = (
        read_json_lines(tmp_path / "metrics.jsonl")
        if make is JsonLines
        else read_tensorboard(tmp_path / "tensorboard")
    )

    assert found == {"loss": [(1, 1.0), (2, 0.5)], "eval/acc": [(1, 0.5), (2, 0.75)]}
