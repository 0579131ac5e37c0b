"""Time to the same loss on two hosts behind slow links: another strategy, and ``allreduce``.

The hosts are network namespaces with an sshd each, as the tests make them; their links are held to a rate by
the kernel's token bucket filter (``tbf``). The model has 2.4 million parameters and learns scikit-learn's
digits with SGD; both ways have the same batch, learning rate and samples. Needs root, iproute2 and sshd
(``make servers``).

usage: python -m benchmarks.slow_links [--rate 100mbit] [--strategy local_sgd] [--repeats 3] [--epochs 4]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

ROOT = Path(__file__).parents[1]
WIDTH = 1500
ROUNDING = 1e-5


class WideDigits:
    """A wide network for small images of digits."""

    def model(self) -> nn.Module:
        """Map [batch, 64] to [batch, 10]."""
        return nn.Sequential(
            nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
        )

    def train_data(self) -> Dataset[Any]:
        """Return images and labels."""
        return _digits().train_data()

    def eval_data(self) -> Dataset[Any]:
        """Return other images and labels."""
        return _digits().eval_data()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the mean loss."""
        images, labels = batch
        return functional.cross_entropy(model(images.flatten(1)), labels)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Return each sample's loss."""
        images, labels = batch
        return {"loss": functional.cross_entropy(model(images.flatten(1)), labels, reduction="none")}


def _digits() -> Any:
    from horovod_train.tasks.digits import Digits

    return Digits()


def losses_over_time(folder: Path, strategy: Any, hosts: Any, epochs: int) -> list[tuple[float, float]]:
    """Train; return (seconds since the first step, loss of the evaluation) after each epoch."""
    job = {
        "name": "slow",
        "task": f"{__file__}:WideDigits",
        "run_dir": str(folder),
        "train": {"epochs": epochs, "batch_size_per_rank": 32},
        "optimizer": {"name": "sgd"},
        "lr": {"base_lr": 0.1, "scaling": "none"},
        "strategy": strategy,
        "checkpoint": {"every": None},
        "launch": {"hosts": ["node1:1", "node2:1"], "ssh": hosts.ssh, "controller": "gloo"},
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    command = hosts.command(str(Path(sys.executable).with_name("horovod-train")), "run", str(path))
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    (file,) = folder.glob("slow/*/events.jsonl")
    events = [json.loads(line) for line in file.read_text().splitlines()]
    begun_s = next(event["time_unix_s"] for event in events if event["kind"] == "started")
    return [
        (event["time_unix_s"] - begun_s, event["metrics"]["loss"])
        for event in events
        if event["kind"] == "evaluation"
    ]


def seconds_to(loss: float, found: Sequence[tuple[float, float]]) -> float | None:
    """Return when a loss was reached, on the line between two evaluations; None: it was not."""
    if found[0][1] <= loss:
        return found[0][0]
    for (before_s, before), (after_s, after) in pairwise(found):
        if after <= loss < before:
            return before_s + (after_s - before_s) * (before - loss) / (before - after)
    return None


def main() -> None:
    """Measure in turns, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--strategy", default="local_sgd")
    parser.add_argument("--every-steps", type=int, default=8, help="of local_sgd")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    from support.cluster import cluster

    other: Any = {"name": options.strategy}
    if options.strategy == "local_sgd":
        other["args"] = {"every_steps": options.every_steps}
    ratios = []
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary, "hosts", "cluster")  # the folder above both is what hosts share
        place.mkdir(parents=True)
        with cluster(place, ("node1", "node2")) as hosts:
            for node in ("node1", "node2"):
                limit = ("tbf", "rate", options.rate, "burst", "256kb", "latency", "50ms")
                inside = ("ip", "netns", "exec", hosts.nodes[node].namespace)
                subprocess.run([*inside, "tc", "qdisc", "replace", "dev", "eth0", "root", *limit], check=True)
            for number in range(options.repeats):
                found = {}
                for name, strategy in {"allreduce": {"name": "allreduce"}, "other": other}.items():
                    folder = Path(temporary, f"{name}-{number}")
                    folder.mkdir()
                    # Local steps may take a few more to the same loss.
                    epochs = options.epochs + (
                        2 if options.strategy == "local_sgd" and name == "other" else 0
                    )
                    found[name] = losses_over_time(folder, strategy, hosts, epochs)
                goal_s, goal = found["allreduce"][-1]
                reached_s = seconds_to(goal * (1 + ROUNDING), found["other"])
                if reached_s is None:
                    raise SystemExit(f"{options.strategy} has not reached {goal}: {found['other']}")
                line = f"loss {goal:.4f}: allreduce {goal_s:.1f} s, {options.strategy} {reached_s:.1f} s"
                print(line, flush=True)
                ratios.append(goal_s / reached_s)
    print(f"allreduce / {options.strategy}: median {statistics.median(ratios):.2f} of {sorted(ratios)}")


if __name__ == "__main__":
    main()
