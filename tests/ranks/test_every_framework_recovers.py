"""In every framework: killed and resumed is the same as never killed, and each rank can be watched."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from http.client import HTTPException

import numpy as np
import pytest
from frameworks.net import Samples
from prometheus_client.parser import text_string_to_metric_families
from support.checkpoints import arrays, newest
from support.files import in_files
from support.launching import (
    PROGRAMS,
    TIMEOUT_S,
    bin_of,
    environment,
    free_port,
    name_of,
    variables_of,
    write_job,
)
from support.pools import CONTROLLERS

from horovod_train.checkpoint.store import read_checkpoint, read_manifest

RANKS, BATCH_SIZE, NUM_SAMPLES, EPOCHS, LR = 2, 4, 50, 3, 0.01
# 25 samples per rank and epoch: rank 1 goes in its second epoch.
KILL_AFTER = 46
PHASES = {
    "torch": {"data", "forward", "backward", "allreduce_wait", "optimizer"},
    "tensorflow": {"data", "compute"},
    "keras on tensorflow": {"compute"},
    "keras on torch": {"data", "compute", "allreduce_wait"},
    "keras on jax": {"data", "compute", "allreduce_wait"},
    "jax": {"data", "compute", "allreduce_wait", "optimizer"},
    "lightning": {"data", "forward", "backward", "allreduce_wait", "optimizer"},
    "transformers": {"data", "forward", "backward", "allreduce_wait", "optimizer"},
    "mxnet": {"data", "compute", "allreduce_wait", "optimizer"},
}
NO_NORM = "Keras provides no gradient norm: the metric is absent, not zero"
pytestmark = pytest.mark.ranks


def job(folder, name, framework, controller, kill_after=0, **train):
    return write_job(
        folder / f"{name}.yaml",
        name=name,
        framework=framework,
        task=f"frameworks.{framework}_task:Task",
        task_args={"dropout": 0.25, "pause_s": 0.015, "kill_after": kill_after},
        run_dir=str(folder / "runs"),
        train={"epochs": EPOCHS, "batch_size_per_rank": BATCH_SIZE, **train},
        optimizer={"name": "adam"},
        lr={"base_lr": LR, "scaling": "none"},
        metrics={"port": free_port(), "grad_norm_every_steps": 1},
        checkpoint={"every": "3 steps", "keep_last": 100},
        launch={"num_ranks": RANKS, "controller": controller},
    )


def weights_of(path):
    """The weights of a checkpoint, by name."""
    blobs = read_checkpoint(path).arrays["model"]
    return {name: np.frombuffer(blob.data, blob.dtype) for name, blob in blobs.items()}


def watched_run(path, folder, name, env):
    """Run a job until one of its ranks is killed; return what each rank's metrics said last."""
    command = ["horovod-train", "run", str(path)]
    targets = folder / "runs" / name / "prometheus-targets.json"
    last: list[str] = []
    with subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        deadline = time.monotonic() + TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
            try:
                addresses = [entry["targets"][0] for entry in json.loads(targets.read_text())]
                # Who asks the same again within a second gets the same answer.
                question = f"metrics?asked={time.monotonic()}"
                found = [
                    urllib.request.urlopen(f"http://{address}/{question}", timeout=5).read().decode()
                    for address in addresses
                ]
            except (OSError, HTTPException):
                continue
            # At the end there is no target any more, and a rank that is killed does not finish its answer.
            if found and all("world_size_present" in text for text in found):
                last = found
        output, _ = process.communicate()
    assert process.returncode == 1, output
    return [parsed(text) for text in last]


def parsed(text):
    found: dict[str, float] = {}
    phases = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("horovod_train_")
            if "phase" in sample.labels:
                phases.add(sample.labels["phase"])
            elif not sample.name.endswith("_bucket"):
                found[name] = sample.value
    return found, phases


