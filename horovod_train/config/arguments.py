"""Fields of a job that contain the arguments of a row of a registry, and values that follow from a job.

    ArgumentField, job_schema             these fields, and the models of the arguments
    axes_of, has_axes                     what a strategy declares about a job
    for_ranks, batch_size_at, samples_of_growth
                                          the global batch of a step, and the micro-batches of a rank, as
                                          arithmetic

``job_schema`` includes the rows of other packages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from pydantic import BaseModel, ValidationError
from pydantic.json_schema import JsonSchemaValue

from horovod_train.config.fields import Section
from horovod_train.config.problems import UNKNOWN_FIELD, explain
from horovod_train.config.schema import Job, Strategy, Train
from horovod_train.config.support import Axes, WithArguments, strategy_support
from horovod_train.errors import HorovodTrainError, Problem
from horovod_train.registry import CODECS, SCHEDULES, SOURCES, STRATEGIES, TRACKERS, Registry


@dataclass(frozen=True)
class ArgumentField:
    """A field with arguments.

    Attributes:
        table: Registry of the rows.
        section: Dotted path of the section.
        name: Field of the section that names the row.
        args: Field of the section with the arguments.
    """

    table: Registry
    section: str
    name: str = "name"
    args: str = "args"

    @property
    def path(self) -> str:
        """Dotted path of the field with the arguments."""
        return f"{self.section}.{self.args}"

    def model(self, name: str) -> type[Section] | None:
        """Return the model of a row's arguments; None: it declares none, or its file would have to run.

        Raises:
            UnknownNameError: The table has no such row.
            UserError: The row cannot be imported.
        """
        support = self.table.support(name)
        if isinstance(support, WithArguments):
            return support.arguments
        found = self.table.load(name) if self.table.is_light and ":" not in name else None
        return found if isinstance(found, type) and issubclass(found, Section) else None

    def models(self) -> Iterator[tuple[str, type[Section]]]:
        """Yield the rows whose arguments are declared, and their models."""
        for name in self.table.rows:
            try:
                model = self.model(name)
            except HorovodTrainError:  # of another package: it affects only jobs that use it
                continue
            if model is not None and model.model_fields:
                yield name, model

    def problems(self, name: str, args: Mapping[str, object], path: str = "") -> Iterator[Problem]:
        """Yield the problems of a row's arguments, which are at ``path``; empty: that of this field."""
        try:
            model = self.model(name)
        except HorovodTrainError:
            return  # rules.names_are_known reports it
        if model is None:
            return
        try:
            model.model_validate(args)
        except ValidationError as error:
            for problem in explain(error, model):
                yield self._with_owners(problem, path or self.path)

    def _owners(self, argument: str) -> list[str]:
        return [name for name, model in self.models() if argument in model.model_fields]

    def with_hint(self, problem: Problem) -> Problem:
        """Return the problem; for a field of the section that is an argument of a row, the hint says so."""
        section, _, name = problem.path.rpartition(".")
        if problem.message != UNKNOWN_FIELD or section != self.section or not self._owners(name):
            return problem
        return replace(problem, hint=f"did you mean {self.path}.{name}?")

    def _with_owners(self, problem: Problem, field: str) -> Problem:
        """Return the problem with its whole path and, for an argument of other rows, with their names."""
        path, hint = f"{field}.{problem.path}", problem.hint
        if problem.message == UNKNOWN_FIELD:
            owners = self._owners(problem.path)
            hint = f"it belongs to {self.name}: {' or '.join(owners)}" if owners else hint
        return replace(problem, path=path, hint=hint)


DECAY_ARGS = ArgumentField(SCHEDULES, "lr", "decay", "decay_args")
STRATEGY_ARGS = ArgumentField(STRATEGIES, "strategy")
CODEC_ARGS = ArgumentField(CODECS, "allreduce.codec")
TRACKER_ARGS = ArgumentField(TRACKERS, "metrics.trackers")
SOURCE_ARGS = ArgumentField(SOURCES, "data", "source", "source_args")
ARGUMENT_FIELDS = (STRATEGY_ARGS, CODEC_ARGS, DECAY_ARGS, TRACKER_ARGS, SOURCE_ARGS)


