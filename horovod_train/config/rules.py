"""Rules between fields of a job, which refuse unsupported combinations before anything starts.

A rule checks a whole job and yields problems. To add a rule, write a function, and add it to ``RULES``.
Rules for the sections ``lr`` and ``optimizer`` and for the global batch are first, then those for paths of
a job, then all others.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from horovod_train.config.arguments import CODEC_ARGS, DECAY_ARGS, SOURCE_ARGS, STRATEGY_ARGS, TRACKER_ARGS
from horovod_train.config.data import Data, Files
from horovod_train.config.fields import Duration, increasing, is_command, name_of, slots_of
from horovod_train.config.optimization import AUTO
from horovod_train.config.problems import PATHS, code_fields, shorten
from horovod_train.config.schema import Codec, Job, Strategy
from horovod_train.config.support import (
    Refused,
    codec_support,
    factors_of_rule,
    follows_gain,
    framework_support,
    launcher_support,
    launchers_with_support,
    strategy_support,
)
from horovod_train.errors import Problem, UnknownNameError, UserError, did_you_mean
from horovod_train.registry import (
    CODECS,
    FRAMEWORKS,
    LAUNCHERS,
    SCALINGS,
    SCHEDULES,
    SCRIPT,
    SOURCES,
    STRATEGIES,
    TASKS,
    TRACKERS,
    Registry,
    optimizers_of,
)


def learning_rate_is_set_once(job: Job) -> Iterator[Problem]:
    """Refuse a learning rate in the optimizer's arguments, because ``lr`` sets it in each step."""
    if "lr" in job.optimizer.args:
        yield Problem(
            "optimizer.args.lr",
            repr(job.optimizer.args["lr"]),
            "the learning rate is set in each step and would overwrite this",
            "move it to lr.base_lr",
        )


def decay_has_its_arguments(job: Job) -> Iterator[Problem]:
    """Check the arguments of the schedule, and whether it fits the warm-up.

    Those of a function or class of a file are checked when it is called, because that runs the file.
    """
    problems = list(DECAY_ARGS.problems(job.lr.decay, job.lr.decay_args))
    yield from problems
    if not problems and job.lr.decay in SCHEDULES.rows:
        try:
            model: Any = DECAY_ARGS.model(job.lr.decay)
        except UserError as error:
            yield Problem("lr.decay", repr(job.lr.decay), error.message, error.hint)
            return
        if model is not None:
            yield from model.model_validate(job.lr.decay_args).problems(job.lr.warmup)


def positions_increase(job: Job) -> Iterator[Problem]:
    """Require increasing positions in one unit in schedules of arguments."""
    for name, points in job.optimizer.schedules.items():
        path = f"optimizer.schedules.{name}"
        if not points:
            yield Problem(path, "[]", "must be a list of [position, value]")
        if isinstance(points, str):
            continue
        positions = [position for position, _ in points]
        try:
            increasing(positions)
        except ValueError as error:
            yield Problem(path, ", ".join(map(str, positions)), str(error))


def _sets_arguments(job: Job) -> bool:
    """Return whether the scaling rule changes arguments of the optimizer besides the rate."""
    scaled = factors_of_rule(job.lr.scaling)
    return scaled.one_minus_beta != 1 or scaled.epsilon != 1


def exceeded(duration: Duration, job: Job) -> str:
    """Return the field that ends a job before a duration, with its value; empty: none, or not known."""
    train = job.train
    if duration.unit == "epochs" and duration.amount > train.most_epochs:
        return f"train.epochs = {train.most_epochs}"
    limit = train.limit
    if duration.unit == "steps" and follows_gain(job.lr.scaling):
        return ""  # those of the reference batch
    if limit is not None and duration.unit == limit.unit and duration.amount > limit.amount:
        return f"train.max_{limit.unit} = {limit.amount}"
    return ""


