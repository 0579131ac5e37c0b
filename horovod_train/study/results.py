"""Results of trials: what a run's events contain, and the file of a study."""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.events.file import Record
from horovod_train.events.types import Evaluation, Progress, Resumed, Summary
from horovod_train.study.trials import Trial, policy_digest, problem_of, trial_digest
from horovod_train.system.files import open_regular, write_atomic

STUDY_FILE = "study.json"
FORMAT_VERSION = 1
CRITICAL = "critical batch"
"""Policy of trials that measure the critical batch size."""
TUNING = "tuning of the base rate"
"""Policy of trials that search the best base rate."""
MAX_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Result:
    """Result of a trial.

    Attributes:
        trial: Name of the trial.
        policy: Name of its policy.
        num_ranks: Number of ranks that it represents.
        seed: Its seed.
        global_batch_size: Samples per optimizer step.
        base_lr: Base learning rate.
        peak_lr: Peak learning rate.
        policy_digest: Digest of its optimizer and learning rate.
        job_digest: Digest of all settings that determine its weights.
        is_real: Whether its times are those of ``num_ranks`` ranks.
        problem: Reason of a failure; empty: the trial succeeded.
        metrics: Metrics of the last evaluation.
        num_steps: Optimizer steps.
        epochs: Epochs trained.
        seconds: Time of training; None: unknown.
        evaluations: Steps and metrics of each evaluation, in order.
        noise_scale: Last measured gradient noise scale, in samples; None: not measured.
        follows_gain: Whether the rate follows a measured gain, and ``peak_lr`` is its upper limit.
    """

    trial: str
    policy: str
    num_ranks: int
    seed: int
    global_batch_size: int
    base_lr: float
    peak_lr: float
    policy_digest: str
    job_digest: str
    is_real: bool
    problem: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    num_steps: int = 0
    epochs: float = 0.0
    seconds: float | None = None
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    noise_scale: float | None = None
    follows_gain: bool = False

    def best(self, metric: str, mode: str) -> float | None:
        """Return the best value of a metric over all evaluations; None: there is none."""
        values = [
            found[metric] for _, found in self.evaluations if math.isfinite(found.get(metric, math.nan))
        ]
        return (max if mode == "max" else min)(values) if values else None

    def seconds_to(self, metric: str, target: float) -> float | None:
        """Return the time until an evaluation has a value of at most ``target``; None: never, or unknown."""
        steps = (step for step, found in self.evaluations if found.get(metric, math.inf) <= target)
        step = next(steps, None)
        if step is None or self.seconds is None or not self.num_steps:
            return None
        return self.seconds * step / self.num_steps


def result_of(trial: Trial, records: Sequence[Record], problem: str = "") -> Result:
    """Return the result of a trial, given the events of all its runs in order."""
    events = [record.event for record in records]
    summary = next((event for event in reversed(events) if isinstance(event, Summary)), None)
    noise = [
        e.numbers["noise_scale"] for e in events if isinstance(e, Progress) and "noise_scale" in e.numbers
    ]
    evaluations: dict[int, dict[str, float]] = {}
    for event in events:
        if isinstance(event, Evaluation) and event.step is not None:
            evaluations = {s: found for s, found in evaluations.items() if s < event.step}
            evaluations[event.step] = dict(event.metrics)
    found = Result(
        trial=trial.name,
        policy=trial.policy,
        num_ranks=trial.num_ranks,
        seed=trial.seed,
        global_batch_size=trial.global_batch_size,
        base_lr=trial.job.lr.base_lr,
        peak_lr=trial.learning_rate.peak_lr,
        policy_digest=policy_digest(trial.job),
        job_digest=trial_digest(trial),
        is_real=trial.is_real,
        follows_gain=trial.learning_rate.scaled.follows_gain,
        problem=problem or ("" if summary else "it has no summary"),
    )
    if summary is None or problem:
        return found
    return replace(
        found,
        metrics=dict(summary.metrics),
        num_steps=summary.steps,
        epochs=summary.epochs,
        seconds=_seconds(summary, events),
        evaluations=sorted(evaluations.items()),
        noise_scale=noise[-1] if noise else None,
    )


def _seconds(summary: Summary, events: Sequence[object]) -> float | None:
    """Return the time of the whole training, in proportion to the steps of its last start."""
    resumed = [event.step for event in events if isinstance(event, Resumed)]
    trained = summary.steps - (resumed[-1] if resumed else 0)
    return summary.seconds * summary.steps / trained if trained > 0 else None


