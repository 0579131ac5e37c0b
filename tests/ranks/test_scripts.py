"""Scripts that know nothing of this package, run as they are: what they do is seen."""

from __future__ import annotations

import json
import signal
import subprocess
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.launching import BIN, PROGRAMS, TIMEOUT_S, environment, free_port
from support.tracked import read_json_lines

from horovod_train.monitor.history import HistoryReader
from horovod_train.monitor.live import PHASES, stragglers

pytestmark = pytest.mark.ranks
SCRIPTS = PROGRAMS / "scripts"
# A layer of 16 x 64 and one of 64 x 4, with biases, four bytes a number.
BYTES = (16 * 64 + 64 + 64 * 4 + 4) * 4


def run(folder, script, *arguments, ranks=2, flags=(), check=True):
    command = [
        str(BIN / "horovod-train"), "run", "--script", str(SCRIPTS / script), "-n", str(ranks),
        "--set", f"metrics.port={free_port()}", *flags, "--", *map(str, arguments),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if check:
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def seen(folder, script):
    (log_dir,) = (folder / "runs" / script.removesuffix(".py")).glob("2*")
    return log_dir, HistoryReader(log_dir).update()


def metrics(log_dir, rank):
    text = (log_dir / f"rank-{rank}.prom").read_text()
    return {
        (sample.name.removeprefix("horovod_train_"), sample.labels.get("phase")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def test_a_distributed_optimizer_is_seen_step_by_step(tmp_path):
    """With its slow rank, its phases, bytes, samples and learning rate, and its trackers; over Gloo."""
    flags = ("--controller", "gloo", "--set", "metrics.trackers=[{name: jsonl}]")
    done = run(tmp_path, "torch_optimizer.py", "--steps", 120, "--slow-rank", 1, flags=flags)
    log_dir, history = seen(tmp_path, "torch_optimizer.py")

    assert "on 2 __main__" in done.stdout
    for rank in range(2):
        found = metrics(log_dir, rank)
        assert found["steps_total", None] == 120
        assert found["samples_total", None] == 120 * 8
        assert found["allreduce_bytes_total", None] == 120 * BYTES
        assert found["learning_rate", None] == pytest.approx(0.02)
        assert found["world_size_present", None] == found["world_size_desired", None] == 2
        assert found["gradient_norm", None] > 0
        assert 0 < found["local_loss", None] < 5
        phases = {phase for name, phase in found if name == "step_phase_seconds_sum"}
        assert phases == {"data", "forward", "backward", "allreduce_wait", "optimizer"}
        total = sum(value for (name, _), value in found.items() if name == "step_phase_seconds_sum")
        assert total == pytest.approx(found["step_seconds_sum", None], rel=0.01)
        # What ranks exchange is what the engine counts; states are broadcast at the start, not reduced.
        assert found["exchanged_bytes_total", None] == pytest.approx(120 * BYTES, rel=0.1)
        assert 0 < found["exchange_seconds_total", None] < found["step_seconds_sum", None]
    (slow,) = stragglers(history.ranks.recent(1e9))
    assert (slow.rank, slow.phase) == (1, "forward"), "it sleeps before the backward pass"
    assert slow.excess_s == pytest.approx(0.03, rel=0.3)
    _, waited_for = history.ranks.recent(1e9).wait_times
    assert waited_for[1] > 10 * waited_for[0]
    assert history.summary is None
    assert history.counts["script_done"] == 2
    tracked = read_json_lines(log_dir.parent / "metrics.jsonl")
    for name in ("loss", "lr", "samples_per_s"):
        points = {point.step: getattr(point, name) for point in history.points}
        assert tracked[name] == [(step, value) for step, value in points.items() if value is not None]
    *_, last = (log_dir.parent / "metrics.jsonl").read_text().splitlines()
    assert json.loads(last)["summary"]["state"] == "succeeded"
    assert json.loads(last)["summary"]["own_s/rank_0"] > 0


@pytest.mark.campaign
def test_several_backward_passes_make_one_step(tmp_path):
    run(tmp_path, "torch_optimizer.py", "--steps", 40, "--passes", 2)
    found = metrics(seen(tmp_path, "torch_optimizer.py")[0], 0)

    assert found["steps_total", None] == 40
    assert found["samples_total", None] == 40 * 2 * 8
    assert found["allreduce_bytes_total", None] == 40 * BYTES


@pytest.mark.campaign
@pytest.mark.parametrize("how", ["grouped", "elastic"])
def test_gradients_summed_by_hand_and_elastic_loops_in_a_fixed_world_are_seen(tmp_path, how):
    run(tmp_path, f"torch_{how}.py")
    log_dir, _ = seen(tmp_path, f"torch_{how}.py")

    for rank in range(2):
        found = metrics(log_dir, rank)
        assert found["steps_total", None] == 30
        assert found["allreduce_bytes_total", None] >= 30 * BYTES
        assert found["own_seconds_total", None] < found["step_seconds_sum", None]


@pytest.mark.campaign
@pytest.mark.parametrize("how", ["compiled", "eager"])
def test_a_gradient_tape_is_seen(tmp_path, how):
    run(tmp_path, "tensorflow_tape.py", how)
    log_dir, _ = seen(tmp_path, "tensorflow_tape.py")

    for rank in range(2):
        found = metrics(log_dir, rank)
        assert found["steps_total", None] == 30
        assert found["allreduce_bytes_total", None] == 30 * BYTES
        assert found["learning_rate", None] == pytest.approx(0.02)
        assert ("step_phase_seconds_sum", "compute") in found
        assert (("own_seconds_total", None) in found) is (how == "eager"), "inside of a graph nothing is seen"


@pytest.mark.campaign
def test_a_keras_2_script_is_refused_as_it_is_without_us(tmp_path):
    command = [str(BIN / "horovod-train"), "run", "--script", str(PROGRAMS / "stock_keras.py"), "-n", "2",
               "--set", f"metrics.port={free_port()}", "--", "horovod.keras"]  # fmt: skip
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    assert done.returncode != 0
    assert "does not average gradients under Keras 3" in done.stderr


@pytest.mark.parametrize(("how", "code", "said"), [("exit3", 3, "the script has ended with exit code 3")])
def test_its_exit_code_is_the_jobs(tmp_path, how, code, said):
    done = run(tmp_path, "torch_optimizer.py", "--steps", 20, "--end", how, check=False)

    assert done.returncode == code
    assert said in done.stderr


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("exit75", 75, "everything is saved"),
        ("raise", 1, "ValueError: label 11 is out of range"),
        ("exit0", 0, ""),
    ],
)
def test_its_other_ends_are_told_too(tmp_path, how, code, said):
    done = run(tmp_path, "torch_optimizer.py", "--steps", 20, "--end", how, check=False)

    assert done.returncode == code
    assert said in done.stderr
    assert "runpy" not in done.stderr.partition("ValueError")[0] or how != "raise"


def has_made_a_step(folder):
    return bool(list(folder.glob("runs/*/2*/events.jsonl"))) and seen(folder, "torch_optimizer.py")[1].last


@pytest.mark.campaign
@pytest.mark.parametrize("handles", [False, True])
def test_sigterm_reaches_it_as_sigterm(tmp_path, handles):
    """One that saves and ends with 75 counts as preempted; one that knows nothing of it is ended."""
    arguments = ["--steps", "100000", *(["--save", "yes"] if handles else [])]
    command = [str(BIN / "horovod-train"), "run", "--script", str(SCRIPTS / "torch_optimizer.py"), "-n", "2",
               "--set", f"metrics.port={free_port()}", "--", *arguments]  # fmt: skip
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        deadline = time.monotonic() + TIMEOUT_S
        while (
            not list(tmp_path.glob("runs/*/2*/events.jsonl"))
            or not seen(tmp_path, "torch_optimizer.py")[1].last
        ):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=TIMEOUT_S)

    assert process.returncode == (75 if handles else 143), output
    assert ("saved by the script itself" in output) is handles


def test_a_script_is_launched_rendered_and_described_as_jobs_are(tmp_path):
    script = SCRIPTS / "torch_optimizer.py"
    command = ["render", "--script", str(script), "-n", "8", "--launcher", "slurm", "--", "-x", "1"]
    rendered = subprocess.run(
        [str(BIN / "horovod-train"), *command],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    document, _ = json.JSONDecoder().raw_decode(rendered.stdout[rendered.stdout.index("{") :])

    assert document["framework"] == "script"
    assert document["task"] == f"{script}:__main__"
    assert document["task_args"] == {"arguments": ["-x", "1"]}
    assert set(PHASES) >= {"data"}
