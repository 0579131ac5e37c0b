"""``horovod-train engine``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from horovod_train.cli.options import print_line


@click.group(name="engine")
def command() -> None:
    """Build and check Horovod."""


@command.command()
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


@command.command()
def check() -> None:
    """Check the installed engine, and print a fix for each failure. Exit with 1 if a check fails."""
    from horovod_train.checks.engine import check_engine
    from horovod_train.checks.finding import prevents_jobs

    findings = check_engine()
    for finding in findings:
        print_line(finding.line(with_host=False))
    sys.exit(1 if prevents_jobs(findings) else 0)
