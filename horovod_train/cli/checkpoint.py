"""Command ``checkpoint``."""

from __future__ import annotations

import sys
from pathlib import Path

import click


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
