"""A real Prometheus scrapes a real job, and knows an answer to every query of dashboards and rules."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.launching import BIN, PROGRAMS, TIMEOUT_S, environment, free_port, write_job
from support.prometheus import needs_prometheus, prometheus, promtool

from horovod_train.plugins.dashboards import rules_file
from horovod_train.plugins.dashboards.generate import ANNOTATIONS, PAGES
from horovod_train.plugins.dashboards.rules import RECORDINGS, alerts

pytestmark = [pytest.mark.ranks, needs_prometheus]
RANKS = 3
FAKES = Path(__file__).parents[1] / "fakes"
# A job that goes well has no failure, and this one does not compress its gradients.
NOT_IN_THIS_JOB = ("job_failed", "compression_ratio", "noise_scale", "adascale_gain")


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A job on three ranks with a one-rank run before it, `targets serve`, and a Prometheus on both."""
    folder = tmp_path_factory.mktemp("watched")
    env = environment(PYTHONPATH=str(FAKES), FAKE_GPU_UUID="00112233445566778899aabbccddeeff")
    fields = {
        "framework": "numpy",
        "task": f"{PROGRAMS / 'quick_tasks.py'}:Noted",
        "task_args": {"notes": str(folder), "pause_s": 0.02, "num_samples": 60},
        "run_dir": str(folder / "runs"),
        "lr": {"base_lr": 0.01, "reference_batch_size": 4},
    }
    train = {"batch_size_per_rank": 4}
    alone = write_job(folder / "alone.yaml", name="alone", train={**train, "epochs": 1}, **fields)
    subprocess.run([str(BIN / "horovod-train"), "run", str(alone)], env=env, check=True, timeout=TIMEOUT_S)
    job = write_job(
        folder / "job.yaml",
        name="watched",
        **fields,
        train={**train, "epochs": 100_000},
        checkpoint={"every": [1, "25 steps"]},
        metrics={
            "port": free_port(), "grad_norm_every_steps": 1, "targets_dir": str(folder / "sd"),
            "device_peak_flops": 1e9,
        },
        launch={"num_ranks": RANKS},
    )  # fmt: skip
    (folder / "sd").mkdir()
    with ExitStack() as stack:
        run = stack.enter_context(process(["run", str(job)], folder / "out", env))
        until((folder / "sd" / "watched.json").exists, (folder / "out").read_text)
        serving = ["targets", "serve", str(folder / "runs"), "--port", "0"]
        stack.enter_context(process(serving, folder / "served", env))
        until((folder / "served").read_text, (folder / "out").read_text)
        port = int(re.search(r"http://127.0.0.1:(\d+)/targets", (folder / "served").read_text())[1])
        found = f"127.0.0.1:{port}"
        # The same ranks twice would be counted twice.
        once = {"source_labels": ["__name__"], "regex": "horovod_train_.*", "action": "drop"}
        scrape = [
            {"job_name": "by-file", "file_sd_configs": [{"files": [str(folder / "sd" / "*.json")]}]},
            {
                "job_name": "by-http",
                "http_sd_configs": [{"url": f"http://{found}/targets", "refresh_interval": "1s"}],
                "metric_relabel_configs": [once],
            },
            {"job_name": "jobs", "static_configs": [{"targets": [found]}]},
        ]
        server = stack.enter_context(prometheus(folder / "prometheus", scrape, rules_file()))
        yield folder, server, run, port


