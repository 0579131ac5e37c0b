"""Trials of a study, their results, and what these show.

trials_of   one job per scaling policy, number of ranks and seed
result_of   result of a trial, from the events of its runs
Study       the file of a study
evidence    evidence that a policy on some number of ranks is worse than the base of a study
"""

from __future__ import annotations

import ast
import fcntl
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from json import dumps
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any

from horovod_train.config.arguments import axes_of, batch_size_of_lr
from horovod_train.config.launch import AUTO
from horovod_train.config.load import changed, read_tree
from horovod_train.config.rules import broken_rules
from horovod_train.config.schema import Job
from horovod_train.config.support import strategy_support
from horovod_train.errors import ConfigError, UserError
from horovod_train.events.file import Record
from horovod_train.events.types import Evaluation, Progress, Resumed, Summary
from horovod_train.horovod.fingerprint import code_digest, task_files
from horovod_train.lr.policy import ArgumentScaling, LearningRatePolicy, policy_of
from horovod_train.registry import LAUNCHERS, SCALINGS, SCRIPT
from horovod_train.system.files import open_regular, write_atomic

NOT_IN_FINGERPRINT = {
    "name", "run_dir", "run_dir_access", "launch", "metrics", "health", "checkpoint", "evaluation", "lr",
    "optimizer",
}  # fmt: skip
"""Sections that are not in the fingerprint of what a study examines, or that a policy changes."""
SIZES = {"seed", "batch_size_per_rank", "accumulation_steps", "global_batch_size", "batch_warmup", "device"}
"""Fields of ``train`` that are not in the fingerprint."""
NOISE_INTERVAL_STEPS = 10
MAX_NAME_CHARS = 40


@dataclass(frozen=True)
class Policy:
    """A scaling policy.

    Attributes:
        name: Name in the table.
        settings: Fields that it sets, by dotted path.
    """

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Trial:
    """One training of a study.

    Attributes:
        policy: Name of the policy.
        num_ranks: Number of ranks that the trial represents.
        seed: Value of ``train.seed``.
        job: The job that is submitted.
        learning_rate: The policy of its learning rate.
    """

    policy: str
    num_ranks: int
    seed: int
    job: Job
    learning_rate: LearningRatePolicy

    @classmethod
    def of(cls, policy: str, num_ranks: int, job: Job) -> Trial:
        """Return the trial of a job, and check its learning rate.

        Raises:
            UserError: The scaling rule does not support this number of ranks.
        """
        num_data_ranks = axes_of(job.strategy, num_ranks).data
        rate = policy_of(job, num_data_ranks)
        rate.check()
        ArgumentScaling.of(job, num_data_ranks).check(job)
        return cls(policy, num_ranks, job.train.seed, job, rate)

    @property
    def name(self) -> str:
        """Name of the trial and of its job."""
        return self.job.name

    @property
    def is_real(self) -> bool:
        """Whether the trial runs on as many ranks as it represents, so that its times are theirs."""
        return self.job.launch.num_ranks == self.num_ranks

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.job.global_batch_size(axes_of(self.job.strategy, self.num_ranks).data)

    @property
    def digest(self) -> str:
        """Digest of everything that determines the weights, and of how they are trained here."""
        return _digest([trial_digest(self), self.job.model_dump(mode="json")])

    @property
    def is_at_reference(self) -> bool:
        """Whether the rule changes nothing, because the global batch is the reference batch."""
        scaled = self.learning_rate.scaled
        factors = (scaled.rate, scaled.warmup, scaled.one_minus_beta, scaled.epsilon)
        return self.global_batch_size == self.job.lr.reference_batch_size and factors == (1.0,) * 4


