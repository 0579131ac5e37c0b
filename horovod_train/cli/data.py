"""Command ``data``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from horovod_train.cli.options import job_argument, set_option
from horovod_train.config.load import job_file, load_job
from horovod_train.errors import UserError

if TYPE_CHECKING:
    from horovod_train.config.data import Files
    from horovod_train.config.schema import Job
    from horovod_train.data.index import IndexMaker

processes_option = click.option(
    "--processes", type=click.IntRange(min=1), help="Processes that read files; default: one for each core."
)


@click.group(name="data")
def data_command() -> None:
    """Index, inspect and verify the files of a job's data."""


def _sections(job: Job) -> Iterator[tuple[str, Files]]:
    """Yield the sections of a job that describe files.

    Raises:
        UserError: There are none.
    """
    from horovod_train.config.rules import data_sections
    from horovod_train.data.dataset import first_files, with_defaults

    found = False
    for path, files in data_sections(job.data):
        if path == "data.eval":
            yield path, with_defaults(files, first_files(job.data))
        elif files.source is not None:
            yield path, files
        found = found or files.source is not None
    if not found:
        raise UserError(
            "the job names no files: its data is what the task returns",
            hint="set data.source and data.files",
        )


@contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int, int], None]]:
    """Show the number of files that are done, on a terminal as a bar."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(label)

        def report(done: int, total: int, _samples: int) -> None:
            bar.update(task, completed=done, total=total)

        yield report


@contextmanager
def _maker(job: Job, path: str, files: Files, processes: int | None) -> Iterator[IndexMaker]:
    """Return the maker of the index of a section, whose progress is shown."""
    from horovod_train.data.dataset import index_maker
    from horovod_train.system.machine import usable_cores

    with _progress(path) as report:
        yield index_maker(
            files,
            job.data,
            job.run_dir,
            is_sampled=path != "data.eval",
            num_processes=processes or usable_cores(),
            report=report,
        )


@data_command.command()
@job_argument
@set_option
@processes_option
@click.option("--again", is_flag=True, help="List the files again, and make the index again.")
def index(job: str, overrides: Sequence[str], processes: int | None, *, again: bool) -> None:
    """Count the samples of the files of JOB, and locate each; a job does this at its start otherwise.

    If the command is interrupted, the next one continues.
    """
    loaded = load_job(job_file(job), overrides)
    for path, files in _sections(loaded):
        with _maker(loaded, path, files, processes) as maker:
            found = maker.index(again=again)
        click.echo(
            f"{path}: {found.summary.num_samples:,} samples in {len(found.sizes):,} files: {found.folder}"
        )


@data_command.command()
@job_argument
@set_option
def inspect(job: str, overrides: Sequence[str]) -> None:
    """Show the numbers of files and samples of JOB, and its first sample."""
    from horovod_train.data.dataset import file_dataset

    loaded = load_job(job_file(job), overrides)
    for path, files in _sections(loaded):
        found = file_dataset(files, loaded.data, loaded.run_dir, is_sampled=path != "data.eval")
        sizes = found.index.sizes
        click.echo(f"{path}: {type(found.source).__name__}")
        click.echo(f"  samples  {len(found):,}")
        click.echo(
            f"  files    {len(sizes):,}, with {sizes.min():,} to {sizes.max():,} samples; "
            f"{(sizes == 0).sum():,} are empty; {found.index.size_bytes / 2**30:.2f} GiB"
        )
        click.echo(f"  digest   {found.digest()}")
        click.echo(f"  index    {found.index.folder}")
        click.echo(f"  sample 0 {structure_of(found[0])}")
        found.close()


def structure_of(sample: object) -> str:
    """Return the structure of a sample: types and shapes."""
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{name}: {structure_of(value)}" for name, value in sample.items()) + "}"
    if isinstance(sample, tuple | list):
        return "(" + ", ".join(structure_of(value) for value in sample[:8]) + ")"
    if hasattr(sample, "shape") and hasattr(sample, "dtype"):
        return f"{sample.dtype}{list(sample.shape)}"
    if isinstance(sample, str | bytes):
        return f"{type(sample).__name__} of {len(sample)}"
    return f"{type(sample).__name__} {sample!r}"


@data_command.command()
@job_argument
@set_option
@processes_option
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the files and samples that cannot be used, and those that data.exclude leaves out already.",
)
def verify(job: str, overrides: Sequence[str], processes: int | None, output: Path | None) -> None:
    """Read and decode all samples of JOB, and print those that cannot be used. Exit with 1 if any."""
    from horovod_train.data.dataset import expanded, function_of, lines_of, read_excluded

    loaded = load_job(job_file(job), overrides)
    lines: list[str] = []
    known: list[str] = []
    for path, files in _sections(loaded):
        known += lines_of(read_excluded(Path(expanded(files.exclude)))) if files.exclude else []
        with _maker(loaded, path, files, processes) as maker:
            found = maker.problems(function_of(files.decode))
        for url, number, text in found:
            click.echo(f"{url}{'' if number is None else f', sample {number}'}: {text}")
            lines += lines_of({url: [] if number is None else [number]})
        click.echo(f"{path}: {len(found)} problem(s)" if found else f"{path}: all samples can be used")
    if output is not None:
        output.write_text("".join(f"{line}\n" for line in dict.fromkeys([*known, *lines])))
        click.echo(f"{output}: set data.exclude to it")
    sys.exit(1 if lines else 0)
