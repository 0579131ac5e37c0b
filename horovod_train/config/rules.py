"""Rules between fields of a job, which refuse unsupported combinations before anything starts.

A rule checks a whole job and yields problems. To add a rule, write a function, and add it to RULES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from horovod_train.config.arguments import CODEC_ARGS, STRATEGY_ARGS, TRACKER_ARGS
from horovod_train.config.fields import is_command, name_of, slots_of
from horovod_train.config.lr_rules import CODE_TABLES, LR_RULES
from horovod_train.config.optimization import AUTO
from horovod_train.config.path_rules import code_files_exist, folders_are_valid
from horovod_train.config.problems import shorten
from horovod_train.config.schema import Codec, Job, Strategy
from horovod_train.config.support import (
    Refused,
    codec_support,
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
    SCRIPT,
    STRATEGIES,
    TASKS,
    TRACKERS,
    Registry,
    optimizers_of,
)

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
    if launcher_support(job.launch.launcher).has_own_image:
        yield Problem(
            "launch.container",
            repr(container.image),
            "is for hosts, and pods have an image of their own",
            "use launch.kubernetes.image",
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
    if launch.launcher == "local" and max(launch.num_ranks or 1, slots) > 1:
        yield Problem("launch.launcher", "'local'", "starts one rank only", "use launcher: horovodrun")


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
    if job.train.activations_mib is not None and job.train.activation_checkpointing:
        yield Problem(
            "train.activations_mib",
            f"{job.train.activations_mib:g}",
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
        "train.activations_mib": "layers are called again in the backward pass",
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
    yield from _refused(job, framework_support(job.framework).refused, f"framework: {job.framework}")


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


SCRIPT_ARGS = {"arguments", "batch_size"}
# Fields that scripts have; they decide all others themselves.
OF_SCRIPTS = {
    *("name", "framework", "task", "task_args", "run_dir", "run_dir_access"),
    *("ema", "metrics", "health", "launch"),
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
    if job.launch.elastic is not None:
        message = "is not for scripts: they cannot be asked to save before ranks start again"
        yield Problem("launch.elastic", "", message, "leave it out")
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
    script_is_supported,
)


def broken_rules(job: Job) -> list[Problem]:
    """Return the problems of all rules."""
    return [problem for rule in RULES for problem in rule(job)]
