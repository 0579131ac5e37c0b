"""``horovod-train run``."""

from __future__ import annotations

import sys

import click

from horovod_train.cli.options import find_job, job_argument, set_option


@click.command(name="run")
@job_argument
@click.option("-n", "--num-ranks", type=click.IntRange(min=1), metavar="RANKS", help="Ranks to start.")
@click.option("-H", "--hosts", metavar="HOST:SLOTS,...", help="Hosts and ranks on each, as in a:4,b:4.")
@click.option("--controller", type=click.Choice(["mpi", "gloo"]), help="Who coordinates the ranks.")
@click.option("--dry-run", is_flag=True, help="Print exactly what would be done, and do nothing.")
@set_option
def command(
    job: str,
    num_ranks: int | None,
    hosts: str | None,
    controller: str | None,
    overrides: tuple[str, ...],
    *,
    dry_run: bool,
) -> None:
    """Train JOB (a file, or the name of a shipped task) and stay with it to its end."""
    from horovod_train.config.load import load_job
    from horovod_train.launch.run import make_plan, resolve, run_plan

    flags = [
        *([f"launch.num_ranks={num_ranks}"] if num_ranks is not None else []),
        *([f"launch.hosts=[{_quoted(hosts)}]"] if hosts is not None else []),
        *([f"launch.controller={controller}"] if controller is not None else []),
        # Without -n, the slots of -H say how many ranks there are.
        *(["launch.num_ranks=null"] if hosts is not None and num_ranks is None else []),
    ]
    request = resolve(load_job(find_job(job), [*overrides, *flags]))
    plan = make_plan(request)
    if dry_run:
        click.echo(plan.as_text())
        return
    from rich.console import Console

    from horovod_train.launch.console import JobConsole

    click.echo(f"run {request.run_id}: {plan.argv[0]} starts {request.num_ranks} rank(s); {request.run_dir}")
    sys.exit(run_plan(request, plan, JobConsole(Console())))


def _quoted(hosts: str) -> str:
    return ", ".join(f"'{host.strip()}'" for host in hosts.replace("'", "").split(","))