@dataclass
class Study:
    """Results of a study so far.

    Attributes:
        folder: Folder of the study.
        job: Name of the job.
        problem: Digest of what the job trains.
        id: Text that differs between studies in the same folder.
        begun: Time of the start, in UTC.
        results: Results by name of the trial.
        critical: Results of ``--critical-batch``, by branch.
        metric: Name of the compared metric, and min or max; empty: unknown.
    """

    folder: Path
    job: str
    problem: str
    id: str
    begun: str
    results: dict[str, Result] = field(default_factory=dict)
    critical: list[dict[str, Any]] = field(default_factory=list)
    metric: tuple[str, str] | tuple[()] = ()

    @property
    def trials(self) -> list[Result]:
        """Results of the trials of the table."""
        return [each for each in self.results.values() if each.policy not in {CRITICAL, TUNING}]

    def result_of(self, trial: Trial) -> Result | None:
        """Return the result of a trial; None: it has none, or it failed.

        Raises:
            UserError: The result is that of a job with other settings.
        """
        found = self.results.get(trial.name)
        if found is None or found.problem:
            return None
        if found.job_digest != trial_digest(trial):
            raise UserError(
                f"{self.folder} has a result of {trial.name} that was trained with other settings (batch, "
                "learning rate, optimizer, evaluation, or another field of the job)",
                hint="use --output with another folder, or delete this one",
            )
        return found

    def save(self) -> None:
        """Write the file of the study."""
        tree = {
            "format_version": FORMAT_VERSION,
            "job": self.job,
            "problem": self.problem,
            "id": self.id,
            "begun": self.begun,
            "results": [asdict(result) for result in self.results.values()],
            "critical": self.critical,
            "metric": list(self.metric),
        }
        write_atomic(self.folder / STUDY_FILE, json.dumps(tree, indent=1))


def folder_of(job: Job) -> Path:
    """Return the folder of a job's study: ``study``, next to its runs."""
    return Path(job.run_dir).expanduser().resolve() / job.name / "study"


def open_study(job: Job, folder: Path, new_id: str) -> Study:
    """Return the study in a folder, or a new one.

    Raises:
        UserError: The folder contains a study of another job, or a file that cannot be read.
    """
    study = read_study(folder)
    if study is None:
        return Study(folder, job.name, problem_of(job), new_id, datetime.now(UTC).strftime("%Y-%m-%d %H:%M"))
    if study.problem != problem_of(job):
        raise UserError(
            f"{folder} contains a study of another task, or of other code, data or length of training",
            hint="use --output with another folder, or delete this one",
        )
    return study


def read_study(folder: Path) -> Study | None:
    """Read the study in a folder; None: there is none.

    Raises:
        UserError: The file cannot be read.
    """
    try:
        with open_regular(folder / STUDY_FILE) as file:
            tree = json.loads(file.read(MAX_BYTES))
        return _study_from(tree, folder)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{folder / STUDY_FILE} cannot be read: {error}", hint="delete it to start the study again"
        ) from error


def numbers_of(metrics: dict[str, Any]) -> dict[str, float]:
    """Return metrics as numbers; raise ValueError, TypeError or AttributeError if they are not."""
    return {name: float(value) for name, value in metrics.items()}


def _study_from(tree: dict[str, Any], folder: Path) -> Study:
    """Return the study of a file; raise ValueError, KeyError or TypeError if it is not valid."""
    if tree["format_version"] != FORMAT_VERSION:
        raise ValueError(f"its format version is {tree['format_version']}, and {FORMAT_VERSION} is supported")
    results = {}
    for fields in tree["results"]:
        evaluations = [(int(step), numbers_of(metrics)) for step, metrics in fields["evaluations"]]
        checked = {
            "evaluations": evaluations,
            "metrics": numbers_of(fields["metrics"]),
            "global_batch_size": int(fields["global_batch_size"]),
        }
        results[fields["trial"]] = Result(**{**fields, **checked})
    metric = (str(tree["metric"][0]), str(tree["metric"][1])) if tree["metric"] else ()
    study = Study(folder, tree["job"], tree["problem"], tree["id"], tree["begun"], results)
    study.critical, study.metric = [dict(branch) for branch in tree["critical"]], metric
    return study


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder of a study, and lock it during the block.

    Raises:
        UserError: Another study uses the folder, or it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the folder of the study cannot be created: {error}", hint="use --output with another folder"
        ) from error
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another study is running in {folder}", hint="wait for its end, or use --output"
            ) from None
        yield
