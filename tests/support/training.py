"""A whole run on a world of threads: the real loop and hooks, a model of two numbers, milliseconds."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy_framework import NumpyReplica, Sgd

from horovod_train.checkpoint.manager import CheckpointManager
from horovod_train.collectives.base import Communicator, Mesh, SingleRank
from horovod_train.config.schema import Data, Job
from horovod_train.events.wire import Reporter, parse_line
from horovod_train.frameworks.reader import NumpyReader, load_rng_state, rng_state
from horovod_train.training.hooks.base import Hook
from horovod_train.training.run import Run, StepReport
from horovod_train.worker import make_run

NUM_SAMPLES, NUM_EVAL_SAMPLES = 10, 5


class Line:
    """Pairs (x, 2 x + 1) that know their numbers."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        x = index / self.num_samples
        return index, x, 2 * x + 1


class Task:
    """Least squares on a line.

    Attributes:
        seen: Numbers of the samples of each gradient.
        values: What evaluations say, one after the other; empty: the true loss.
        poison: Steps, counted from 1, whose loss is not a number on this rank.
    """

    def __init__(self, values: Iterable[float] = (), poison: Iterable[int] = ()) -> None:
        self.seen: list[list[int]] = []
        self.values = list(values)
        self.poison = set(poison)
        self.num_evaluations = 0

    def train_data(self) -> Line:
        return Line(NUM_SAMPLES)

    def eval_data(self) -> Line:
        return Line(NUM_EVAL_SAMPLES)

    def model(self) -> Any:
        return {"slope": np.zeros(()), "offset": np.zeros(())}

    def gradient(self, params: Any, batch: Any) -> Any:
        index, x, y = batch
        self.seen.append(index.tolist())
        error = params["slope"] * x + params["offset"] - y
        loss = float((error**2).mean())
        if len(self.seen) in self.poison:
            loss = float("nan")
        return loss, {"slope": (2 * error * x).mean(), "offset": (2 * error).mean()}

    def metrics(self, params: Any, batch: Any) -> Any:
        _, x, y = batch
        if self.values:
            value = self.values[min(self.num_evaluations, len(self.values) - 1)]
            return {"quality": np.full(len(x), value)}
        return {"loss": (params["slope"] * x + params["offset"] - y) ** 2}


@dataclass
class Noted(Hook):
    """A hook that notes what it is told, and in which order."""

    moments: list[Any] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)

    def on_start(self, run: Run) -> None:
        self.moments.append("start")

    def on_result(self, run: Run, report: StepReport) -> None:
        self.reports.append(report)

    def on_step(self, run: Run) -> None:
        self.moments.append(run.progress.step)

    def on_epoch(self, run: Run, *, evaluated: bool) -> None:
        self.moments.append(f"epoch {run.progress.epoch}{' evaluated' if evaluated else ''}")
        task = run.replica.task  # type: ignore[attr-defined]
        task.num_evaluations += evaluated

    def on_end(self, run: Run) -> None:
        self.moments.append("end")


def made(
    world: Communicator | None = None,
    task: Task | None = None,
    *,
    data_ranks: Communicator | None = None,
    has_eval: bool = True,
    **job: Any,
) -> Run:
    """A run that is ready to begin, with a hook that notes."""
    fields = {
        "name": "line",
        "framework": "numpy",
        "task": "own:Task",
        "lr": {"base_lr": 0.1, "scaling": "none"},
        "data": {"shuffle": False},
        **job,
        "train": {"epochs": 2, "batch_size_per_rank": 2, **job.get("train", {})},
    }
    resolved = Job.model_validate(fields)
    task = task or Task()
    world = world or SingleRank()
    mesh = Mesh(world, data_ranks or world)
    replica = NumpyReplica(task, Sgd(0.5), mesh.data)

    def reader(num_samples: int) -> NumpyReader:
        return NumpyReader(Line(num_samples), Data(), 0)

    run = make_run(
        resolved, mesh, replica, reader(NUM_SAMPLES), reader(NUM_EVAL_SAMPLES) if has_eval else None
    )
    run.hooks = [Noted()]
    return run


class Framework:
    """What hooks need of a framework: its random generators."""

    def rng_state(self) -> Any:
        return rng_state({})

    def load_rng_state(self, tree: Any, arrays: Any) -> None:
        load_rng_state(tree, arrays)


class Told:
    """A reporter, and what it was given."""

    def __init__(self, rank: int = 0) -> None:
        self._stream = io.StringIO()
        self.reporter = Reporter(rank, as_json=True, stream=self._stream)

    @property
    def text(self) -> str:
        """All that it wrote."""
        return self._stream.getvalue()

    def events(self, kind: str | None = None) -> list[Any]:
        found = [parse_line(line).event for line in self._stream.getvalue().splitlines()]
        assert None not in found
        return [event.model_dump() for event in found if event is not None and kind in (None, event.kind)]


def manager_of(folder: Path, run: Run, **section: Any) -> CheckpointManager:
    job = run.job.model_dump(mode="json")
    checkpoint = run.job.checkpoint.model_copy(update=section)
    return CheckpointManager(folder, checkpoint, run.world, json.loads(json.dumps(job)))


def least_squares(num_steps: int, batch: Callable[[int], list[int]], lr: Callable[[int], float]) -> Any:
    """The same training, written down once more: one process, the joint batch. Returns slope, offset."""
    weights, velocity = np.zeros(2), np.zeros(2)
    for step in range(num_steps):
        x = np.array(batch(step)) / NUM_SAMPLES
        error = weights[0] * x + weights[1] - (2 * x + 1)
        gradient = np.array([(2 * error * x).mean(), (2 * error).mean()])
        velocity = 0.5 * velocity + gradient
        weights = weights - lr(step) * velocity
    return weights