def policies_of(job: Job, names: Sequence[str]) -> list[Policy]:
    """Return the policies of a study.

    Args:
        job: The job; its own rule is the only policy if there are no names.
        names: Scaling rules, or YAML, TOML or JSON files with fields of the job description.

    Raises:
        UserError: A name is unknown, or given twice.
        ConfigError: A file cannot be read.
    """
    found = []
    for name in names or [job.lr.scaling]:
        if Path(name).suffix in {".yaml", ".yml", ".toml", ".json"}:
            found.append(Policy(Path(name).stem, dict(_leaves(read_tree(Path(name))))))
        elif ":" in name or name in SCALINGS.rows:
            found.append(Policy(name.rpartition(":")[2], {"lr.scaling": name}))
        else:
            raise UserError(
                f"{name!r} is neither a scaling rule nor a file with fields of a job",
                hint=f"rules are {', '.join(sorted(SCALINGS.rows))}",
            )
    taken = [label_of(policy.name) for policy in found]
    if duplicates := sorted({name for name in taken if taken.count(name) > 1}):
        raise UserError(
            f"--policies: {', '.join(duplicates)} is given twice", hint="remove it, or rename a file"
        )
    return found


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield fields by dotted path; a mapping of arguments (``args``, ``schedules``) is one field."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and key not in {"args", "decay_args", "schedules", "batch_warmup"}:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def trials_of(
    job: Job,
    policies: Sequence[Policy],
    ranks: Sequence[int],
    num_seeds: int,
    *,
    folder: Path,
    num_cores: int,
) -> list[Trial]:
    """Return the trials of a study, checked; trials that are equal by construction occur once.

    Args:
        job: The job of the study.
        policies: The scaling policies.
        ranks: Numbers of ranks.
        num_seeds: Number of seeds, beginning with that of the job.
        folder: Folder of the study, which contains the runs of the trials.
        num_cores: CPU cores of this machine, which limit the ranks of a trial that runs on it.

    Raises:
        UserError: A trial is not possible, such as a rule beyond its limits.
    """
    if job.framework == SCRIPT:
        raise UserError("a script sets its own learning rate, so that a study cannot change it")
    found: list[Trial] = []
    for num_ranks in sorted(set(ranks)):
        for policy in policies:
            for seed in range(job.train.seed, job.train.seed + num_seeds):
                trial = _trial(job, policy, num_ranks, seed, folder, num_cores)
                is_known = any(
                    other.is_at_reference and (other.num_ranks, other.seed) == (num_ranks, seed)
                    for other in found
                )
                if not (trial.is_at_reference and set(policy.settings) == {"lr.scaling"} and is_known):
                    found.append(trial)
    return found


def label_of(policy: str) -> str:
    """Return the name of a policy as a part of a job's name.

    >>> label_of("my rule"), label_of("adascale")
    ('my-rule', 'adascale')
    """
    return re.sub(r"[^A-Za-z0-9]+", "-", policy)[:MAX_NAME_CHARS].strip("-") or "policy"


def _trial(job: Job, policy: Policy, num_ranks: int, seed: int, folder: Path, num_cores: int) -> Trial:
    name = f"{label_of(policy.name)}-r{num_ranks}-s{seed}"
    settings: dict[str, Any] = {**policy.settings, "train.seed": seed, "name": name, "run_dir": str(folder)}
    settings |= {"launch.num_ranks": num_ranks, "checkpoint.dir": None, "checkpoint.resume": "auto"}
    trial_job = _changed(job, settings, policy.name)
    num_real = num_ranks if job.launch.hosts else _real_ranks(job, num_ranks, num_cores)
    if num_real < num_ranks:
        batch = trial_job.global_batch_size(axes_of(job.strategy, num_ranks).data)
        sizes = {"train.global_batch_size": batch, "train.accumulation_steps": 1}
        trial_job = _changed(job, settings | sizes | {"launch.num_ranks": num_real}, policy.name)
    return Trial.of(policy.name, num_ranks, _measuring_noise(trial_job))


def _real_ranks(job: Job, num_ranks: int, num_cores: int) -> int:
    """Return the largest divisor of a number of ranks that this machine has cores for.

    Where this machine has fewer cores than a trial has ranks, the trial trains the same global batches with
    fewer ranks and more micro-batches, which gives the same weights (``train.global_batch_size``).

    Strategies whose ranks differ in their samples or weights are not replaced by accumulation.
    """
    is_replaceable = strategy_support(job.strategy.name).is_equal_to_accumulation
    name = job.launch.launcher
    uses_this_machine = name == AUTO or LAUNCHERS.load(name).uses_this_machine
    if not (is_replaceable and uses_this_machine):
        return num_ranks
    return max(divisor for divisor in range(1, min(num_ranks, num_cores) + 1) if num_ranks % divisor == 0)


def _changed(job: Job, settings: Mapping[str, Any], policy: str) -> Job:
    try:
        return changed(job, settings, f"policy {policy}")
    except ConfigError as error:
        problems = "; ".join(f"{each.path} {each.message}" for each in error.problems)
        raise UserError(f"policy {policy} cannot be used with this job: {problems}") from error


