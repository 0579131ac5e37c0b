"""Train the tasks of the README for a few steps under each strategy; print the exit codes as JSON.

usage: shipped.py FOLDER      FOLDER has spiral.py and spiral.yaml, as the README prints them
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent)]

import yaml  # noqa: E402

from corpus.run import STRATEGIES, import_what_ranks_need  # noqa: E402
from corpus.worlds import run_world  # noqa: E402

NUM_STEPS = 4
WITH_A_PLAN = {"gpt"}
"""Tasks that say which layers ``tensor_parallel`` splits."""
VARIANTS = {"zero1", "deepspeed2"}
"""Stages that the corpus tries."""
SMALL: dict[str, dict[str, Any]] = {"gpt": {"num_samples": 128, "width": 64, "layers": 2}}


def jobs(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the descriptions of the jobs by name."""
    import horovod_train.tasks

    shipped = Path(horovod_train.tasks.__file__).parent
    files = [folder / "spiral.yaml", shipped / "digits.yaml", shipped / "gpt.yaml"]
    found = {file.stem: yaml.safe_load(file.read_text()) for file in files}
    for name, job in found.items():
        job.pop("launch", None)
        job["task_args"] = {**job.get("task_args", {}), **SMALL.get(name, {})}
        job["train"] = {**job["train"], "max_steps": NUM_STEPS}
        job["metrics"] = {"enabled": False}
        job["health"] = {"stall_warning_s": 20.0, "stall_shutdown_s": 40.0}
    found["spiral"]["task"] = f"{folder}/spiral.py:Spiral"
    return found


def main() -> None:
    from horovod_train.worker import WorkerOptions
    from horovod_train.worker import main as run_rank

    import_what_ranks_need(STRATEGIES)
    codes = {}
    for name, job in jobs(Path(sys.argv[1])).items():
        for strategy, section in STRATEGIES.items():
            if strategy in VARIANTS or (strategy == "tensor_parallel" and name not in WITH_A_PLAN):
                continue
            with tempfile.TemporaryDirectory(prefix="shipped-") as scratch:
                file = Path(scratch) / "job.json"
                file.write_text(json.dumps({**job, "strategy": section, "run_dir": scratch}))

                def act(_: int, file: Path = file) -> int:
                    return run_rank(WorkerOptions(file, run_id="run"))

                ended = run_world(2, act, Path(scratch), timeout_s=120.0)
                codes[f"{name} {strategy}"] = ended.code
                if ended.code != 0:
                    print(ended.output, file=sys.stderr)
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
