"""Commands that work with files: ``dashboards`` and ``checkpoint``."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from horovod_train.cli.options import print_line


@click.group(name="dashboards")
def dashboards_command() -> None:
    """Export dashboards for Grafana and rules for Prometheus."""


@dashboards_command.command(name="export")
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
def export_dashboards(folder: Path, runbook: str | None, checkpoint_age: float) -> None:
    """Write dashboards (JSON, for Grafana) and rules (YAML, for Prometheus) into FOLDER."""
    from horovod_train.errors import UserError
    from horovod_train.monitor.push import RULES, dashboards, rules_file
    from horovod_train.monitor.rules import RUNBOOK
    from horovod_train.system.files import write_atomic

    if runbook is not None and not runbook.startswith(("http://", "https://")):
        raise UserError(f"--runbook {runbook} is not a URL", hint="begin it with https://")
    texts = {**dashboards(), RULES: rules_file(runbook or RUNBOOK, checkpoint_age)}
    for name, text in texts.items():
        write_atomic(folder / name, text, mode=0o644)
        print_line(folder / name)


@dashboards_command.command(name="push")
@click.argument("url")
@click.option("--folder", default="horovod_train", show_default=True, help="Title of the folder in Grafana.")
def push(url: str, folder: str) -> None:
    """Upload the dashboards to the Grafana at URL. GRAFANA_TOKEN must contain a service account token."""
    import os

    from horovod_train.errors import UserError
    from horovod_train.monitor.push import dashboards, push_dashboards

    token = os.environ.get("GRAFANA_TOKEN")
    if not token:
        hint = "export GRAFANA_TOKEN=..., the token of a service account that may edit dashboards"
        raise UserError("GRAFANA_TOKEN is not set", hint=hint)
    push_dashboards(url, token, dashboards(), folder, print_line)


@click.group(name="checkpoint")
def checkpoint_command() -> None:
    """List, verify, compare and export checkpoints."""


path_argument = click.argument("path", type=click.Path(path_type=Path, exists=True, file_okay=False))


@checkpoint_command.command(name="ls")
@path_argument
def list_checkpoints(path: Path) -> None:
    """List the checkpoints in PATH, a folder of checkpoints or of a run."""
    from horovod_train.checkpoint.inspect import checkpoints_in, describe_row

    found = checkpoints_in(path)
    if not found:
        click.echo(f"no checkpoints in {path}")
    for checkpoint in found:
        click.echo(describe_row(checkpoint))


@checkpoint_command.command()
@path_argument
def show(path: Path) -> None:
    """Print the contents of the checkpoint PATH, without values of arrays."""
    from horovod_train.checkpoint.inspect import describe

    click.echo(describe(path))


@checkpoint_command.command()
@path_argument
def verify(path: Path) -> None:
    """Verify all bytes of the checkpoint PATH, or of all checkpoints in it. Exit with 1 if one is damaged."""
    from horovod_train.checkpoint.inspect import checkpoints_in
    from horovod_train.checkpoint.store import verify as verify_one

    found = [checkpoint.path for checkpoint in checkpoints_in(path)] or [path]
    is_good = True
    for each in found:
        problems = verify_one(each)
        is_good = is_good and not problems
        click.echo("\n".join(problems) if problems else f"{each}: valid")
    sys.exit(0 if is_good else 1)


@checkpoint_command.command()
@path_argument
def discard(path: Path) -> None:
    """Delete damaged and quarantined checkpoints in PATH, so that a job can start from the beginning."""
    from horovod_train.checkpoint.inspect import discard_damaged

    gone = discard_damaged(path)
    click.echo("\n".join(f"deleted {folder}" for folder in gone) if gone else f"nothing damaged in {path}")


@checkpoint_command.command()
@click.argument("first", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("second", type=click.Path(path_type=Path, exists=True, file_okay=False))
def diff(first: Path, second: Path) -> None:
    """Compare settings, progress and all arrays of two checkpoints. Exit with 1 if they differ."""
    from horovod_train.checkpoint.inspect import differences

    lines = differences(first, second)
    click.echo("\n".join(lines) if lines else "no differences")
    sys.exit(1 if lines else 0)


@checkpoint_command.command()
@path_argument
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--averaged/--trained",
    default=None,
    help="Export the averaged weights (`ema` in the job), or the trained ones; default: those that were "
    "evaluated.",
)
def export(path: Path, file: Path, *, averaged: bool | None) -> None:
    """Write the weights of the newest valid checkpoint in PATH to the safetensors file FILE.

    PATH is the folder of a run, of its checkpoints, or one checkpoint, written under any strategy. FILE
    contains the names of the model's tensors.
    """
    from horovod_train.checkpoint.inspect import export as export_weights

    found, size_bytes, is_averaged = export_weights(path, file, averaged=averaged)
    kind = "averaged weights" if is_averaged else "weights"
    click.echo(f"{file}: {kind} of {found.name}, {size_bytes / 1e6:.2f} MB")
