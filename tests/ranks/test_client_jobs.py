"""The Python client on real ranks: submitted, followed and ended from another process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import numpy as np
import psutil
import pytest
from support.launching import TIMEOUT_S, quick_job
from support.tracked import read_json_lines, read_mlflow, read_tensorboard, read_wandb
from support.waiting import wait_until

import horovod_train as ht
from horovod_train.checkpoint.store import read_checkpoint
from horovod_train.events.types import Evaluation, Progress

pytestmark = [
    pytest.mark.ranks,
    # MLflow's models of its database use what SQLAlchemy 2.1 deprecates.
    pytest.mark.filterwarnings("ignore:.*``noload`` loader strategy.*"),
]
# What an Airflow worker does: start a job, and exit.
SUBMITS = """
import json, sys
import horovod_train as ht
print(ht.submit(json.loads(sys.argv[1])).id)
"""


@pytest.fixture
def described(tmp_path, monkeypatch):
    yield quick_job(tmp_path, monkeypatch)
    # A launcher exits a moment after it has written its last state.
    wait_until(lambda: not psutil.Process().children(), 10)
    store = sys.modules.get("mlflow.store.tracking.sqlalchemy_store")
    for engine in store.SqlAlchemyStore._engine_map.values() if store else ():
        engine.dispose()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_job_that_another_process_submitted_is_followed_to_its_result(described, num_ranks, tmp_path):
    described["launch"] = {"num_ranks": num_ranks}
    done = subprocess.run(
        [sys.executable, "-c", SUBMITS, json.dumps(described)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    job = ht.job(done.stdout.strip())

    lines = list(job.logs(follow=True))
    result = job.result(TIMEOUT_S)

    assert [each.id for each in ht.jobs()] == [job.id]
    assert job.launcher == ("local" if num_ranks == 1 else "horovodrun")
    assert any(line.startswith("trained test: 3 epochs") for line in lines)
    progress = [r.event for r in job.events() if isinstance(r.event, Progress)]
    last = [r.event for r in job.events() if isinstance(r.event, Evaluation)][-1]
    assert job.metrics()["loss"][-1] == (result.num_steps, progress[-1].loss)
    assert result.metrics == last.metrics
    assert read_checkpoint(result.checkpoint).summary["world_size"] == num_ranks


def test_handles_are_used_in_an_event_loop(described):
    async def both():
        jobs = [
            await asyncio.to_thread(ht.submit, described, {"name": name, "launch.num_ranks": 1})
            for name in ("one", "two")
        ]
        return await asyncio.gather(*(asyncio.to_thread(job.wait, TIMEOUT_S) for job in jobs))

    assert [status.state for status in asyncio.run(both())] == ["succeeded", "succeeded"]


def test_trackers_have_each_step_of_a_job_that_was_killed_and_resumed_once(described, tmp_path, monkeypatch):
    for variable in ("MLFLOW_TRACKING_URI", "WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    names = ("jsonl", "tensorboard", "mlflow", "wandb")
    described["metrics"]["trackers"] = [{"name": name} for name in names]
    described["checkpoint"] = {"every": [1, "3 steps"]}
    described["train"]["epochs"] = 60
    job = ht.submit(described)
    # MLflow is imported in the background, while ranks train.
    database = tmp_path / "runs" / "mlflow.db"
    wait_until(lambda: database.exists() and len(job.metrics().get("eval/loss", [])) > 1, TIMEOUT_S)
    job.cancel(now=True)
    again = ht.submit(described, {"task_args.pause_s": 0.0})
    result = again.result(TIMEOUT_S)

    folder = tmp_path / "runs" / "test"
    rows = read_json_lines(folder / "metrics.jsonl")
    assert [step for step, _ in rows["loss"]] == list(range(1, result.num_steps + 1))
    assert set(again.metrics()["loss"]) <= set(rows["loss"])
    assert rows["eval/loss"][-1][1] == result.metrics["loss"]
    assert len(rows["eval/loss"]) == described["train"]["epochs"]
    assert set(rows) == {"loss", "lr", "samples_per_s", "grad_norm", "eval/loss"}
    # Throughput is that of the reported steps.
    assert set(again.metrics()["samples_per_s"][:-1]) <= set(rows["samples_per_s"])

    stored = read_mlflow(f"sqlite:///{database}", "test")[0], read_wandb(folder / "wandb")[0]
    shown = read_tensorboard(folder / "tensorboard")
    for name in ("loss", "lr", "eval/loss"):
        assert shown[name] == [(step, np.float32(value)) for step, value in rows[name]], name
        reported = {*job.metrics()[name], *again.metrics()[name]}
        for found in stored:  # values that were not sent before the kill are those of the events
            assert set(found[name]) <= set(rows[name])
            assert len(found[name]) == len(dict(found[name]))
            steps = {step for step, _ in reported}
            steps |= {step for step, _ in rows[name] if step > again.metrics()["loss"][0][0]}
            assert steps <= {step for step, _ in found[name]}, name
    summaries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # The first run wrote one, too, if its ranks ended before they were killed.
    summary = [each["summary"] for each in summaries if "summary" in each][-1]
    assert summary["state"] == "succeeded"
    assert summary["checkpoint"] == str(result.checkpoint)
    assert {f"{name}/rank_{rank}" for name in ("own_s", "waiting") for rank in (0, 1)} <= set(summary)
    _, run = read_mlflow(f"sqlite:///{database}", "test")
    assert run.data.metrics["summary/own_s/rank_1"] == summary["own_s/rank_1"]
    assert run.info.status == "FINISHED"