@contextmanager
def process(arguments, log, env):
    """Run `horovod-train` while the block does."""
    with log.open("w") as file:
        started = subprocess.Popen(
            [str(BIN / "horovod-train"), *arguments], env=env, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        started.wait(TIMEOUT_S)


def until(is_so, why, seconds=90.0):
    """Wait until something is so, and say why it has to be."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, why()
        time.sleep(0.5)


def test_all_ranks_are_found_by_file_and_by_http(watched):
    folder, server, _, _ = watched

    until(lambda: [health for _, health in server.targets()] == ["up"] * (2 * RANKS + 1), server.targets)
    for job in ("by-file", "by-http"):
        until(
            lambda job=job: server.query(f'sum(up{{job="{job}"}})')[0]["value"][1] == str(RANKS),
            lambda job=job: server.query(f'up{{job="{job}"}}'),
        )
    ranks = {each["metric"]["rank"] for each in server.query('up{job="by-http"}')}
    assert ranks == {"0", "1", "2"}
    assert json.loads((folder / "sd" / "watched.json").read_text())[0]["labels"]["training_job"] == "watched"


def queries():
    """Every query of panels, annotations and rules: what to call it, and the query."""
    for page in PAGES:
        for panel in page.panels:
            for query in panel.queries:
                yield f"{page.uid}: {panel.title}", query.expr
    for name, expr, _ in ANNOTATIONS:
        yield f"annotation: {name}", expr
    for rule in RECORDINGS:
        yield rule.name, rule.expr
    for alert in alerts():
        yield alert.name, alert.expr


def chosen(expr: str) -> str:
    """A query as Grafana asks it, with all jobs chosen."""
    return expr.replace("$job", "watched").replace("$run", ".+")


def is_to_be_empty(name: str, expr: str) -> bool:
    marks = any(word in name for word in ("HorovodTrain", "annotation"))
    absent = any(f'phase="{phase}"' in expr for phase in ("forward", "backward"))
    return marks or absent or any(word in expr for word in NOT_IN_THIS_JOB)


def test_every_query_has_an_answer(watched):
    _, server, run, _ = watched
    asked = list(queries())
    assert len(asked) > 80

    def unanswered():
        assert run.poll() is None
        return [
            name for name, expr in asked if not is_to_be_empty(name, expr) and not server.query(chosen(expr))
        ]

    until(lambda: not unanswered(), unanswered)
    for name, expr in asked:
        if is_to_be_empty(name, expr):
            found = server.query(chosen(expr))
            assert not found or "annotation: checkpoint" in name, f"{name}: {found}"


def test_recordings_say_what_can_be_worked_out_from_the_ranks_own_numbers(watched):
    _, server, _, _ = watched
    until(lambda: server.query("horovod_train:scaling_efficiency:ratio"), lambda: "no efficiency")
    rates, phases = "horovod_train:samples:rate", "count by (rank) (horovod_train:phase:ratio)"
    for query in (rates, phases):
        until(lambda query=query: len(server.query(query)) == RANKS, lambda query=query: server.query(query))

    # In one query each: what was recorded at the same time is compared.
    assert server.value(f"sum(horovod_train:samples:job_rate) / sum({rates})") == pytest.approx(1.0)
    expected = f'sum({rates}) / {RANKS} / sum(horovod_train_baseline_samples_per_second{{rank="0"}})'
    ratio = server.value(f"sum(horovod_train:scaling_efficiency:ratio) / ({expected})")
    assert ratio == pytest.approx(1.0, rel=0.1)
    shares = server.query("sum by (rank) (horovod_train:phase:ratio)")
    assert [float(each["value"][1]) for each in shares] == pytest.approx([1.0] * RANKS, abs=0.02)
    assert server.value("max(horovod_train:own_seconds:per_step)") > 0.02


def test_nothing_fires_while_all_is_well(watched):
    _, server, _, _ = watched

    # A scrape that a busy machine has missed makes an alert pending, until the next evaluation of rules.
    until(lambda: not server.alerts(), server.alerts)
    assert not server.have_fired()


def test_promtool_is_content_with_what_ranks_and_jobs_show(watched):
    folder, server, _, port = watched
    addresses = [each["targets"][0] for each in json.loads((folder / "sd" / "watched.json").read_text())]
    for address in (*addresses, f"127.0.0.1:{port}"):
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        promtool("check", "metrics", given=text)
        assert len(re.findall(r"^# HELP", text, re.MULTILINE)) > 5
    (folder / "promtool.yaml").write_text((folder / "prometheus" / "prometheus.yaml").read_text())
    promtool("check", "config", str(folder / "promtool.yaml"))
    assert server.value('horovod_train_job_state{training_job="watched", state="running"}') == 1
    assert server.value('horovod_train_job_state{training_job="alone", state="succeeded"}') == 1
    assert server.value('horovod_train_job_present_ranks{training_job="watched"}') == RANKS


def test_a_drained_job_leaves_the_targets_and_no_alert(watched):
    """The last test: it ends the job."""
    folder, server, run, _ = watched
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait(TIMEOUT_S) == 75

    until(lambda: len(server.targets()) == 1, server.targets)
    until(
        lambda: not server.query("horovod_train_steps_total"),
        lambda: server.query("horovod_train_steps_total"),
    )
    until(
        lambda: server.query('horovod_train_job_state{training_job="watched", state="preempted"}'),
        lambda: server.query("horovod_train_job_state"),
    )
    assert server.value('horovod_train_job_preemptions_total{training_job="watched"}') == 1
    until(lambda: not server.alerts(), server.alerts)
    assert not server.have_fired()
    last = (folder / "runs" / "watched").glob("*/rank-*.prom")
    assert len(list(last)) == RANKS, "what the last scrape has missed"