def warmup_fits(job: Job) -> Iterator[Problem]:
    """Require that warm-up ends before training, and refuse what has no effect without warm-up."""
    lr = job.lr
    if limit := exceeded(lr.warmup, job):
        yield Problem("lr.warmup", str(lr.warmup), f"must be at most {limit}")
    if lr.warmup.amount == 0 and factors_of_rule(lr.scaling).warmup != 1:
        yield Problem(
            "lr.warmup",
            "0",
            f"lr.scaling: {lr.scaling} lengthens the warm-up with the global batch, and there is none",
            "set the warm-up of the reference batch, or use lr.scaling: sqrt",
        )
    if lr.warmup_start_lr is not None and lr.warmup.amount == 0:
        yield Problem(
            "lr.warmup_start_lr",
            f"{lr.warmup_start_lr:g}",
            "has no effect without lr.warmup",
        )


def global_batch_is_set_once(job: Job) -> Iterator[Problem]:
    """Refuse accumulation steps next to a global batch, and a batch warm-up that contradicts other fields."""
    train = job.train
    if train.global_batch_size is not None and train.accumulation_steps != 1:
        yield Problem(
            "train.accumulation_steps",
            str(train.accumulation_steps),
            "is computed from train.global_batch_size",
            "remove one of them",
        )
    if train.batch_warmup is None:
        return
    length = train.batch_warmup.length
    if limit := exceeded(length, job):
        yield Problem("train.batch_warmup.length", str(length), f"must be at most {limit}")
    for path, is_set in (
        ("lr.scaling", _sets_arguments(job)),
        ("lr.scale_weight_decay", job.lr.scale_weight_decay),
    ):
        if is_set:
            yield Problem(
                path,
                "",
                "sets arguments of the optimizer for one global batch, and train.batch_warmup changes it",
                "remove one of them",
            )


def length_is_set_once(job: Job) -> Iterator[Problem]:
    """Refuse two limits: which of them ends the job would depend on the number of ranks."""
    if job.train.max_steps is not None and job.train.max_samples is not None:
        yield Problem(
            "train.max_samples",
            str(job.train.max_samples),
            f"ends the job, and so does train.max_steps = {job.train.max_steps}",
            "remove one of them",
        )


def scaling_is_known(job: Job) -> Iterator[Problem]:
    """Require ``lr.scaling`` with an optimizer for which no rule is established."""
    if job.lr.scaling == AUTO and job.optimizer.scaling is None:
        yield Problem(
            "lr.scaling",
            "",
            f"must be set: no scaling rule is established for optimizer {job.optimizer.name}",
            "none, if base_lr is tuned for the global batch; otherwise sqrt or linear, which "
            "`horovod-train study` compares",
        )


def gain_is_supported(job: Job) -> Iterator[Problem]:
    """Refuse a measured gain with other optimizers than SGD, without epochs, and with scaled weight decay."""
    if not follows_gain(job.lr.scaling):
        return
    if job.optimizer.name != "sgd" and ":" not in job.optimizer.name:
        yield Problem(
            "optimizer.name",
            repr(job.optimizer.name),
            f"lr.scaling: {job.lr.scaling} is derived for SGD with momentum",
            "use sgd, or lr.scaling: sqrt or adam_sqrt",
        )
    if job.train.epochs is None and job.train.limit is not None:
        yield Problem(
            "train.epochs",
            "null",
            f"lr.scaling: {job.lr.scaling} counts scale-invariant epochs, whose number of steps is not known",
            "set train.epochs, with which schedules end",
        )
    if job.lr.scale_weight_decay:
        yield Problem(
            "lr.scale_weight_decay",
            "True",
            f"lr.scaling: {job.lr.scaling} has no fixed factor",
            "leave it out",
        )


def noise_scale_is_measurable(job: Job) -> Iterator[Problem]:
    """Refuse the gradient noise scale where local gradients are not available."""
    interval = job.metrics.noise_scale_every_steps
    field, found = "metrics.noise_scale_every_steps", str(interval)
    if follows_gain(job.lr.scaling):
        field, found = "lr.scaling", repr(job.lr.scaling)
    elif interval is None:
        if job.metrics.noise_scale_groups:
            yield Problem(
                "metrics.noise_scale_groups",
                "True",
                "has no effect without metrics.noise_scale_every_steps",
                "set both",
            )
        return
    if job.allreduce.codec is not None:
        reason = "the sum of compressed gradients is not the mean of the ranks' gradients"
        yield Problem(
            field, found, f"cannot be combined with allreduce.codec: {reason}", "leave the codec out"
        )
    if job.train.cuda_graph is not False:
        yield Problem(
            field,
            found,
            "cannot be combined with train.cuda_graph: the local norms are computed by the host's calls",
            "set train.cuda_graph: false",
        )