def with_argument_hint(problem: Problem) -> Problem:
    """Return a problem; if it is an unknown field of a section that is an argument, the hint says so."""
    for field in ARGUMENT_FIELDS:
        problem = field.with_hint(problem)
    return problem


def job_schema() -> JsonSchemaValue:
    """Return the JSON schema of a job, with the arguments of all rows, also those of other packages."""
    schema = Job.model_json_schema()
    for field in ARGUMENT_FIELDS:
        section: type[BaseModel] = Job
        for part in field.section.split("."):
            section = _section(section, part)
        choices = schema["$defs"][section.__name__].setdefault("allOf", [])
        for name, model in field.models():
            choices.append(
                {
                    "if": {"properties": {field.name: {"const": name}}, "required": [field.name]},
                    "then": {"properties": {field.args: arguments_schema(model, schema["$defs"])}},
                }
            )
    return schema


def arguments_schema(model: type[Section], definitions: JsonSchemaValue) -> JsonSchemaValue:
    """Return the JSON schema of a model; its sections are added to ``definitions``, under unique names."""
    schema = model.model_json_schema()
    prefix = f"{model.__module__}.{model.__name__}."
    text = json.dumps(schema).replace('"#/$defs/', f'"#/$defs/{prefix}')
    schema = json.loads(text)
    definitions.update({f"{prefix}{name}": found for name, found in schema.pop("$defs", {}).items()})
    return dict(schema)


def _section(model: type[BaseModel], field: str) -> type[BaseModel]:
    annotation = model.model_fields[field].annotation
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return next(each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel))


def batch_size_of_lr(job: Job, num_data_ranks: int) -> int:
    """Return the batch size with which the learning rate scales: that of all ranks, or of one rank."""
    if not strategy_support(job.strategy.name).lr_follows_rank:
        return job.global_batch_size(num_data_ranks)
    return -(-job.global_batch_size(num_data_ranks) // num_data_ranks)


def axes_of(strategy: Strategy, world_size: int) -> Axes:
    """Return the axes of the ranks of a job.

    Raises:
        UserError: The strategy does not support this number of ranks.
    """
    support = strategy_support(strategy.name)
    if support.axes is None:
        return Axes(world_size)
    return support.axes(world_size, support.arguments_of(strategy.args))


def has_axes(strategy: Strategy) -> bool:
    """Return whether the strategy arranges ranks along axes; some of them may read the same samples."""
    return strategy_support(strategy.name).axes is not None


def for_ranks(job: Job, num_ranks: int) -> Job:
    """Return a job with the accumulation steps that ``train.global_batch_size`` needs on a number of ranks.

    Args:
        job: The job.
        num_ranks: Number of data-parallel ranks.
    """
    if job.train.global_batch_size is None:
        return job
    per_rank = -(-job.train.global_batch_size // num_ranks)
    accumulation_steps = -(-per_rank // job.train.batch_size_per_rank)
    train = job.train.model_copy(update={"accumulation_steps": accumulation_steps})
    return job.model_copy(update={"train": train})


def batch_size_at(train: Train, full_size: int, epochs: float) -> int:
    """Return the samples of the step that begins after a number of epochs.

    Args:
        train: The job's ``train`` section.
        full_size: Global batch after the batch warm-up.
        epochs: Epochs passed, including the fraction of the current epoch.

    >>> train = Train(batch_warmup={"start": 32, "length": 4})
    >>> [batch_size_at(train, 128, epochs) for epochs in (0, 1, 2.5, 4, 9)]
    [32, 56, 92, 128, 128]
    """
    warmup = train.batch_warmup
    if warmup is None or epochs >= warmup.length.epochs:
        return full_size
    return min(full_size, int(warmup.start + (full_size - warmup.start) * epochs / warmup.length.epochs))


def samples_of_growth(start: int, full_size: int, num_steps: float) -> float:
    """Return the samples in which a batch grows, linearly in the samples, if it is to take a number of steps.

    With W samples, a step after x samples advances x by s + (B - s) x / W; the integral of its inverse from 0
    to W is the number of steps: n = W ln(B / s) / (B - s). Batches are whole, so that n is approximate.

    >>> round(samples_of_growth(32, 128, 100)), samples_of_growth(64, 64, 100)
    (6925, 6400)
    """
    if full_size <= start:
        return start * num_steps
    return num_steps * (full_size - start) / math.log(full_size / start)
