"""Files of trackers after resumes and returns to checkpoints: each step once, with its last value."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.launching import free_port
from support.tracked import read_json_lines, read_mlflow, read_tensorboard, read_wandb
from support.waiting import wait_until

from horovod_train.errors import UserError
from horovod_train.plugins.mlflow import MlFlow
from horovod_train.plugins.tensorboard import TensorBoard
from horovod_train.plugins.wandb import WeightsAndBiases, framed
from horovod_train.telemetry.trackers.csv_file import CsvFile
from horovod_train.telemetry.trackers.json_lines import JsonLines
from horovod_train.telemetry.tracking import TrackedRun

# MLflow's models of its database use what SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*``noload`` loader strategy.*")

JOB = {"name": "j", "train": {"epochs": 2, "max_steps": None}, "data": {"shuffle": True}, "ema": {}}


@pytest.fixture(autouse=True)
def databases_are_closed():
    yield
    store = sys.modules.get("mlflow.store.tracking.sqlalchemy_store")
    for engine in store.SqlAlchemyStore._engine_map.values() if store else ():
        engine.dispose()
    requests = sys.modules.get("mlflow.utils.request_utils")
    if requests:
        requests._cached_get_request_session.cache_clear()
        gc.collect()


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


FIRST_VALUES = {
    # These two store no second value of a step: values are those of the first pass.
    "loss": [(1, 9.0), (2, 8.0), (3, 7.0), (4, 6.0), (5, np.inf)],
    "lr": [(1, 0.1), (2, 0.1), (3, 0.1), (4, 0.1)],
    "eval/acc": [(4, 0.1)],
}
SUMMARY = {"state": "succeeded", "checkpoint": "/c/step-5", "own_s/rank_0": 0.25, "waiting/rank_0": 0.5}


def killed_resumed_and_summarized(make, folder):
    """As above, without a value that is not finite, and with a summary."""
    first = [(step, {"loss": 10.0 - step, "lr": 0.1}) for step in range(1, 5)]
    trained(make, folder, "a", 0, *first, (4, {"eval/acc": 0.1})).end()
    tracker = trained(make, folder, "b", 2, (3, {"loss": 7.0}), (4, {"loss": 6.0}), (5, {"loss": np.inf}))
    tracker.log(4, 1.0, {"loss": 1.5})
    tracker.log(5, 1.25, {"loss": 1.25})
    tracker.summarize(SUMMARY)
    tracker.end()


def test_mlflow_removes_what_a_killed_rank_has_left(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    old, new = tmp_path / ".mlflow.db-old", tmp_path / ".mlflow.db-new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "mlflow.db").touch()
    os.utime(old, (0, 0))
    tracker = trained(MlFlow, tmp_path / "j", "a", 0, (1, {"loss": 1.0}))
    tracker.end()

    os.utime(new, (0, 0))
    trained(MlFlow, tmp_path / "k", "a", 0, (1, {"loss": 1.0})).end()  # the database is there

    assert not tracker.is_preparing
    assert not old.exists()
    assert not new.exists()


def test_mlflow_has_each_step_once_and_the_job(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    killed_resumed_and_summarized(MlFlow, tmp_path / "j")
    found, run = read_mlflow(f"sqlite:///{tmp_path}/mlflow.db", "j")

    assert {name: found[name] for name in FIRST_VALUES} == {
        **FIRST_VALUES,
        "loss": [
            *FIRST_VALUES["loss"][:-1],
            (5, pytest.approx(np.finfo(float).max)),
        ],  # MLflow has no infinity
    }
    assert found["summary/own_s/rank_0"] == [(5, 0.25)]
    assert run.info.status == "FINISHED"
    assert run.data.params["train.epochs"] == "2"
    assert run.data.params["version.torch"] == "2.13.0"
    assert run.data.tags["horovod_train.checkpoint"] == "/c/step-5"
    assert run.data.tags["horovod_train.returned_to"] == "4"
    assert run.data.tags["horovod_train.run_id"] == "b"
    assert (tmp_path / "mlflow-artifacts" / run.info.run_id / "artifacts" / "checkpoint.txt").read_text() == (
        "/c/step-5\n"
    )


def test_mlflow_uses_the_experiment_and_the_run_of_its_own_variables(tmp_path, monkeypatch):
    uri = f"sqlite:///{tmp_path}/x.db"
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of the site")
    trained(partial(MlFlow, uri), tmp_path / "j", "a", 0, (1, {"loss": 1.0})).end()
    found, _ = read_mlflow(uri, "of the site")
    assert found["loss"] == [(1, 1.0)]

    import mlflow

    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.create_experiment("made by a scheduler")
    parent = client.create_run(experiment).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", parent)
    for job in ("k", "l"):
        trained(partial(MlFlow, uri), tmp_path / job, "b", 0, (1, {"loss": 2.0})).end()

    children = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent}'")
    assert [run.data.metrics["loss"] for run in children] == [2.0, 2.0]
    assert {run.data.tags["horovod_train.folder"] for run in children} == {
        str(tmp_path / job) for job in ("k", "l")
    }


def test_mlflow_continues_a_run_whose_parameters_have_changed(tmp_path):
    uri = f"sqlite:///{tmp_path}/x.db"
    for run_id, step, epochs in (("a", 0, 2), ("b", 1, 9)):
        tracker = MlFlow(uri, "e")
        job = {**JOB, "train": {"epochs": epochs}}
        tracker.start(TrackedRun(job, run_id, tmp_path / "j", 2, step, {}))
        tracker.log(step + 1, 1.0, {"loss": 1.0})
        tracker.end()
    found, run = read_mlflow(uri, "e")

    assert found["loss"] == [(1, 1.0), (2, 1.0)]
    assert run.data.params["train.epochs"] == "2"
    assert run.data.tags["changed.train.epochs"] == "9"
    assert run.info.status == "FAILED", "no summary has told of a success"


def test_mlflow_takes_names_and_values_that_it_has_no_characters_or_room_for(tmp_path):
    uri = f"sqlite:///{tmp_path}/x.db"
    tracker = MlFlow(uri)
    tracker.start(TrackedRun({"name": "j", "env": {"A=B": "x" * 20_000}}, "a", tmp_path / "j", 1, 0, {}))
    tracker.log(1, float("nan"), {"eval/top@5 (%)": 0.5})
    tracker.end()
    found, run = read_mlflow(uri, "j")

    (name,) = found
    assert name.startswith("eval/top_5 ____")
    assert found[name] == [(1, 0.5)]
    assert next(v for k, v in run.data.params.items() if k.startswith("env.A_B_")).startswith("xxx")


@pytest.mark.parametrize("uri", ["https://me:secret@mlflow.example", "https://token@mlflow.example"])
def test_no_credentials_are_part_of_a_job(uri):
    with pytest.raises(UserError, match="contains credentials"):
        MlFlow(uri)


def test_mlflow_takes_any_field_of_a_job_and_any_folder(tmp_path):
    uri = f"sqlite:///{tmp_path}/x.db"
    job = {"name": "j", "task_args": {"a:b": 1, "a@b": 2, "a//b": 3, "x" * 300: 4, "..": 5}}
    for run_id, step in (("a", 0), ("b", 1)):
        tracker = MlFlow(uri)
        tracker.start(TrackedRun(job, run_id, tmp_path / "it's", 1, step, {}))
        tracker.log(step + 1, 1.0, {"acc@1": 0.5, "acc:1": 0.25})
        tracker.end()
    found, run = read_mlflow(uri, "j")

    assert {value for name, value in run.data.params.items() if "task_args" in name} == set("12345")
    assert sorted(points for points in found.values()) == [[(1, 0.25), (2, 0.25)], [(1, 0.5), (2, 0.5)]]


def test_two_jobs_that_share_a_file_or_folder_do_not_touch_each_other(tmp_path):
    for make in (JsonLines, TensorBoard):
        path = str(tmp_path / make.__name__)
        for job, run_id, step in (("a", "a1", 0), ("b", "b1", 0), ("b", "b2", 1), ("a", "a2", 2)):
            tracker = make(path)
            tracker.start(TrackedRun({"name": job}, run_id, tmp_path / job, 1, step, {}))
            for at in range(step + 1, step + 4):
                tracker.log(at, 1.0, {"loss": float(at)})
            tracker.end()
    rows = [json.loads(line) for line in (tmp_path / "JsonLines").read_text().splitlines()]

    steps = [(row["run"], row["step"]) for row in rows if "step" in row]
    assert [each for each in steps if each[0][0] == "a"] == [
        ("a1", 1),
        ("a1", 2),
        *(("a2", n) for n in (3, 4, 5)),
    ]
    assert [each for each in steps if each[0][0] == "b"] == [("b1", 1), *(("b2", n) for n in (2, 3, 4))]
    for job, last in (("a", 5), ("b", 4)):
        shown = read_tensorboard(tmp_path / "TensorBoard" / job)
        assert [step for step, _ in shown["loss"]] == list(range(1, last + 1))


def test_a_line_that_lacks_only_its_end_is_not_joined_with_the_next(tmp_path):
    trained(JsonLines, tmp_path, "a", 0, (1, {"loss": 1.0}))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().removesuffix("\n"))
    path.chmod(0o640)
    trained(JsonLines, tmp_path, "b", 1, (2, {"loss": 2.0}))

    assert read_json_lines(path)["loss"] == [(1, 1.0), (2, 2.0)]
    assert path.stat().st_mode & 0o777 == 0o640


def test_wandb_has_each_step_once_and_the_job(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    killed_resumed_and_summarized(WeightsAndBiases, tmp_path / "j")
    found, summary = read_wandb(tmp_path / "j" / "wandb")

    assert found == {**FIRST_VALUES, "loss": [*FIRST_VALUES["loss"][:-1], (5, np.inf)]}
    assert {name: summary[name] for name in SUMMARY} == SUMMARY
    assert summary["returned_to"] == 4


def test_records_of_wandb_are_read_across_blocks_and_up_to_a_cut():
    """Independent of what W&B writes: fragments of LevelDB's log format, made by hand."""
    records = [b"a" * 10, b"b" * 70_000, b"", b"c" * (32 * 1024 - 200), b"d" * 300]
    content, block = bytearray(7), 32 * 1024
    for data in records:
        begin, is_first = 0, True
        while True:
            left = block - len(content) % block
            if left < 7:
                content += bytes(left)
                continue
            part = data[begin : begin + left - 7]
            begin += len(part)
            is_last = begin == len(data)
            kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[is_first, is_last]
            content += bytes(4) + len(part).to_bytes(2, "little") + bytes([kind]) + part
            is_first = False
            if is_last:
                break

    assert list(framed(bytes(content))) == records
    for size in range(len(content) - 1, len(content) - 500, -7):
        assert list(framed(bytes(content[:size]))) == records[:4] or size < len(content) - 300


