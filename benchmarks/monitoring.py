"""What it costs to be watched, and how quickly a thousand ranks are seen.

    scrape     a scrape of a rank against one of a bare prometheus_client with as many series, in the same
               process beside the same training, in turns; target 1.5
    memory     how much a rank grows between two steps, with a constant number of series; target 2 MiB
               from step 10,000 to 100,000
    page       from navigation to the first heat map of a thousand ranks, played by one server, under a
               Prometheus that scrapes them as well; median of five; target 2 s
    script     a script's steps watched against not watched, in turns inside one process; target 1.01
    trackers   steps with a tracker against steps without, in turns inside one process; target 1.005

usage: python -m benchmarks.monitoring [--only NAME] [--steps N] [--ranks N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.run import BIN, HERE, PORT, Comparison, both_in, compare, interval_of_median, ours
from benchmarks.with_tracker import BLOCK_STEPS, is_tracked

PAIRS = 40
TOKEN = "benchmark"  # noqa: S105


def ask(address: str, path: str = "/metrics") -> str:
    """Return an answer of a rank."""
    with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def value(text: str, name: str) -> float:
    """Return one metric of an answer."""
    return next(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"horovod_train_{name}"
    )


@contextmanager
def training(program: str, task: str, folder: Path, steps: int = 10**9) -> Iterator[subprocess.Popen[bytes]]:
    """Train in a process of its own while the block runs."""
    job = {
        "name": "watched",
        "task": task,
        "run_dir": str(folder),
        "train": {"epochs": 10**6, "max_steps": steps, "batch_size_per_rank": 1},
        "metrics": {"port": PORT},
        "checkpoint": {"every": None},
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "BENCH_STARTS": os.devnull}
    command = [
        str(BIN / "python"),
        "-m",
        program,
        *(["worker"] if program == "horovod_train" else []),
        str(path),
    ]
    process = subprocess.Popen(command, cwd=HERE.parent, env=env, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: value(ask(f"127.0.0.1:{PORT}"), "steps_total") > 20)
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(is_so: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if is_so():
                return
        except (OSError, StopIteration):
            pass
        if time.monotonic() > deadline:
            raise TimeoutError("it was never so")
        time.sleep(0.2)


def scrape(_: argparse.Namespace) -> None:
    """Print the ratio of a scrape of ours to one of a bare prometheus_client."""
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        task = f"{HERE / 'host_time.py'}:OneParameter"
        with training("benchmarks.beside_bare", task, Path(folder)):
            ours, bare = f"127.0.0.1:{PORT}", f"127.0.0.1:{PORT + 50}"
            wait_for(lambda: bool(ask(bare)))
            series = [ask(address).count("\n") for address in (ours, bare)]
            for pair in range(PAIRS):
                times = {}
                for address in (ours, bare) if pair % 2 else (bare, ours):
                    begun_s = time.perf_counter()
                    ask(address, f"/metrics?again={pair}")  # else the answer of the last second would do
                    times[address] = time.perf_counter() - begun_s
                ratios.append(times[ours] / times[bare])
    low, high = interval_of_median(ratios)
    print(
        f"scrape  {statistics.median(ratios):.2f} [{low:.2f} .. {high:.2f}]  lines {series[0]} / {series[1]}"
    )


def memory(args: argparse.Namespace) -> None:
    """Print how much a rank grows while it makes steps."""
    first, last = args.steps // 10, args.steps
    task = f"{HERE / 'host_time.py'}:NothingNoted"
    with tempfile.TemporaryDirectory() as folder, training("horovod_train", task, Path(folder)):
        address, sizes, counts = f"127.0.0.1:{PORT}", [], []
        for step in (first, last):
            wait_for(lambda step=step: value(ask(address), "steps_total") >= step, 1200)  # type: ignore[misc]
            text = ask(address, f"/metrics?at={step}")
            sizes.append(value(text, "resident_memory_bytes"))
            counts.append(text.count("\n"))
    grown = (sizes[1] - sizes[0]) / 2**20
    print(f"memory  {grown:+.2f} MiB from step {first} to {last}, lines {counts[0]} / {counts[1]}")


def page(args: argparse.Namespace) -> None:
    """Print the time from navigation to the first heat map of many ranks."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.many_ranks", str(args.ranks), str(folder / "targets.json")],
            cwd=HERE.parent,
        )
        config = {
            "global": {"scrape_interval": "15s"},
            "scrape_configs": [
                {"job_name": "ranks", "file_sd_configs": [{"files": [f"{folder}/targets.json"]}]}
            ],
        }
        (folder / "prometheus.json").write_text(json.dumps(config))
        prometheus = subprocess.Popen(
            ["prometheus", f"--config.file={folder}/prometheus.json", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address=127.0.0.1:{PORT + 60}", "--log.level=error"],
        )  # fmt: skip
        wait_for((folder / "targets.json").exists)
        ui = subprocess.Popen(
            [str(BIN / "horovod-train"), "ui", str(folder / "targets.json"), "--port", str(PORT + 61)],
            env={**os.environ, "HOROVOD_TRAIN_TOKEN": TOKEN}, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            time.sleep(45)  # each of the two has asked all ranks more than once
            times = []
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path="/usr/bin/chromium", args=["--no-sandbox"]
                )
                for _ in range(5):
                    context = browser.new_context()
                    tab = context.new_page()
                    begun_s = time.perf_counter()
                    tab.goto(f"http://127.0.0.1:{PORT + 61}/?token={TOKEN}", wait_until="commit")
                    tab.wait_for_selector(f"#chart-heat[data-drawn='{args.ranks}']", timeout=60_000)
                    times.append(time.perf_counter() - begun_s)
                    context.close()
                browser.close()
        finally:
            for process in (ui, prometheus, ranks):
                process.kill()
                process.wait()
    print(
        f"page    {statistics.median(times):.2f} s [{min(times):.2f} .. {max(times):.2f}]  {args.ranks} ranks"
    )


def script(args: argparse.Namespace) -> None:
    """Print the ratio of a script's steps that are watched to those that are not."""
    command = [sys.executable, "-m", "benchmarks.script_in_turns", str(min(args.steps, 4000))]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=True)
    print(done.stdout.strip().splitlines()[-1])


def trackers(args: argparse.Namespace) -> None:
    """Print the ratio of steps whose values are tracked to those whose are not."""
    for name in ("jsonl", "tensorboard", "mlflow", "wandb"):
        job = ours(name, metrics={"trackers": [{"name": name}]})
        comparison = Comparison(
            f"trackers: {name} on / off, in turns",
            both_in("with_tracker.py", of=job),
            None,
            1.005,
            is_first=is_tracked,
            steps=max(4 * BLOCK_STEPS, args.steps // 100),
            use_mean=True,
        )
        compare(comparison, "normalized", args.pairs, 0)


MEASURES = {"scrape": scrape, "memory": memory, "page": page, "script": script, "trackers": trackers}


def main() -> None:
    """Measure, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=MEASURES)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    for name, measure in MEASURES.items():
        if args.only in (None, name):
            measure(args)


if __name__ == "__main__":
    main()
