"""``horovod-train doctor``."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from horovod_train.cli.options import launch_options, make_request


@click.command(name="doctor")
@click.argument("job", metavar="[JOB]", required=False)
@launch_options
@click.option("--json", "as_json", is_flag=True, help="For a program.")
@click.option("--no-sweep", is_flag=True, help="Do not measure all-reduces.")
def command(job: str | None, *, as_json: bool, no_sweep: bool, **options: Any) -> None:
    """Look whether JOB, or any job, can run: on this machine, or on the hosts of -H.

    Ends with 1 when something keeps jobs from running.
    """
    from rich.console import Console

    from horovod_train.doctor.run import examine_hosts, examine_network, report
    from horovod_train.launch.console import JobConsole

    if job is None:
        options["overrides"] = ("name=doctor", *options["overrides"])
        if not options["hosts"] and not options["hostfile"] and options["num_ranks"] is None:
            options["num_ranks"] = 2
    with tempfile.TemporaryDirectory(prefix="horovod_train-doctor-") as folder:
        request = replace(make_request(job or "digits", **options), run_dir=Path(folder))
        findings, link_mbit_s = examine_hosts(request)
        lines: list[str] = []
        if not no_sweep and not any(finding.level == "fail" for finding in findings):
            quiet = JobConsole(Console(quiet=True))
            found, sweep = examine_network(request, link_mbit_s, quiet)
            findings += found
            lines = list(sweep.table()) if sweep.rows else []
        if as_json:
            rows = [finding.as_json() for finding in findings]
            click.echo(json.dumps({"findings": rows, "sweep": sweep.rows if lines else []}, indent=2))
        else:
            for line in [*lines, *report(findings)]:
                click.echo(line)
    sys.exit(1 if any(finding.level == "fail" for finding in findings) else 0)
