"""Command ``report``."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(name="report")
@click.argument("what", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "-o", "--output", metavar="FILE", help="File to write; -: standard output (default of markdown)."
)
@click.option("--format", "form", type=click.Choice(["html", "markdown"]), default="html", show_default=True)
@click.option("--loss", type=float, metavar="LOSS", help="Report the time until the loss is at most LOSS.")
def report_command(what: tuple[str, ...], output: str | None, form: str, loss: float | None) -> None:
    """Write a report of RUN: curves, ranks, events, configuration, checkpoints; of several, a comparison.

    RUN is a run folder (runs/JOB/RUN), a folder that contains runs, or the ID of a job. HTML is one file
    that can be opened without network.
    """
    from horovod_train.errors import UserError
    from horovod_train.plugins.report.document import as_html, as_markdown, records_of, report_of

    if output is None and form == "html":
        raise UserError("no output file for HTML", hint="add -o report.html, or --format markdown")
    report = report_of(records_of(what), loss)
    text = as_html(report) if form == "html" else as_markdown(report)
    target = output or "-"
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    with click.open_file(target, "w", encoding="utf-8", atomic=True) as file:
        file.write(text)
    if target != "-":
        click.echo(f"written: {target}")
