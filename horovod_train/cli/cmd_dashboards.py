"""``horovod-train dashboards``."""

from __future__ import annotations

from pathlib import Path

import click

from horovod_train.cli.options import print_line


@click.group(name="dashboards")
def command() -> None:
    """Export dashboards for Grafana and rules for Prometheus."""


@command.command(name="export")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--runbook",
    metavar="URL",
    help="Address that alerts link to: your copy of docs/runbook.md.",
    default=None,
)
@click.option(
    "--checkpoint-age",
    metavar="SECONDS",
    type=click.FloatRange(min=1),
    default=3600.0,
    show_default=True,
    help="Age of the newest checkpoint above which an alert fires.",
)
def export(folder: Path, runbook: str | None, checkpoint_age: float) -> None:
    """Write dashboards (JSON, for Grafana) and rules (YAML, for Prometheus) into FOLDER."""
    from horovod_train.errors import UserError
    from horovod_train.monitor.rules import RUNBOOK
    from horovod_train.monitor.shipped import RULES, dashboards, rules_file
    from horovod_train.system.files import write_atomic

    if runbook is not None and not runbook.startswith(("http://", "https://")):
        raise UserError(f"--runbook {runbook} is not a URL", hint="begin it with https://")
    texts = {**dashboards(), RULES: rules_file(runbook or RUNBOOK, checkpoint_age)}
    for name, text in texts.items():
        write_atomic(folder / name, text, mode=0o644)
        print_line(folder / name)


@command.command(name="push")
@click.argument("url")
@click.option("--folder", default="horovod_train", show_default=True, help="Title of the folder in Grafana.")
def push(url: str, folder: str) -> None:
    """Upload the dashboards to the Grafana at URL. GRAFANA_TOKEN must contain a service account token."""
    import os

    from horovod_train.errors import UserError
    from horovod_train.monitor.push import push_dashboards
    from horovod_train.monitor.shipped import dashboards

    token = os.environ.get("GRAFANA_TOKEN")
    if not token:
        hint = "export GRAFANA_TOKEN=..., the token of a service account that may edit dashboards"
        raise UserError("GRAFANA_TOKEN is not set", hint=hint)
    push_dashboards(url, token, dashboards(), folder, print_line)
