"""Take the pictures of the page in the README: a real run on four ranks, one of them slow at reading data.

usage: python docs/screenshots.py     needs Chromium (`make servers`)
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
TOKEN = "screenshots"  # noqa: S105
JOB = {
    "name": "demo",
    "task": f"{ROOT / 'tests' / 'programs' / 'slow_tasks.py'}:Slowed",
    "task_args": {"data_s": {"2": 0.03}, "pause_s": 0.06},
    "train": {"epochs": 100, "max_steps": 800, "batch_size_per_rank": 16},
    "checkpoint": {"every": [1, "100 steps"]},
    "launch": {"num_ranks": 4, "threads_per_rank": 1},
}
VIEWS = {"page-light.png": ("light", 1280, 900), "page-dark.png": ("dark", 1280, 900)}


def main() -> None:
    """Train, look, and take pictures while it trains."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.yaml"
        job.write_text(yaml.safe_dump({**JOB, "run_dir": f"{folder}/runs"}))
        program = [sys.executable, "-m", "horovod_train"]
        env = {**os.environ, "HOROVOD_TRAIN_TOKEN": TOKEN}
        with (
            subprocess.Popen([*program, "run", str(job)], stdout=subprocess.DEVNULL, env=env) as run,
            subprocess.Popen(
                [*program, "ui", f"{folder}/runs", "--port", "9388"], stdout=subprocess.PIPE, env=env
            ) as page,
        ):
            try:
                take_pictures()
            finally:
                page.terminate()
                run.terminate()
                run.wait()


def take_pictures() -> None:
    """Open the page in each of the ways, when the slow rank is known."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for name, (scheme, width, height) in VIEWS.items():
            context = browser.new_context(
                viewport={"width": width, "height": height}, color_scheme=scheme, device_scale_factor=1
            )
            page = context.new_page()
            page.goto(f"http://127.0.0.1:9388/?token={TOKEN}")
            page.get_by_text("Rank 2: own time").wait_for(timeout=180_000)
            page.wait_for_timeout(3000)
            clip = {"x": 0, "y": 0, "width": width, "height": 1330}
            page.screenshot(path=IMAGES / name, clip=clip, full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
