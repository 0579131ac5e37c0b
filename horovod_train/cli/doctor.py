"""``horovod-train doctor``."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from horovod_train.cli.options import Command, LaunchOptions, job_of, launch_options
from horovod_train.config.support import launcher_support, launchers_with_support
from horovod_train.registry import EXAMPLE_TASK, load_attribute

if TYPE_CHECKING:
    from horovod_train.checks.hosts import Finding
    from horovod_train.launch.doctor import AllreduceBenchmark


def launcher_options(command: Command) -> Command:
    """Add an option for each launcher that examines where it starts ranks, named as its section or itself."""
    for name, support in launchers_with_support():
        if support.examine:
            text = f"Check where the launcher {name} starts ranks; with JOB, what the job needs there."
            option = f"--{support.section or name}"
            command = click.option(option, "examined", flag_value=name, help=text)(command)
    return command


@click.command(name="doctor")
@click.argument("job", metavar="[JOB]", required=False)
@launch_options
@launcher_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--no-sweep", is_flag=True, help="Skip the all-reduce benchmark; on Kubernetes, do not start pods."
)
def doctor_command(
    job: str | None,
    *,
    examined: str | None,
    as_json: bool,
    no_sweep: bool,
    **options: Unpack[LaunchOptions],
) -> None:
    """Check whether JOB, or any job, can run on this machine, on the hosts of -H, or on Kubernetes.

    The exit code is 1 if a finding prevents jobs from running.
    """
    from horovod_train.checks.hosts import prevents_jobs, report

    if examined is None:
        findings, measured = _examine_hosts(job, options, is_measured=not no_sweep)
    else:
        findings, measured = _examine_launcher(examined, job, options, is_measured=not no_sweep)
    if as_json:
        found = [finding.as_json() for finding in findings]
        times = [time.model_dump() for time in measured.times]
        click.echo(json.dumps({"findings": found, "sweep": times}, indent=2))
    else:
        for line in [*(measured.table() if measured.times else ()), *report(findings)]:
            click.echo(line)
    sys.exit(1 if prevents_jobs(findings) else 0)


def _examine_hosts(
    job: str | None, options: LaunchOptions, *, is_measured: bool
) -> tuple[list[Finding], AllreduceBenchmark]:
    from rich.console import Console

    from horovod_train.checks.hosts import prevents_jobs
    from horovod_train.launch.console import JobConsole
    from horovod_train.launch.doctor import AllreduceBenchmark, examine_hosts, examine_network
    from horovod_train.launch.submit import resolve
    from horovod_train.launch.supervise.elastic import discover, on_hosts

    if job is None:
        options["overrides"] = ("name=doctor", *options["overrides"])
        if not options["hosts"] and not options["hostfile"] and options["num_ranks"] is None:
            options["num_ranks"] = 2
    with tempfile.TemporaryDirectory(prefix="horovod_train-doctor-") as folder:
        found = resolve(job_of([job or EXAMPLE_TASK], **options), options["run_id"])
        request = replace(found, run_dir=Path(folder))
        elastic = request.job.launch.elastic
        if elastic is not None and elastic.discover is not None:
            request = on_hosts(request, discover(elastic.discover, elastic.ranks_per_host), 0)
        findings, link_mbit_s = examine_hosts(request)
        if not is_measured or prevents_jobs(findings):
            return findings, AllreduceBenchmark()
        more, measured = examine_network(request, link_mbit_s, JobConsole(Console(quiet=True)))
    return [*findings, *more], measured


def _examine_launcher(
    launcher: str, job: str | None, options: LaunchOptions, *, is_measured: bool
) -> tuple[list[Finding], AllreduceBenchmark]:
    from horovod_train.launch.submit import resolve

    if job is not None:
        options["launcher"] = launcher
    request = resolve(job_of([job or EXAMPLE_TASK], **options), options["run_id"])
    examine = load_attribute(launcher_support(launcher).examine, what=f"launcher {launcher!r}")
    found: tuple[list[Finding], AllreduceBenchmark] = examine(
        request,
        is_job=job is not None,
        is_measured=is_measured,
        report=lambda text: click.echo(text, err=True),
    )
    return found
