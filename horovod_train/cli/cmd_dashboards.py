"""``horovod-train dashboards``."""

from __future__ import annotations

from pathlib import Path

import click

from horovod_train.cli.options import say


@click.group(name="dashboards")
def command() -> None:
    """Grafana's dashboards, and Prometheus' rules."""


@command.command(name="export")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--runbook", metavar="URL", help="Where alerts link to: your copy of docs/runbook.md.", default=None
)
@click.option(
    "--checkpoint-age",
    metavar="SECONDS",
    type=click.FloatRange(min=1),
    default=3600.0,
    show_default=True,
    help="A checkpoint is too old after so long.",
)
def export(folder: Path, runbook: str | None, checkpoint_age: float) -> None:
    """Write dashboards (JSON, for Grafana) and rules (YAML, for Prometheus) into FOLDER."""
    from horovod_train.files import write_whole
    from horovod_train.monitor.rules import RUNBOOK
    from horovod_train.monitor.shipped import RULES, dashboards, rules_file

    texts = {**dashboards(), RULES: rules_file(runbook or RUNBOOK, checkpoint_age)}
    for name, text in texts.items():
        write_whole(folder / name, text, mode=0o644)
        say(folder / name)


@command.command(name="push")
@click.argument("url")
@click.option(
    "--token",
    envvar="GRAFANA_TOKEN",
    required=True,
    help="Of a service account; from GRAFANA_TOKEN, so that it stands on no command line.",
)
@click.option("--folder", default="horovod_train", show_default=True, help="Title of the folder in Grafana.")
def push(url: str, token: str, folder: str) -> None:
    """Put the dashboards into the Grafana at URL."""
    from horovod_train.monitor.push import push_dashboards
    from horovod_train.monitor.shipped import dashboards

    push_dashboards(url, token, dashboards(), folder, say)