def schedules_are_supported(job: Job) -> Iterator[Problem]:
    """Refuse schedules of the rate as an argument, and schedules that other fields contradict."""
    schedules = job.optimizer.schedules
    if "lr" in schedules:
        yield Problem("optimizer.schedules.lr", "", "the learning rate has its own schedule", "use lr.decay")
    if schedules and job.train.cuda_graph is not False:
        yield Problem(
            "optimizer.schedules",
            "",
            "cannot be combined with train.cuda_graph: a graph contains the arguments of the optimizer",
            "set train.cuda_graph: false",
        )
    for name in sorted({"beta1", "beta2", "momentum"} & schedules.keys()):
        points = schedules[name]
        if isinstance(points, list) and any(point[1] >= 1 for point in points):
            yield Problem(f"optimizer.schedules.{name}", str(points), "must have values below 1")
    if {"beta1", "beta2"} & schedules.keys() and _sets_arguments(job):
        reason = "sets the betas, which optimizer.schedules replaces"
        yield Problem("lr.scaling", repr(job.lr.scaling), reason, "remove one")
    if "weight_decay" in schedules and job.lr.scale_weight_decay:
        yield Problem(
            "lr.scale_weight_decay", "True", "optimizer.schedules.weight_decay sets the values", "remove one"
        )


def momentum_correction_is_supported(job: Job) -> Iterator[Problem]:
    """Refuse momentum correction where momentum is not corrected."""
    if job.lr.momentum_correction and job.optimizer.name != "sgd" and ":" not in job.optimizer.name:
        yield Problem(
            "lr.momentum_correction", "True", "is a correction for sgd with momentum", "leave it out"
        )


CODE_TABLES = {"lr.scaling": SCALINGS, "lr.decay": SCHEDULES}

LR_RULES = (
    learning_rate_is_set_once,
    decay_has_its_arguments,
    positions_increase,
    warmup_fits,
    global_batch_is_set_once,
    length_is_set_once,
    scaling_is_known,
    gain_is_supported,
    noise_scale_is_measurable,
    schedules_are_supported,
    momentum_correction_is_supported,
)


# Limits of Linux; a path also needs room for the files of a run.
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 3800
SECTIONS = {path.partition(".")[0] for path in PATHS}


def folders_are_valid(job: Job) -> Iterator[Problem]:
    """The home folder in a path exists, and names are not too long."""
    folders = {
        "run_dir": job.run_dir,
        "checkpoint.dir": job.checkpoint.dir,
        "metrics.targets_dir": job.metrics.targets_dir,
    }
    for path, folder in folders.items():
        if folder is None:
            continue
        try:
            parts = Path(folder).expanduser().parts
        except RuntimeError as error:
            yield Problem(path, shorten(folder), f"{error}", "write the whole path")
            continue
        sizes = [len(os.fsencode(part)) for part in parts]
        if max(sizes, default=0) > MAX_NAME_BYTES or sum(sizes) + len(sizes) > MAX_PATH_BYTES:
            text = f"is too long: at most {MAX_NAME_BYTES} bytes for a name, and {MAX_PATH_BYTES} for a path"
            yield Problem(path, shorten(folder), text)