@pytest.mark.parametrize("run", CONTROLLERS)
def test_killed_and_resumed_is_bit_for_bit_the_undisturbed_run(run, tmp_path, pools, matrix):
    for row in ("killed and resumed: bitwise equal to an uninterrupted run", "metrics of each rank"):
        matrix(row, run)
    matrix("measured phases of a step", run, ", ".join(sorted(PHASES[run])))
    matrix("gradient norm", run, f"no: {NO_NORM}" if run.startswith("keras") else "yes")
    framework, controller = name_of(run), CONTROLLERS[run]
    settings = {"PYTHONPATH": str(PROGRAMS), "programs": bin_of(framework), **variables_of(run)}
    pool = pools.get(run, RANKS, controller)
    whole = job(tmp_path, "whole", framework, controller)
    pool.run("run_job.py", str(whole), folder=tmp_path)
    killed = job(tmp_path, "killed", framework, controller, kill_after=KILL_AFTER)
    scraped = watched_run(killed, tmp_path, "killed", environment(**settings))
    at_kill = read_manifest(newest(tmp_path, "killed")).step
    resumed = job(tmp_path, "killed", framework, controller)

    done = pool.run("run_job.py", str(resumed), folder=tmp_path)

    assert at_kill in (6, 9, 12), "the kill came in the second epoch, whose steps are 8 to 14"
    assert f"resumed from step-{at_kill:012d}" in done[0]["output"]
    assert arrays(newest(tmp_path, "killed")) == arrays(newest(tmp_path, "whole"))
    check_metrics(run, scraped)


@pytest.mark.campaign
@pytest.mark.parametrize("run", CONTROLLERS)
def test_files_are_read_once_after_kill_9_on_1_3_2_and_5_ranks(run, tmp_path):
    """Weights are those of one process that read all samples in the same order."""
    in_files(tmp_path, "train", Samples(96, 1), (0, 31, 31, 48, 96))
    framework = name_of(run)
    env = environment(PYTHONPATH=str(PROGRAMS), **variables_of(run))
    decode = "dictionary" if framework == "transformers" else "pair"

    def trained(name, worlds, num_workers):
        for place, (num_ranks, kill_after) in enumerate(worlds):
            noted = tmp_path / f"killed-{place}"
            path = write_job(
                tmp_path / f"{name}.yaml",
                name=name,
                framework=framework,
                task=f"frameworks.{framework}_task:Task",
                run_dir=str(tmp_path / "runs"),
                train={"epochs": 3, "global_batch_size": 12, "batch_size_per_rank": 4},
                optimizer={"name": "adam"},
                lr={"base_lr": 0.01, "scaling": "none"},
                data={
                    "source": "arrays",
                    "files": str(tmp_path / "train-*.safetensors"),
                    "decode": f"frameworks.net:{decode}",
                    "num_workers": num_workers,
                },
                checkpoint={"every": "2 steps", "background": False},
                evaluation={"every": 99},
                launch={
                    "num_ranks": num_ranks,
                    "controller": CONTROLLERS[run],
                    "env": {
                        "KILL_AFTER": str(kill_after),
                        "KILLED": str(noted),
                        "CHECKPOINTS": str(tmp_path / "runs" / name / "checkpoints"),
                    },
                },
            )
            command = [bin_of(framework) / "horovod-train", "run", str(path)]
            done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
            said = done.stdout + done.stderr
            assert noted.exists() == (done.returncode != 0) == bool(kill_after), said
            assert not place or "resumed from step-" in said
        return weights_of(newest(tmp_path, name))

    alone = trained("alone", [(1, 0)], 0)
    killed = trained("killed", [(1, 40), (3, 12), (2, 12), (5, 0)], 2)
    assert killed.keys() == alone.keys()
    for name, weights in alone.items():
        np.testing.assert_allclose(killed[name], weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize("run", ["torch"])
def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(run, tmp_path, pools):
    framework, controller = name_of(run), CONTROLLERS[run]
    pool, found = pools.get(run, RANKS, controller), []
    for number, seed in enumerate((1, 1, 2)):
        path = job(tmp_path, f"seed-{number}", framework, controller, seed=seed)
        pool.run("run_job.py", str(path), folder=tmp_path)
        found.append(arrays(newest(tmp_path, f"seed-{number}")))

    assert found[0] == found[1]
    assert found[0] != found[2]


def check_metrics(run, scraped):
    assert len(scraped) == RANKS
    for found, phases in scraped:
        assert found["world_size_present"] == RANKS
        assert found["learning_rate"] == pytest.approx(LR)
        assert 0 < found["steps_total"] <= EPOCHS * 7
        assert 0 < found["loss"] < 3
        assert found["allreduce_bytes_total"] >= found["steps_total"] * 163 * 4
        assert phases == PHASES[run]
        assert ("gradient_norm" in found) == (not run.startswith("keras"))