def _measuring_noise(job: Job) -> Job:
    """Return a job that measures the gradient noise scale, if the job's strategy supports it."""
    if job.metrics.noise_scale_every_steps is not None or job.framework != "torch":
        return job
    metrics = job.metrics.model_copy(update={"noise_scale_every_steps": NOISE_INTERVAL_STEPS})
    measuring = job.model_copy(update={"metrics": metrics})
    return job if broken_rules(measuring) else measuring


def fingerprint_of(job: Job) -> str:
    """Return a digest of what a job trains: task and its code, data, length and precision.

    Rates and sizes do not belong to it.
    """
    # Without defaults: a later version of this package has further fields.
    tree = job.model_dump(mode="json", exclude=NOT_IN_FINGERPRINT, exclude_defaults=True)
    tree["train"] = {name: value for name, value in tree.get("train", {}).items() if name not in SIZES}
    if files := code_of(job.task):
        tree["code"] = code_digest(files)
    return _digest(tree)


def code_of(task: str) -> list[Path]:
    """Return the source files of a task: the file and those beside it that it imports, or all."""
    place = task.rpartition(":")[0]
    if not place.endswith(".py"):
        return task_files(task)
    modules = {each.stem: each for each in task_files(task) if each.parent == Path(place).parent}
    found, left = [], [Path(place)]
    while left:
        file = left.pop()
        if file not in found:
            found.append(file)
            left += [modules[name] for name in sorted(imported_by(file) & modules.keys())]
    return sorted(found)


def imported_by(file: Path) -> set[str]:
    """Return the top-level names of the modules that a Python file imports; none if it cannot be parsed."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} if node.module else {each.name for each in node.names}
    return {name.partition(".")[0] for name in names}


def policy_digest(job: Job) -> str:
    """Return a digest of a job's policy: optimizer, learning rate and growth of the batch."""
    tree = job.model_dump(mode="json", include={"lr", "optimizer"}, exclude_defaults=True)
    warmup = job.train.batch_warmup
    return _digest([tree, None if warmup is None else warmup.model_dump(mode="json")])


def trial_digest(trial: Trial) -> str:
    """Return a digest of all settings that determine the weights of a trial.

    How many ranks and micro-batches share a global batch does not belong to it, because it depends on the
    cores of the machine.
    """
    job = trial.job
    excluded = NOT_IN_FINGERPRINT - {"lr", "optimizer", "evaluation"}
    tree = job.model_dump(mode="json", exclude=excluded, exclude_defaults=True)
    train = tree.get("train", {})
    shared = {"global_batch_size", "accumulation_steps"}
    tree["train"] = {name: value for name, value in train.items() if name not in shared}
    return _digest([tree, trial.global_batch_size])


def batch_of(job: Job, num_ranks: int) -> int:
    """Return the batch with which the learning rate scales, on a number of ranks."""
    return batch_size_of_lr(job, axes_of(job.strategy, num_ranks).data)