def code_files_exist(job: Job) -> Iterator[Problem]:
    """Require that files of the user's code exist; on Kubernetes, they may exist only in the image."""
    if launcher_support(job.launch.launcher).has_own_image:
        return
    if job.task.startswith("__main__:"):
        hint = "put it into a file, and write task: FILE.py:" + job.task.partition(":")[2]
        yield Problem("task", repr(job.task), "is in the program itself, which ranks do not import", hint)
    for path, _, _, location in code_fields(job.model_dump(include=SECTIONS)):
        file, _, attribute = location.rpartition(":")
        if not file.endswith(".py") and "/" in file:
            found = f"{file!r} is neither a module nor a file that ends in .py"
            yield Problem(path, repr(location), found, "write module:Class or path/to/file.py:Class")
        if not file.endswith(".py"):
            continue
        try:
            is_missing = not Path(file).expanduser().is_file()
        except (OSError, RuntimeError) as error:  # a name that is too long, or `~nobody`
            yield Problem(path, shorten(location), f"cannot be found: {error}")
            continue
        if is_missing:
            yield no_such_file(path, location, file)
        elif attribute != "__main__" and attribute not in (names := names_in(Path(file).expanduser())):
            hint = f"it defines {', '.join(sorted(names)[:10])}" if names else ""
            yield Problem(path, repr(location), f"{file} does not define {attribute}", hint)


class _Everything(frozenset[str]):
    """The names of a file that cannot be known without running it."""

    def __contains__(self, name: object) -> bool:
        return True