@pytest.mark.parametrize("tracker", [MlFlow, WeightsAndBiases])
def test_a_package_that_is_missing_is_named_with_its_extra(tracker, monkeypatch):
    module = sys.modules[tracker.__module__]
    monkeypatch.setattr(module, "find_spec", lambda name: None)

    with pytest.raises(UserError, match="is not installed") as caught:
        tracker()

    assert "pip install 'horovod_train[" in caught.value.hint


def test_wandb_knows_two_modes():
    with pytest.raises(UserError, match="allowed: online, offline"):
        WeightsAndBiases(mode="dryrun")


@pytest.fixture
def server(tmp_path):
    """A real MLflow server; its address."""
    port = free_port()
    program = Path(sys.executable).with_name("mlflow")
    command = [program, "server", "--port", str(port), "--backend-store-uri", f"sqlite:///{tmp_path}/s.db"]
    with subprocess.Popen(
        [*command, "--artifacts-destination", tmp_path / "artifacts", "--workers", "1"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, cwd=tmp_path,
    ) as process:  # fmt: skip
        try:
            wait_until(lambda: is_open(port), 90)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def is_open(port):
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.campaign
def test_mlflow_may_be_a_server(tmp_path, server, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    killed_resumed_and_summarized(MlFlow, tmp_path / "j")
    found, run = read_mlflow(server, "j")

    assert found["lr"] == FIRST_VALUES["lr"]
    assert found["eval/acc"] == FIRST_VALUES["eval/acc"]
    assert run.info.status == "FINISHED"
    assert list((tmp_path / "artifacts").rglob("checkpoint.txt"))
