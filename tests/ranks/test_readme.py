"""Every command of the README works as written, in its order; and of the tour, and of one's own loop."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from support.launching import TIMEOUT_S, environment, free_port
from support.waiting import wait_until

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).parents[2]
README = "\n".join((ROOT / page).read_text() for page in ("README.md", "docs/tour.md", "docs/own-loop.md"))
FILES = re.findall(r"```\w+ file=(\S+)\n(.*?)```", README, flags=re.DOTALL)
BLOCKS = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
INLINE = sorted(set(re.findall(r"`((?:make|horovod-train|horovodrun) [^`]+)`", README)))
# These need more than a test has, or are what runs this test.
NOT_RUN_HERE = {
    "make test": "runs this test",
    "make servers": "installs packages; CI runs it",
    "make image": "takes ten minutes; CI runs it",
    "horovod-train data index JOB": "tests/ranks/test_data.py",
    "horovod-train data inspect JOB": "tests/ranks/test_data.py",
    "horovod-train data verify JOB": "tests/ranks/test_data.py",
    "horovod-train drain ID": "tests/ranks/test_hosts.py and test_slurm.py name jobs",
    "make bench": "takes half an hour; tests/unit/test_benchmarks.py runs a short one",
    "make mxnet": "has been run by `make test` before this test",
    "make accuracy": "takes minutes; tests/ranks/test_studies.py runs a short one",
    next(command for command in INLINE if "node01" in command): "planned below; test_hosts.py has hosts",
    "horovod-train study digits --ranks 1,2,4,8 --seeds 5 --policies linear,adascale": "takes six minutes; "
    "tests/ranks/test_studies.py runs short ones",
    "make train": "is the first block of commands",
    "make check": "runs this test",
    "horovod-train serve runs": "serves until it is stopped; started below, after the first training",
    "horovod-train ui runs": "the same under its former name; started below, too",
    "horovod-train report runs -o report.html": "needs a run; run below, after the first training",
    "horovod-train run --script train.py -n 4 -- ARGS": "tests/ranks/test_scripts.py runs scripts",
    "horovod-train serve --allow-submit --tokens FILE": "tests/ranks/test_service.py starts it",
    "horovod-train targets serve": "serves until it is stopped; tests/ranks/test_prometheus.py asks it",
}


def is_run_elsewhere(command: str) -> bool:
    """Whether it is one of those, has a place for a name, or is the subject of ``test_engine.py``."""
    return command in NOT_RUN_HERE or "<" in command or command.endswith(("engine build", "engine check"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    for name, content in FILES:
        (folder / name).write_text(content)
    return folder


def test_the_tasks_of_the_readme_are_trained_under_every_strategy(folder):
    """digits, spiral and gpt; vit-digits is a task of Transformers, which sums gradients (test_vit.py)."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "corpus" / "shipped.py", folder],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=2 * TIMEOUT_S,
        check=True,
    )

    codes = json.loads(done.stdout)
    assert len(codes) == 3 * 6 + 1
    assert not {job: code for job, code in codes.items() if code != 0}


def run(command: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        ["bash", "-euc", command],
        cwd=cwd,
        env=environment(HOROVOD_TRAIN__METRICS__PORT=str(free_port()), **env),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_the_first_command_trains_and_ends_with_a_summary(tmp_path):
    assert BLOCKS[0].strip() == "make train"

    output = run("make train", ROOT, HOROVOD_TRAIN__RUN_DIR=str(tmp_path))

    # Five seeds gave 0.982 on average, with a standard deviation of 0.007 (README, "make accuracy").
    assert float(re.search(r"evaluation .*accuracy ([\d.]+)", output)[1]) >= 0.95
    for line in ("throughput", "global batch    64", "peak 0.03", "metrics", "checkpoint"):
        assert line in output


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run("make train", ROOT, HOROVOD_TRAIN__RUN_DIR=str(folder / "runs"))
    return folder


@pytest.mark.parametrize("verb", ["serve", "ui"])
def test_after_it_the_page_shows_the_run_that_has_ended(trained, verb):
    """The port is one of the system's choice, lest somebody's page is in the way; otherwise as written."""
    assert f"horovod-train {verb} runs" in INLINE
    command = ["horovod-train", verb, "runs", "--port", "0"]
    with subprocess.Popen(command, cwd=trained, env=environment(), stdout=subprocess.PIPE, text=True) as page:
        try:
            lines = iter(page.stdout.readline, "")
            found = (re.search(r"(http://\S+/)\?token=(\S+)", line) for line in lines)
            address, token = next(filter(None, found)).groups()
            asked = Request(f"{address}page/jobs", headers={"Authorization": f"Bearer {token}"})  # noqa: S310
            with urlopen(asked, timeout=TIMEOUT_S) as answer:  # noqa: S310
                (job,) = json.load(answer)["jobs"]
        finally:
            page.send_signal(signal.SIGINT)
        assert (job["job"], job["state"], job["step"]) == ("digits", "succeeded", job["num_steps"])
        assert page.wait(TIMEOUT_S) == 0


def test_after_it_a_report_of_the_run_can_be_written(trained):
    (command,) = [command for command in INLINE if command.startswith("horovod-train report")]
    run(command, trained)

    assert "digits" in (trained / "report.html").read_text()


@pytest.mark.parametrize("block", BLOCKS[1:], ids=lambda block: block.strip().splitlines()[0][:50])
def test_a_block_of_commands_runs(folder, block):
    output = run(block, folder)

    accuracies = [float(found) for found in re.findall(r"accuracy ([\d.]+)", output)]
    assert not accuracies or max(accuracies) > 0.9


@pytest.mark.campaign
def test_after_it_tensorboard_shows_curves(folder):
    assert "`tensorboard --logdir runs`" in README
    run('horovod-train run digits --set name=digits-3 --set "metrics.trackers=[{name: tensorboard}]"', folder)
    port = free_port()
    command = ["tensorboard", "--logdir", "runs", "--port", str(port)]
    with subprocess.Popen(command, cwd=folder, env=environment(), stderr=subprocess.DEVNULL) as shown:
        try:
            wait_until(lambda: "eval/accuracy" in tags_at(port), TIMEOUT_S)
        finally:
            shown.terminate()


def tags_at(port: int) -> str:
    """Names of the curves that a TensorBoard shows; empty: it is not up."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/data/plugin/scalars/tags", timeout=10) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


@pytest.mark.parametrize("command", [c for c in INLINE if not is_run_elsewhere(c)])
def test_a_command_in_the_text_runs(folder, command):
    run(command, folder)


def test_the_command_for_several_hosts_can_be_planned(folder):
    (command,) = [command for command in INLINE if "node01" in command]
    output = run(f"{command} --dry-run", folder)

    assert "-np 8 -H node01:4,node02:4" in output