def names_in(file: Path) -> frozenset[str]:
    """Return the names that a Python file defines at its top level, without running it.

    All names are contained if the file cannot be read or parsed, or defines names in another way.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return _Everything()  # running it reports the reason
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.alias(name="*"):
                return _Everything()
            case ast.alias(name=name, asname=other):
                names.add(other or name.partition(".")[0])
            case ast.Name(id="globals" | "locals" | "vars" | "exec" | "eval" | "setattr"):
                return _Everything()
            case ast.Attribute(attr="__dict__"):
                return _Everything()
    return _Everything() if "__getattr__" in names else frozenset(names)


def no_such_file(path: str, location: str, file: str) -> Problem:
    """Return the problem of a field whose file does not exist."""
    return Problem(path, repr(location), f"no such file: {file}", "paths start at the job file's folder")


LOCAL_HOSTS = {"localhost", "127.0.0.1"}


def names_are_known(job: Job) -> Iterator[Problem]:
    """Require that each name is in its registry, or is an import path."""
    if job.framework != SCRIPT:
        yield from _known("framework", job.framework, FRAMEWORKS)
    if job.launch.launcher != "auto":
        yield from _known("launch.launcher", job.launch.launcher, LAUNCHERS)
    # Only a known framework has a list of optimizers.
    if ":" not in job.optimizer.name and job.framework in FRAMEWORKS.rows:
        yield from _known("optimizer.name", job.optimizer.name, optimizers_of(job.framework))
    if job.allreduce.codec is not None:
        yield from _known("allreduce.codec.name", job.allreduce.codec.name, CODECS)
    yield from _known("strategy.name", job.strategy.name, STRATEGIES)
    for place, tracker in enumerate(job.metrics.trackers):
        yield from _known(f"metrics.trackers.{place}.name", tracker.name, TRACKERS)
    for path, files in data_sections(job.data):
        if files.source is not None:
            yield from _known(f"{path}.source", files.source, SOURCES)
    yield from _known("task", job.task, TASKS)
    yield from rules_and_schedules_are_known(job)


def rules_and_schedules_are_known(job: Job) -> Iterator[Problem]:
    """Require that the scaling rule and the schedule are in their tables, or are import paths."""
    for path, table in CODE_TABLES.items():
        name = getattr(job.lr, path.partition(".")[2])
        if name != AUTO:
            yield from _known(path, name, table)


def _known(path: str, name: str, registry: Registry) -> Iterator[Problem]:
    try:
        registry.support(name)
    except UnknownNameError as error:
        known = f"known: {', '.join(sorted(registry.rows))}"
        yield Problem(path, repr(name), f"is not a known {registry.kind}; {known}", error.hint)
    except UserError as error:
        yield Problem(path, repr(name), error.message, error.hint)


def launchers_support_job(job: Job) -> Iterator[Problem]:
    """Check the sections of launchers."""
    for _, support in launchers_with_support():
        if support.rules is not None:
            yield from support.rules(job)


def container_runs_on_hosts(job: Job) -> Iterator[Problem]:
    """Check the options of a container, and refuse it where ranks have an image of their own."""
    container = job.launch.container
    if container is None:
        return
    for option in container.options:
        if not is_command(option):
            yield Problem("launch.container.options", repr(option), "cannot be split", "close its quotes")
    support = launcher_support(job.launch.launcher)
    if support.has_own_image:
        yield Problem(
            "launch.container",
            repr(container.image),
            "is for hosts, and ranks of this launcher have an image of their own",
            f"set the image in launch.{support.section}",
        )


def ranks_fit_the_hosts(job: Job) -> Iterator[Problem]:
    """Require enough slots for the ranks, and distinct hosts."""
    launch = job.launch
    names = list(map(name_of, launch.hosts))
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        yield Problem("launch.hosts", str(launch.hosts), f"names {', '.join(doubles)} more than once")
    slots = launch.slots
    if launch.hosts and launch.num_ranks is not None and launch.num_ranks > slots:
        yield Problem(
            "launch.num_ranks",
            str(launch.num_ranks),
            f"must be at most the {slots} slots of launch.hosts",
            "add hosts or slots",
        )
    max_ranks = launcher_support(launch.launcher).max_ranks
    if max_ranks is not None and max(launch.num_ranks or 1, slots) > max_ranks:
        limit = "one rank" if max_ranks == 1 else f"{max_ranks} ranks"
        yield Problem(
            "launch.launcher", repr(launch.launcher), f"starts {limit} only", "leave it out: auto chooses one"
        )


def elastic_is_supported(job: Job) -> Iterator[Problem]:
    """Require consistent numbers of ranks, a single source of hosts, and resuming from checkpoints."""
    launch, elastic = job.launch, job.launch.elastic
    if elastic is None:
        return
    wanted = launch.num_ranks or elastic.min_ranks
    if not (elastic.max_ranks or launch.num_ranks or launch.hosts):
        yield Problem(
            "launch.elastic.max_ranks", "null", "is needed where neither num_ranks nor hosts say how many"
        )
    elif not elastic.min_ranks <= wanted <= launch.most_ranks:
        yield Problem(
            "launch.elastic",
            f"{elastic.min_ranks} to {launch.most_ranks} ranks",
            f"does not fit launch.num_ranks = {launch.num_ranks}",
            "min_ranks <= num_ranks <= max_ranks",
        )
    if elastic.discover is not None and not is_command(elastic.discover):
        yield Problem(
            "launch.elastic.discover", repr(elastic.discover), "is not a command", "close its quotes"
        )
    if elastic.discover is not None and launch.hosts:
        yield Problem(
            "launch.elastic.discover", repr(elastic.discover), "and launch.hosts both name hosts", "use one"
        )
    if job.checkpoint.resume == "never":
        yield Problem(
            "checkpoint.resume",
            "'never'",
            "would start from the beginning whenever hosts change",
            "use auto with elastic",
        )


def host_settings_belong_to_hosts(job: Job) -> Iterator[Problem]:
    """Refuse settings of hosts that are not in ``launch.hosts``, because they would have no effect."""
    if job.launch.elastic is not None and job.launch.elastic.discover is not None:
        return  # hosts are not known before their discovery
    names = list(map(name_of, job.launch.hosts))
    for name in sorted(set(job.launch.host_settings) - set(names)):
        yield Problem(
            f"launch.host_settings.{name}", "", "is not one of launch.hosts", did_you_mean(name, names)
        )


def variables_are_set_once(job: Job) -> Iterator[Problem]:
    """Refuse variables that are both in ``launch.env`` and in ``launch.secrets``."""
    for name in sorted(job.launch.secrets.keys() & job.launch.env.keys()):
        yield Problem(f"launch.env.{name}", "", "is one of launch.secrets as well", "keep the secret")


def ports_fit(job: Job) -> Iterator[Problem]:
    """Require a valid metrics port for each rank of a host."""
    hosts = job.launch.hosts
    ranks = max(map(slots_of, hosts)) if hosts else job.launch.num_ranks or 1
    if job.metrics.port + ranks - 1 > 65535:
        yield Problem(
            "metrics.port",
            str(job.metrics.port),
            f"port + local rank exceeds 65535 for {ranks} ranks on a host",
            f"use at most {65536 - ranks}",
        )


def stalls_are_reported_before_they_end_the_job(job: Job) -> Iterator[Problem]:
    """Require that the warning of a stall precedes the shutdown."""
    health = job.health
    if health.stall_shutdown_s <= health.stall_warning_s:
        yield Problem(
            "health.stall_shutdown_s",
            f"{health.stall_shutdown_s:g}",
            f"must be greater than health.stall_warning_s = {health.stall_warning_s:g}",
        )


def determinism_is_possible(job: Job) -> Iterator[Problem]:
    """Refuse deterministic runs with inductor, because it selects kernels by measured time."""
    compiled = job.train.compile
    if job.train.deterministic and compiled is not None and compiled.backend == "inductor":
        yield Problem(
            "train.compile.backend",
            "'inductor'",
            "cannot be combined with train.deterministic",
            "use aot_eager, or set deterministic: false",
        )


def compile_is_supported(job: Job) -> Iterator[Problem]:
    """Refuse modes without inductor, and CUDA graphs with a mode that captures its own graphs."""
    compiled = job.train.compile
    if compiled is None:
        return
    if compiled.mode != "default" and compiled.backend != "inductor":
        yield Problem(
            "train.compile.mode",
            repr(compiled.mode),
            f"has no effect with backend: {compiled.backend}",
            "leave it out, or use backend: inductor",
        )
    records = compiled.mode in {"reduce-overhead", "max-autotune"}
    if job.train.cuda_graph is not False and records:
        yield Problem(
            "train.cuda_graph",
            repr(job.train.cuda_graph),
            f"cannot be combined with train.compile.mode: {compiled.mode}, which captures its own graphs",
            "leave one of them out; mode: max-autotune-no-cudagraphs can be combined",
        )


def activations_are_chosen_once(job: Job) -> Iterator[Problem]:
    """Refuse an activation budget together with names of modules to recompute."""
    if job.train.activation_memory_mib is not None and job.train.activation_checkpointing:
        yield Problem(
            "train.activation_memory_mib",
            f"{job.train.activation_memory_mib:g}",
            "selects layers automatically, and cannot be combined with train.activation_checkpointing",
            "remove one of them",
        )


def randomness_is_supported(job: Job) -> Iterator[Problem]:
    """Refuse random numbers by sample where calls of the forward pass cannot be followed."""
    if job.train.randomness != "sample":
        return
    fields = {
        "train.compile": "a compiled model does not call the functions that draw by sample",
        "train.cuda_graph": "a graph would repeat the random numbers of its capture",
        "train.activation_checkpointing": "layers are called again in the backward pass",
        "train.activation_memory_mib": "layers are called again in the backward pass",
    }
    for path, reason in fields.items():
        value = getattr(job.train, path.partition(".")[2])
        if value:
            yield Problem(
                path,
                shorten(value if isinstance(value, str | int | float | list) else "set"),
                f"cannot be combined with train.randomness: sample: {reason}",
                "remove one of them",
            )


def framework_supports_job(job: Job) -> Iterator[Problem]:
    """Refuse fields that the framework does not support."""
    support = framework_support(job.framework)
    yield from _refused(job, support.refused, f"framework: {job.framework}")
    spikes, has_own_loop = job.health.loss_spike, bool(support.loop) and not support.loop.startswith("ours")
    if has_own_loop and spikes is not None and spikes.action == "rollback":
        message = f"is not supported with framework: {job.framework}, whose loop cannot go back"
        yield Problem("health.loss_spike.action", "'rollback'", message, "use warn")


def _refused(job: Job, fields: Iterable[Refused], who: str) -> Iterator[Problem]:
    for refused in fields:
        section, _, field = refused.field.rpartition(".")
        owner = getattr(job, section) if section else job
        value = getattr(owner, field)
        default = type(owner).model_fields[field].default
        if refused.concerns(value, default):
            shown = repr(value.name if isinstance(value, Codec) else value)
            message = f"is not supported with {who}: {refused.reason}"
            yield Problem(refused.field, shown, message, refused.instead)


def strategy_is_available(job: Job) -> Iterator[Problem]:
    """Refuse strategies with other frameworks than PyTorch."""
    if job.framework != "torch" and job.strategy != Strategy():
        yield Problem(
            "strategy",
            repr(job.strategy.name),
            f"is not supported with framework: {job.framework}, which sums gradients in each step",
            "leave it out, or use framework: torch",
        )


def strategy_supports_job(job: Job) -> Iterator[Problem]:
    """Check the arguments of the strategy, and refuse fields that it does not support."""
    support = strategy_support(job.strategy.name)
    yield from STRATEGY_ARGS.problems(job.strategy.name, job.strategy.args)
    yield from _refused(job, support.refused, f"strategy: {job.strategy.name}")


def codec_is_available(job: Job) -> Iterator[Problem]:
    """Check the arguments of the codec, and refuse fields that it does not support."""
    codec = job.allreduce.codec
    if codec is None:
        return
    support = codec_support(codec.name)
    yield from CODEC_ARGS.problems(codec.name, codec.args)
    yield from _refused(job, support.refused, f"codec: {codec.name}")
    if support.residual_copies and job.train.precision == "fp16":
        yield Problem(
            "train.precision",
            "'fp16'",
            f"cannot be combined with codec {codec.name!r}: its residuals would have another loss scale "
            "when they are sent",
            "use bf16 or fp32",
        )
    if job.framework != "torch":
        yield Problem(
            "allreduce.codec",
            repr(codec.name),
            f"is not supported with framework: {job.framework}",
            "leave it out, or use framework: torch",
        )
    if job.train.channels_last:
        yield Problem(
            "train.channels_last",
            "True",
            "cannot be combined with allreduce.codec: residuals are stored in the order of memory",
            "remove one of them",
        )
    if job.allreduce.wire_dtype != "fp32":
        yield Problem(
            "allreduce.wire_dtype",
            repr(job.allreduce.wire_dtype),
            "cannot be combined with allreduce.codec, which determines the data type",
            "remove one of them",
        )


def tracker_arguments_fit(job: Job) -> Iterator[Problem]:
    """Check the arguments of trackers."""
    for place, tracker in enumerate(job.metrics.trackers):
        yield from TRACKER_ARGS.problems(tracker.name, tracker.args, f"metrics.trackers.{place}.args")


def data_sections(data: Data) -> Iterator[tuple[str, Files]]:
    """Yield the sections that describe files, with their paths."""
    yield "data", data
    for place, part in enumerate(data.mixture):
        yield f"data.mixture.{place}", part
    if data.eval is not None:
        yield "data.eval", data.eval


def files_are_described(job: Job) -> Iterator[Problem]:
    """Check sources and their arguments, and refuse what has no effect without files."""
    data = job.data
    if data.mixture and data.source is not None:
        yield Problem(
            "data.mixture", "", "is a list of sources, and data.source is one", "remove one of them"
        )
    for path, files in data_sections(data):
        yield from _problems_of_files(path, files, data)
    for field in ("sampling", "collate"):
        if getattr(data, field) is not None and data.source is None and not data.mixture:
            yield Problem(
                f"data.{field}", "", "is for files: the task's train_data() decides it", "leave it out"
            )


def _problems_of_files(path: str, files: Files, data: Data) -> Iterator[Problem]:
    source, args = files.source, files.source_args
    of = data.mixture[0] if data.mixture else data
    if path == "data.eval" and source in (None, of.source):
        source, args = of.source, {**of.source_args, **args}
    known = ", ".join(sorted(SOURCES.rows))
    if source is not None:
        yield from SOURCE_ARGS.problems(source, args, f"{path}.source_args")
        if not files.files:
            yield Problem(f"{path}.files", "", f"is required with source: {source}", "name the files")
    elif path.startswith("data.mixture"):
        yield Problem(f"{path}.source", "", "is required in each part", f"set source: {known}")
    else:
        hint = "write it in the parts of data.mixture" if data.mixture else f"set source: {known}"
        for field in ("source_args", "files", "decode", "keep", "exclude"):
            if getattr(files, field) != type(files).model_fields[field].get_default():
                yield Problem(f"{path}.{field}", "", "has no effect without a source", hint)


def sampling_is_possible(job: Job) -> Iterator[Problem]:
    """Refuse combinations of weights, classes and lengths that have no meaning."""
    data, sampling = job.data, job.data.sampling
    if sampling is None:
        return
    draws = sampling.weight is not None or sampling.balance is not None
    if sampling.weight is not None and sampling.balance is not None:
        yield Problem(
            "data.sampling.balance",
            repr(sampling.balance),
            "determines the weights of samples, and so does data.sampling.weight",
            "remove one of them",
        )
    if not (draws or sampling.length is not None):
        yield Problem(
            "data.sampling", "", "has no effect without weight, balance or length", "set one of them"
        )
    if not sampling.replacement and not draws:
        yield Problem("data.sampling.replacement", "False", "has no effect without weight or balance")
    if not data.shuffle:
        yield Problem("data.shuffle", "False", "cannot be combined with data.sampling", "remove one of them")
    if data.mixture and not sampling.replacement:
        yield Problem(
            "data.sampling.replacement", "False", "cannot be combined with data.mixture", "remove one of them"
        )


SCRIPT_ARGS = {"arguments", "batch_size"}
# Fields that scripts have; they decide all others themselves.
OF_SCRIPTS = {
    *("name", "framework", "task", "task_args", "run_dir", "run_dir_access"),
    *("metrics", "health", "launch"),
}


def script_is_supported(job: Job) -> Iterator[Problem]:
    """Check the task and its arguments if it is a script, and refuse fields that a script ignores."""
    is_script = job.task.endswith(".py:__main__")
    if job.framework != SCRIPT:
        if is_script:
            hint = "set framework: script"
            yield Problem("task", repr(job.task), "is a script: it belongs to framework: script", hint)
        return
    if not is_script:
        yield Problem("task", repr(job.task), "is not a script", "write task: train.py:__main__")
    for section in [name for name in Job.model_fields if name not in OF_SCRIPTS]:
        if getattr(job, section) != Job.model_fields[section].default:
            yield Problem(section, "", "is not for scripts, which decide it themselves", "leave it out")
    for path, value, why in (
        ("launch.elastic", job.launch.elastic, "they cannot be asked to save before ranks start again"),
        ("health.inject", job.health.inject, "faults are injected between the steps of our loop"),
    ):
        if value:
            yield Problem(path, "", f"is not for scripts: {why}", "leave it out")
    yield from _arguments_of_script(job)


def _arguments_of_script(job: Job) -> Iterator[Problem]:
    if unknown := sorted(job.task_args.keys() - SCRIPT_ARGS):
        allowed = f"of a script it has {' and '.join(sorted(SCRIPT_ARGS))}"
        yield Problem("task_args", ", ".join(unknown), f"is not known; {allowed}")
    arguments, batch_size = job.task_args.get("arguments", []), job.task_args.get("batch_size", 1)
    if not isinstance(arguments, list) or not all(isinstance(each, str | int | float) for each in arguments):
        yield Problem("task_args.arguments", shorten(arguments), "must be a list of texts and numbers")
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        yield Problem("task_args.batch_size", shorten(batch_size), "must be a number of samples, at least 1")


RULES: tuple[Callable[[Job], Iterator[Problem]], ...] = (
    names_are_known,
    folders_are_valid,
    code_files_exist,
    *LR_RULES,
    launchers_support_job,
    container_runs_on_hosts,
    ranks_fit_the_hosts,
    elastic_is_supported,
    host_settings_belong_to_hosts,
    variables_are_set_once,
    ports_fit,
    stalls_are_reported_before_they_end_the_job,
    determinism_is_possible,
    activations_are_chosen_once,
    compile_is_supported,
    randomness_is_supported,
    framework_supports_job,
    strategy_is_available,
    strategy_supports_job,
    codec_is_available,
    tracker_arguments_fit,
    files_are_described,
    sampling_is_possible,
    script_is_supported,
)


def broken_rules(job: Job) -> list[Problem]:
    """Return the problems of all rules."""
    return [problem for rule in RULES for problem in rule(job)]
