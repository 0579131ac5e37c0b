"""Commands about this package: ``config``, ``tasks``, ``frameworks`` and ``engine``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from horovod_train.cli.options import job_argument, print_line, set_option
from horovod_train.config.load import job_file


@click.group(name="config")
def config_command() -> None:
    """Show, check and describe job descriptions."""


@config_command.command(name="show")
@job_argument
@set_option
def show_config(job: str, overrides: tuple[str, ...]) -> None:
    """Print JOB with all fields, as a rank receives it."""
    import yaml

    from horovod_train.config.load import load_job

    document = load_job(job_file(job), overrides).model_dump(mode="json")
    click.echo(yaml.safe_dump(document, sort_keys=False), nl=False)


@config_command.command()
@job_argument
@set_option
def validate(job: str, overrides: tuple[str, ...]) -> None:
    """Check JOB, and report all problems."""
    from horovod_train.config.load import load_job

    path = job_file(job)
    load_job(path, overrides)
    click.echo(f"{path}: valid")


@config_command.command()
def schema() -> None:
    """Print the JSON schema of job descriptions, for editors."""
    from horovod_train.config.arguments import job_schema

    document = {"$schema": "https://json-schema.org/draft/2020-12/schema", **job_schema()}
    click.echo(json.dumps(document, indent=2))


@click.group(name="tasks")
def tasks_command() -> None:
    """Show the tasks that ship with this package."""


@tasks_command.command(name="ls")
def list_tasks() -> None:
    """List the names of tasks, and the locations of their code."""
    from horovod_train.registry import TASKS

    for name, location in sorted(TASKS.rows.items()):
        click.echo(f"{name:<16} {location}")


@tasks_command.command(name="show")
@click.argument("task")
def show_task(task: str) -> None:
    """Print the job description of TASK, as a template for another job."""
    click.echo(job_file(task).read_text(encoding="utf-8"), nl=False)


@click.command(name="frameworks")
def frameworks_command() -> None:
    """Show the frameworks, their installed versions and refused fields, without importing frameworks."""
    from horovod_train.config.support import framework_support
    from horovod_train.registry import FRAMEWORKS

    click.echo(f"{'framework':<14}{'installed':<14}{'tested with':<14}loop")
    for name in sorted(FRAMEWORKS.rows):
        support = framework_support(name)
        if not support.factory:
            click.echo(f"{name:<14}from another package: {FRAMEWORKS.rows[name]}")
            continue
        click.echo(f"{name:<14}{_installed(support.distributions):<14}{support.tested:<14}{support.loop}")
        for refused in support.refused:
            click.echo(f"    refuses {refused.field}: {refused.reason}")
        if support.note:
            click.echo(f"    {support.note}")


def _installed(distributions: tuple[str, ...]) -> str:
    from importlib import metadata

    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "-"


@click.group(name="engine")
def engine_command() -> None:
    """Build and check Horovod."""


@engine_command.command()
@click.option("--force", is_flag=True, help="Build even if the wheel is in the cache.")
@click.option(
    "--sdist",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Horovod's source archive, for machines without a package index.",
)
@click.option(
    "--mpi",
    "mpi_path",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Folder of an MPI installation, or its mpicxx; default: the first mpicxx on the PATH (after `module "
    "load`), or else Open MPI's wheel in this environment.",
)
@click.option("--without-cuda", is_flag=True, help="Build without CUDA, even if this machine has a GPU.")
@click.option("--no-install", is_flag=True, help="Only store the wheel in the cache, and print its path.")
def build(
    sdist: Path | None, mpi_path: Path | None, *, force: bool, without_cuda: bool, no_install: bool
) -> None:
    """Build Horovod for the frameworks of this environment, and install it."""
    from horovod_train.horovod import build as engine
    from horovod_train.horovod.mpi import find_mpi

    mpi = find_mpi(mpi_path)
    plan = engine.make_plan(mpi, without_cuda=without_cuda, report=print_line)
    wheel = engine.build(plan, mpi, sdist=sdist, force=force, report=print_line)
    if no_install or mpi is None:
        print_line(wheel)
        return
    engine.install(wheel, plan, mpi, force=force, report=print_line)


@engine_command.command()
def check() -> None:
    """Check the installed engine, and print a fix for each failure. Exit with 1 if a check fails."""
    from horovod_train.checks.engine import check_engine
    from horovod_train.checks.hosts import prevents_jobs

    findings = check_engine()
    for finding in findings:
        print_line(finding.line(with_host=False))
    sys.exit(1 if prevents_jobs(findings) else 0)
