"""Which rank is slow, and in what: named where it is so, and nobody else, in real worlds."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.cluster import cluster
from support.launching import BIN, PROGRAMS, TIMEOUT_S, environment, mostly, write_job
from support.running import is_rank, launched

from horovod_train.monitor.history import HistoryReader
from horovod_train.monitor.live import MIN_WINDOW_S, stragglers
from horovod_train.system.processes import background_thread

pytestmark = pytest.mark.ranks
WARM_UP_STEPS = 10


def slowed(folder, ranks, controller, steps, *, launch=None, **args):
    return write_job(
        folder / "job.yaml",
        name="slowed",
        task=f"{PROGRAMS / 'slow_tasks.py'}:Slowed",
        task_args=args,
        run_dir=str(folder / "runs"),
        train={"epochs": 10_000, "max_steps": steps, "batch_size_per_rank": 4},
        checkpoint={"every": None},
        launch={"num_ranks": ranks, "controller": controller, "threads_per_rank": 1, **(launch or {})},
    )


def trained(folder, job, command=None):
    """Train to the end; return what is known of the run."""
    run = command or [str(BIN / "horovod-train"), "run", str(job)]
    done = subprocess.run(
        run, cwd=folder, env=environment(), timeout=TIMEOUT_S, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return seen(folder)


def seen(folder):
    (log_dir,) = (path for path in (folder / "runs" / "slowed").iterdir() if (path / "events.jsonl").exists())
    return log_dir, HistoryReader(log_dir).update()


def last_metrics(log_dir, ranks, name):
    """A metric of each rank as it was in the end."""
    return [
        sum(
            sample.value
            for family in text_string_to_metric_families((log_dir / f"rank-{rank}.prom").read_text())
            for sample in family.samples
            if sample.name == f"horovod_train_{name}"
        )
        for rank in range(ranks)
    ]


def named(history):
    """Ranks that are named over the whole run but for its beginning, and their phases."""
    window = history.ranks.recent(1e9)
    return {each.rank: each.phase for each in stragglers(window)}


@mostly("mpi")
@pytest.mark.parametrize(
    ("args", "phase"),
    [
        ({"data_s": {"1": 0.03}}, "data"),
        pytest.param({"compute_s": {"1": 0.03}}, "forward", marks=pytest.mark.campaign),
    ],
)
def test_one_rank_that_is_30_ms_slower_is_named_with_its_phase(tmp_path, controller, args, phase):
    log_dir, history = trained(tmp_path, slowed(tmp_path, 2, controller, 150, pause_s=0.01, **args))

    assert named(history) == {1: phase}
    waited_for = last_metrics(log_dir, 2, "waited_for_seconds_total")
    waiting = last_metrics(log_dir, 2, "waiting_seconds_total")
    # Each step it is waited for by 30 ms, on the one rank that there is besides.
    assert waited_for[1] == pytest.approx(0.03 * 150, rel=0.35)
    assert waited_for[1] > 5 * waited_for[0]
    assert waiting[0] == pytest.approx(waited_for[1], rel=0.05)
    own = last_metrics(log_dir, 2, "own_seconds_total")
    assert own[1] - own[0] == pytest.approx(0.03 * 150, rel=0.35)


@pytest.mark.campaign
@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_of_two_slow_ranks_both_are_named(tmp_path, controller):
    args = {"data_s": {"1": 0.03}, "compute_s": {"3": 0.03}, "pause_s": 0.03}
    log_dir, history = trained(tmp_path, slowed(tmp_path, 5, controller, 150, **args))

    assert named(history) == {1: "data", 3: "forward"}
    waited_for = last_metrics(log_dir, 5, "waited_for_seconds_total")
    assert min(waited_for[1], waited_for[3]) > 3 * max(waited_for[0], waited_for[2], waited_for[4])


def stopped_now_and_then(pid):
    """Stop a process for 60 ms five times a second."""

    def stop(over):
        while not over.wait(0.14):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.06)
            os.kill(pid, signal.SIGCONT)

    return background_thread(stop)


@pytest.mark.campaign
@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_a_rank_that_is_stopped_now_and_then_is_named(tmp_path, controller):
    import psutil

    process = launched(tmp_path, slowed(tmp_path, 3, controller, 100_000, pause_s=0.02))
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not list(tmp_path.glob("runs/slowed/*/events.jsonl")) or seen(tmp_path)[1].last is None:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.2)
        ranks = [each for each in psutil.Process(process.pid).children(recursive=True) if is_rank(each)]
        (chosen,) = (each for each in ranks if rank_of(each) == "1")
        with stopped_now_and_then(chosen.pid):
            time.sleep(MIN_WINDOW_S + 8)
            window = seen(tmp_path)[1].ranks.recent(MIN_WINDOW_S)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_S)

    found = stragglers(window)
    assert [each.rank for each in found] == [1]
    assert found[0].phase == "forward", "most of a step is spent there"


def rank_of(process):
    environ = process.environ()
    return environ.get("HOROVOD_RANK", environ.get("OMPI_COMM_WORLD_RANK"))


@pytest.mark.campaign
@pytest.mark.parametrize("slow_nodes", [("node2",), ("node1", "node2")], ids=["one way", "both ways"])
@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_a_slow_link_reads_as_communication_and_accuses_nobody(tmp_path, controller, slow_nodes):
    (tmp_path / "cluster").mkdir()
    with cluster(tmp_path / "cluster", ("node1", "node2")) as hosts:
        for node in slow_nodes:
            subprocess.run(
                ["ip", "netns", "exec", hosts.nodes[node].namespace, "tc", "qdisc", "replace", "dev", "eth0",
                 "root", "tbf", "rate", "50mbit", "burst", "256kb", "latency", "50ms"],
                check=True, capture_output=True,
            )  # fmt: skip
        launch = {"hosts": ["node1:1", "node2:1"], "ssh": hosts.ssh}
        job = slowed(tmp_path, 2, controller, 100, pause_s=0.02, width=20_000, launch=launch)
        run = hosts.command(str(BIN / "horovod-train"), "run", str(job))
        log_dir, history = trained(tmp_path, job, run)

    assert named(history) == {}
    communication = last_metrics(log_dir, 2, "communication_seconds_total")
    steps = last_metrics(log_dir, 2, "step_seconds_sum")
    waited_for = last_metrics(log_dir, 2, "waited_for_seconds_total")
    assert communication[0] > 0.5 * steps[0], "200,000 numbers over 50 Mbit/s take more than 100 ms"
    # Over Gloo a rank is done when the kernel has its last bytes, and the other end still waits for them to
    # arrive: behind a link that is slow one way, a rank is waited for without being slow.
    is_buffered = controller == "gloo" and slow_nodes == ("node2",)
    assert max(waited_for) < (0.5 if is_buffered else 0.15) * communication[0]


@pytest.mark.campaign
@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_with_nothing_slowed_nobody_is_named_in_10_000_steps(tmp_path, controller):
    _, history = trained(tmp_path, slowed(tmp_path, 2, controller, 10_000, pause_s=0.002))
    windows = history.ranks.windows

    # Whatever half a minute of the run one looks at.
    for end in range(1, len(windows) + 1):
        recent = type(history.ranks)(windows[:end]).recent(MIN_WINDOW_S)
        if recent.seconds >= MIN_WINDOW_S:
            assert stragglers(recent) == []
    assert sum(window.seconds for window in windows) > MIN_WINDOW_S
    assert Path(tmp_path).is_dir()