def _digest(tree: object) -> str:
    return sha256(dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


STUDY_FILE = "study.json"
FORMAT_VERSION = 2
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
        error: Reason of a failure; empty: the trial succeeded.
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
    error: str = ""
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


def result_of(trial: Trial, records: Sequence[Record], error: str = "") -> Result:
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
        error=error or ("" if summary else "it has no summary"),
    )
    if summary is None or error:
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
        fingerprint: Digest of what the job trains.
        id: Text that differs between studies in the same folder.
        begun: Time of the start, in UTC.
        results: Results by name of the trial.
        critical: Results of ``--critical-batch``, by branch.
        metric: Name of the compared metric, and min or max; empty: unknown.
    """

    folder: Path
    job: str
    fingerprint: str
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
        if found is None or found.error:
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
            "fingerprint": self.fingerprint,
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
        return Study(
            folder, job.name, fingerprint_of(job), new_id, datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
        )
    if study.fingerprint != fingerprint_of(job):
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
    study = Study(folder, tree["job"], tree["fingerprint"], tree["id"], tree["begun"], results)
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


LEVEL = 0.05
RESOLUTION = 1e-3
"""Smallest standard deviation, relative to the value of the base: evaluations have few samples, too."""
MEDIAN_EFFICIENCY = 2 / math.pi
"""Fraction of the samples whose mean is as exact as the median of all of them."""

Values = Mapping[int, float]
"""Value of a measure by seed; larger is worse."""


@dataclass(frozen=True)
class Evidence:
    """Why a row is worse.

    Attributes:
        seed: Seed that is far worse than those of the base; None: the mean is worse.
        value: Value of that seed, or mean of the row.
        is_loss: Whether the loss is worse, and not the metric.
    """

    seed: int | None
    value: float
    is_loss: bool


def evidence(
    base: Values, rows: Sequence[Values], num_measures: int, *, is_loss: bool
) -> list[Evidence | None]:
    """Return for each row the evidence that it is worse than the base; None: there is none.

    Each row has the same seeds as the base, so that differences are paired. Two things may be wrong with a
    row:

        the mean    of the differences is above 0 (one-sided t-test), or
        one seed    is outside of what the seeds of the base let expect (prediction interval), as if
                    training has diverged. It raises the variance of its own row, and so hides from a
                    test of the mean.

    Both are tested for the metric and for the loss. With ``m`` rows there are ``4 m`` tests, each at the
    level ``LEVEL / 4 m`` (Bonferroni): a study without a difference reports one with a probability of at
    most ``LEVEL``. Few seeds say little about a variance: it is taken to be the median of the rows; for the
    mean, that of the row if it is larger; for one seed, without that of its row.

    Args:
        base: The base; at least two seeds.
        rows: Rows with at least two seeds of the base.
        num_measures: Number of measures of the study.
        is_loss: Whether the measure is the loss.
    """
    level = LEVEL / (2 * num_measures * max(1, len(rows)))
    return [_of_row(base, rows, number, level, is_loss=is_loss) for number in range(len(rows))]


def _of_row(
    base: Values, rows: Sequence[Values], number: int, level: float, *, is_loss: bool
) -> Evidence | None:
    row, center = rows[number], fmean(base.values())
    floor = (RESOLUTION * abs(center)) ** 2
    seed, worst = max(row.items(), key=lambda each: each[1])
    if not math.isfinite(worst):
        return Evidence(seed, worst, is_loss)
    differences = [[each[seed] - base[seed] for seed in each.keys() & base.keys()] for each in rows]
    own, typical = differences[number], _typical(differences)
    deviation = math.sqrt(max(variance(own), typical.variance, floor) / len(own))
    if upper_tail(_ratio(fmean(own), deviation), typical.dof) < level:
        return Evidence(None, fmean(row.values()), is_loss)
    others = _typical([list(each.values()) for each in (base, *rows[:number], *rows[number + 1 :])])
    deviation = math.sqrt(max(others.variance, floor) * (1 + 1 / len(base)))
    if len(row) * upper_tail(_ratio(worst - center, deviation), others.dof) < level:
        return Evidence(seed, worst, is_loss)
    return None


def _ratio(difference: float, deviation: float) -> float:
    """Return Student's t; without any deviation, each difference is certain."""
    return difference / deviation if deviation else math.inf * difference if difference else 0.0


@dataclass(frozen=True)
class _Variance:
    variance: float
    dof: int


def _typical(samples: Sequence[Sequence[float]]) -> _Variance:
    """Return the typical variance of samples with at least two finite values each.

    The median of a chi-squared variable with ``v`` degrees of freedom is about ``v (1 - 2 / 9v)^3`` (Wilson
    and Hilferty, 1931).
    """
    finite = [each for each in samples if all(map(math.isfinite, each))]
    if not finite:
        return _Variance(0.0, 1)
    dof = min(map(len, finite)) - 1
    typical = median(map(variance, finite)) / (1 - 2 / (9 * dof)) ** 3
    return _Variance(typical, max(dof, round(MEDIAN_EFFICIENCY * dof * len(finite))))


def upper_tail(t: float, dof: int) -> float:
    """Return the probability that Student's t is larger (Abramowitz and Stegun, 26.7.3 and 26.7.4).

    >>> round(upper_tail(6.314, 1), 3), round(upper_tail(2.132, 4), 3), round(upper_tail(-1.812, 10), 3)
    (0.05, 0.05, 0.95)
    """
    if t < 0:
        return 1 - upper_tail(-t, dof)
    angle = math.atan(t / math.sqrt(dof))
    parity = dof % 2
    term = math.cos(angle) if parity else 1.0
    total = term if dof > 1 else 0.0
    for number in range(3 if parity else 2, dof - 1, 2):
        term *= (number - 1) / number * math.cos(angle) ** 2
        total += term
    total *= math.sin(angle)
    inside = 2 / math.pi * (angle + total) if parity else total
    return max(0.0, 1 - inside) / 2
