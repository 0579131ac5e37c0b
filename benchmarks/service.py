"""What the server costs: the list of many jobs, and open streams of events.

    list       time of GET /api/v1/jobs for 200 jobs that have ended, median of 20; target 0.3 s
    streams    share of a core that the server uses for 50 open streams of a job that reports twice a
               second, over 20 s; target 0.05

usage: python -m benchmarks.service
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from threading import Thread

import psutil

from benchmarks.run import BIN, PORT
from horovod_train.events.file import EventsFile
from horovod_train.events.types import Progress
from horovod_train.launch.base import Submitted
from horovod_train.launch.jobs import StateFile

NUM_JOBS, NUM_STREAMS, SECONDS = 200, 50, 20.0
TOKEN = "benchmark"  # noqa: S105


def record(folder: Path, number: int) -> Submitted:
    """Write the record and the run folder of a job."""
    job_id = f"job-20261127-{number:06d}-0000"
    log_dir = folder / "runs" / "job" / job_id.removeprefix("job-")
    log_dir.mkdir(parents=True)
    job = Submitted(job_id, "local", "1", log_dir, float(number))
    records = folder / "state" / "horovod_train" / "jobs"
    records.mkdir(parents=True, exist_ok=True)
    fields = {"job_id": job_id, "launcher": "local", "native_id": "1", "log_dir": str(log_dir)}
    (records / f"{job_id}.json").write_text(json.dumps({**fields, "submitted_unix_s": float(number)}))
    return job


def ask(path: str) -> bytes:
    """Return a response of the server."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/api/v1{path}", headers={"Authorization": f"Bearer {TOKEN}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        content: bytes = answer.read()
    return content


def read_stream(job_id: str) -> None:
    """Read a stream of events until it ends."""
    ask(f"/jobs/{job_id}/events")


def progress(step: int) -> Progress:
    """Return the progress of a step."""
    return Progress(
        step=step, num_steps=0, epoch=0, num_epochs=0, loss=1.0, lr=0.1, samples_per_s=1.0, eta_s=None
    )


def measure(folder: Path, server: psutil.Process) -> None:
    """Print a line for each measurement."""
    times_s = []
    for _ in range(20):
        begun_s = time.perf_counter()
        num_jobs = len(json.loads(ask(f"/jobs?limit={NUM_JOBS}"))["jobs"])
        times_s.append(time.perf_counter() - begun_s)
        time.sleep(0.6)  # statuses are at most half a second old
    low_s, high_s = min(times_s), max(times_s)
    print(f"list     {statistics.median(times_s):.3f} s [{low_s:.3f} .. {high_s:.3f}]  {num_jobs} jobs")

    job = record(folder, NUM_JOBS)
    state, events = StateFile(job.log_dir), EventsFile(job.log_dir / "events.jsonl")
    state.write("running")
    streams = [Thread(target=read_stream, args=(job.job_id,), daemon=True) for _ in range(NUM_STREAMS)]
    for each in streams:
        each.start()
    time.sleep(3.0)
    before_s, begun_s = sum(server.cpu_times()[:2]), time.perf_counter()
    step = 0
    while time.perf_counter() - begun_s < SECONDS:
        step += 1
        events.write(progress(step), 0)
        time.sleep(0.5)
    used_s, seconds = sum(server.cpu_times()[:2]) - before_s, time.perf_counter() - begun_s
    state.write("succeeded", 0)
    for each in streams:
        each.join(30)
    events.close()
    print(f"streams  {used_s / seconds:.3f} of a core  {NUM_STREAMS} streams")


def main() -> None:
    """Measure, and print a line for each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        for number in range(NUM_JOBS):
            StateFile(record(folder, number).log_dir).write("succeeded", 0)
        server = subprocess.Popen(
            [str(BIN / "horovod-train"), "serve", "--port", str(PORT)],
            env={**os.environ, "HOROVOD_TRAIN_TOKEN": TOKEN}, cwd=folder, stdout=subprocess.PIPE,
        )  # fmt: skip
        try:
            assert server.stdout is not None
            server.stdout.readline()
            measure(folder, psutil.Process(server.pid))
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()


if __name__ == "__main__":
    main()
