"""Trials of a study: one job per scaling policy, number of ranks and seed.

Where this machine has fewer cores than a trial has ranks, the trial trains the same global batches with fewer
ranks and more micro-batches, which gives the same weights (``train.global_batch_size``).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from json import dumps
from pathlib import Path
from typing import Any

from horovod_train.config.launch import AUTO
from horovod_train.config.load import changed, read_tree
from horovod_train.config.rules import broken_rules
from horovod_train.config.schema import Job
from horovod_train.config.strategies import axes_of, batch_size_of_lr
from horovod_train.config.support import strategy_support
from horovod_train.errors import ConfigError, UserError
from horovod_train.horovod.fingerprint import code_digest, task_files
from horovod_train.lr.optimizer_arguments import ArgumentScaling
from horovod_train.lr.policy import LearningRatePolicy, policy_of
from horovod_train.registry import LAUNCHERS, SCALINGS, SCRIPT

NOT_PART_OF_THE_PROBLEM = {
    "name", "run_dir", "run_dir_access", "launch", "metrics", "health", "checkpoint", "evaluation", "lr",
    "optimizer",
}  # fmt: skip
"""Sections that do not belong to the problem that a study examines, or that a policy changes."""
SIZES = {"seed", "batch_size_per_rank", "accumulation_steps", "global_batch_size", "batch_warmup", "device"}
"""Fields of ``train`` that do not belong to the problem."""
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


def problem_of(job: Job) -> str:
    """Return a digest of what a job trains: task and its code, data, length and precision.

    Rates and sizes do not belong to it.
    """
    # Without defaults: a later version of this package has further fields.
    tree = job.model_dump(mode="json", exclude=NOT_PART_OF_THE_PROBLEM, exclude_defaults=True)
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
    excluded = NOT_PART_OF_THE_PROBLEM - {"lr", "optimizer", "evaluation"}
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
