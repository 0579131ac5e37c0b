"""``horovod-train study``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from horovod_train.cli.options import job_argument, print_line, set_option

if TYPE_CHECKING:
    from horovod_train.config.schema import Job
    from horovod_train.plugins.report.document import Report
    from horovod_train.plugins.study.results import Study


OF_TABLE = ("ranks", "policies", "tune_lr")
OF_CRITICAL_BATCH = ("branch_epochs", "branch_length", "multiples")
"""Options that apply only to one of the two measurements."""


class Numbers(click.ParamType[tuple[int, ...]]):
    """Type of an option for whole numbers, such as 1,2,4."""

    name = "numbers"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the numbers."""
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            found = ()
        if not found or min(found) < 1:
            self.fail(f"{value!r} must be whole numbers of at least 1, as in 1,2,4", param, ctx)
        return found


@click.command(name="study")
@job_argument
@click.option("--ranks", type=Numbers(), default="1,2,4,8", show_default=True, help="Numbers of ranks.")
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Number of seeds of each row, counted up from train.seed.",
)
@click.option(
    "--policies",
    default="",
    metavar="NAME,...",
    help="Scaling rules, or YAML files whose fields override those of JOB; default: the rule of JOB.",
)
@click.option(
    "--metric",
    metavar="NAME[:min|max]",
    help="Metric to compare; default: that of checkpoint.best or early stopping, else accuracy or loss.",
)
@click.option(
    "--tune-lr",
    is_flag=True,
    help="Search the best base rate of each row first, with a seed of its own; at least three more trainings "
    "for each row.",
)
@click.option("--critical-batch", is_flag=True, help="Measure the critical batch size instead of the table.")
@click.option("--branch-epochs", type=Numbers(), help="With --critical-batch: epochs after which to branch.")
@click.option(
    "--branch-length",
    type=float,
    default=1.0,
    show_default=True,
    help="With --critical-batch: length of a branch, in epochs.",
)
@click.option(
    "--multiples",
    type=Numbers(),
    default="1,2,4,8,16",
    show_default=True,
    help="With --critical-batch: multiples of the batch.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Folder of the study; default: RUN_DIR/NAME/study, which `run`, `submit` and `plan` consult.",
)
@set_option
def study_command(
    job: str,
    *,
    ranks: tuple[int, ...],
    seeds: int,
    policies: str,
    metric: str | None,
    tune_lr: bool,
    critical_batch: bool,
    branch_epochs: tuple[int, ...] | None,
    branch_length: float,
    multiples: tuple[int, ...],
    output: Path | None,
    overrides: tuple[str, ...],
) -> None:
    """Train JOB on several numbers of ranks, and show what scaling costs.

    The result is a table of time, speed-up and accuracy, with means over seeds. A study that was interrupted
    continues with the same command. `run`, `submit` and `plan` warn if a study has found a loss of accuracy.
    """
    from horovod_train.cli.run import refuse_as_rank
    from horovod_train.config.load import job_file, load_job
    from horovod_train.launch.submit import has_local_files
    from horovod_train.plugins.study.results import folder_of, locked, open_study, policies_of, trials_of
    from horovod_train.plugins.study.run import Branching, Tuning, default_epochs, measure, run_trials
    from horovod_train.plugins.study.table import metric_of

    refuse_as_rank()
    refuse_other_options(click.get_current_context(), is_critical=critical_batch)
    described = load_job(job_file(job), overrides)
    folder = folder_of(described) if output is None else output.absolute()
    is_local = has_local_files(described)
    if critical_batch:
        refuse_remote_checkpoints(described, is_local=is_local)
    if metric is not None:
        metric_of(described, (), metric)  # refuses a metric whose direction is unknown, before the trials
    chosen = policies_of(described, [name for name in policies.split(",") if name])
    with locked(folder):
        study = open_study(described, folder, os.urandom(8).hex())
        if critical_batch:
            epochs = branch_epochs or default_epochs(described.train.most_epochs)
            branching = Branching(epochs, multiples, branch_length, seeds)
            branching.check(described)
            study.save()
            measure(study, described, branching, print_line)
        else:
            num_cores = len(os.sched_getaffinity(0))
            runs = folder if is_local else folder_of(described)  # on the volume
            trials = trials_of(described, chosen, ranks, seeds, folder=runs, num_cores=num_cores)
            study.save()
            if tune_lr:
                tuning = Tuning(study, described, seeds, runs, num_cores, metric, print_line)
                trials = tuning.tuned(trials, chosen)
            run_trials(study, trials, print_line)
        finish(study, described, metric)


def refuse_remote_checkpoints(job: Job, *, is_local: bool) -> None:
    """Refuse the critical batch size of a job whose checkpoints this machine cannot read."""
    from horovod_train.errors import UserError

    if not is_local:
        raise UserError(
            f"--critical-batch copies checkpoints, and {job.launch.launcher} keeps them on a volume",
            hint="measure it where checkpoints can be read, such as with --set launch.launcher=horovodrun",
        )


def refuse_other_options(context: click.Context, *, is_critical: bool) -> None:
    """Refuse the options of the measurement that was not requested."""
    for name in OF_TABLE if is_critical else OF_CRITICAL_BATCH:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            option = "--" + name.replace("_", "-")
            raise click.UsageError(
                f"{option} has no effect with --critical-batch, which branches one training of JOB; use --set"
                if is_critical
                else f"{option} has no effect without --critical-batch"
            )


def finish(study: Study, job: Job, metric: str | None) -> None:
    """Write the report of a study.

    Raises:
        UserError: Trials have failed, or no evaluation has the metric.
    """
    from horovod_train.errors import UserError
    from horovod_train.plugins.study.run import report_of_study
    from horovod_train.plugins.study.table import metric_of, table_of

    names = sorted({name for result in study.trials for name in result.metrics})
    compared = metric_of(job, names, metric)
    study.metric = (compared.name, compared.mode)
    study.save()
    write(study.folder, report_of_study(study, table_of(study.trials, compared)))
    if names and compared.name not in names:
        raise UserError(
            f"no evaluation has a metric named {compared.name}", hint=f"metrics are {', '.join(names)}"
        )
    if failed := [result for result in study.trials if result.error]:
        raise UserError(
            f"{len(failed)} of {len(study.trials)} trials failed, the first: {failed[0].trial}: "
            f"{failed[0].error}",
            hint="the same command tries these again",
        )


def write(folder: Path, report: Report) -> None:
    """Write the report of a study as Markdown, JSON and HTML, and print the Markdown."""
    from dataclasses import asdict

    from horovod_train.plugins.report.document import as_html, as_markdown
    from horovod_train.system.files import write_atomic

    markdown = as_markdown(report)
    click.echo(f"\n{markdown}")
    write_atomic(folder / "table.md", markdown)
    write_atomic(folder / "table.json", json.dumps(asdict(report), indent=1))
    write_atomic(folder / "study.html", as_html(report))
    click.echo(f"written: {folder / 'table.md'}, table.json and study.html")
