"""Every rank of a running job can be looked at, and says what an outsider can check."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.launching import BIN, PROGRAMS, TIMEOUT_S, environment, free_port, write_job

pytestmark = pytest.mark.ranks
BATCH, NUM_SAMPLES, RANKS = 4, 60, 2


@pytest.fixture
def running(tmp_path, request):
    """Start a job that never ends by itself; give its folder and stop it afterwards."""
    port = free_port()
    path = write_job(
        tmp_path / "job.yaml",
        name="watched",
        framework="numpy",
        task=f"{PROGRAMS / 'quick_tasks.py'}:Noted",
        task_args={"notes": str(tmp_path), "pause_s": 0.05, "num_samples": NUM_SAMPLES},
        run_dir=str(tmp_path / "runs"),
        train={"epochs": 1000, "batch_size_per_rank": BATCH},
        lr={"base_lr": 0.01, "reference_batch_size": BATCH},
        checkpoint={"every": [1, "5 steps"]},
        metrics={"port": port, "grad_norm_every_steps": 1},
        launch={"num_ranks": RANKS},
    )
    taken = socket.socket()
    if getattr(request, "param", None) == "port in use":
        taken.bind(("127.0.0.1", port))
        taken.listen()
    process = subprocess.Popen(
        [str(BIN / "horovod-train"), "run", str(path)],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    yield tmp_path / "runs" / "watched", port, process
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT_S)
    taken.close()


def scrape(address):
    text = urllib.request.urlopen(f"http://{address}/metrics", timeout=5).read().decode()
    return {
        (s.name.removeprefix("horovod_train_"), s.labels.get("phase") or s.labels.get("metric")): (
            s.value,
            s.labels,
        )
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if not s.name.endswith("_bucket")
    }


def scrape_when(folder, process, is_ready):
    """Scrape all targets of the file for Prometheus, again until they are as wanted."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        file = folder / "prometheus-targets.json"
        if file.exists():
            targets = json.loads(file.read_text())
            try:
                found = [scrape(target["targets"][0]) for target in targets]
            except OSError:
                found = []
            if len(found) == RANKS and all(map(is_ready, found)):
                return targets, found
        time.sleep(0.2)
    raise AssertionError("the ranks were never as wanted")


def test_each_rank_tells_its_own_story(running):
    folder, port, process = running

    targets, ranks = scrape_when(
        folder,
        process,
        lambda rank: rank.get(("steps_total", None), (0,))[0] >= 20 and ("evaluation", "loss") in rank,
    )

    for number, (target, found) in enumerate(zip(targets, ranks, strict=True)):
        value = {key: pair[0] for key, pair in found.items()}
        labels = found["steps_total", None][1]
        assert target["targets"] == [f"127.0.0.1:{port + number}"]
        assert target["labels"] == labels
        assert labels["training_job"] == "watched"
        assert labels["rank"] == labels["local_rank"] == str(number)
        # 60 samples over 2 ranks of 4: 7 full steps and one of 4 samples, split over both ranks.
        steps = value["steps_total", None]
        full, rest = divmod(steps, 8)
        assert value["samples_total", None] == full * NUM_SAMPLES / 2 + rest * BATCH
        assert value["epoch", None] == pytest.approx(full + rest * BATCH * RANKS / NUM_SAMPLES)
        assert value["learning_rate", None] == pytest.approx(0.02)
        assert value["world_size_desired", None] == value["world_size_present", None] == RANKS
        # 21 trained numbers and the loss, in double precision.
        assert value["allreduce_bytes_total", None] == steps * (21 + 1) * 8
        assert value["gradient_norm", None] > 0
        phases = sum(v for (name, label), v in value.items() if name == "step_phase_seconds_sum")
        assert phases == pytest.approx(value["step_seconds_sum", None])
        assert value["step_phase_seconds_sum", "compute"] > 0.04 * steps, "the pause is in there"
    losses = {
        found["loss", None][0]
        for found in ranks
        if found["steps_total", None][0] == ranks[0]["steps_total", None][0]
    }
    assert len(losses) == 1, "the loss is the job's, not the rank's"
    assert ranks[0]["checkpoint_size_bytes", None][0] > 1000
    assert ranks[0]["checkpoint_write_seconds_count", None][0] >= 1


@pytest.mark.parametrize("running", ["port in use"], indirect=True)
def test_a_port_in_use_moves_on_and_the_targets_say_where(running):
    folder, port, process = running

    targets, _ = scrape_when(folder, process, lambda rank: ("steps_total", None) in rank)

    assert [target["targets"] for target in targets] == [
        [f"127.0.0.1:{port + 100}"],
        [f"127.0.0.1:{port + 1}"],
    ]
