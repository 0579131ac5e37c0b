"""``horovod-train``: the entry point, which imports the module of a command only when it is called."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NoReturn

import click

from horovod_train import __version__
from horovod_train.errors import HorovodTrainError

VERBS = {
    "run": "Train a job, and wait until it ends.",
    "submit": "Start a job and return at once.",
    "status": "Show how a submitted job stands.",
    "logs": "Show what a submitted job has written.",
    "wait": "Wait for a submitted job; ends with its exit code.",
    "drain": "Let a job save and leave, however long that takes.",
    "cancel": "End a job: it may save first, for as long as its grace allows.",
    "list": "List submitted jobs.",
    "render": "Print what a launcher would run or apply.",
    "plan": "Show what a job would do, and the memory that it needs.",
    "worker": "Run one rank; started by a launcher.",
    "serve": "Serve a web page of jobs, and targets and metrics for Prometheus.",
    "ui": "Another name of serve.",
    "targets": "Serve targets and metrics for Prometheus, without the page.",
    "dashboards": "Export Grafana's dashboards and Prometheus' rules.",
    "doctor": "Look whether jobs can run here, or on hosts.",
    "config": "Show, check and describe job descriptions.",
    "checkpoint": "List, verify and compare checkpoints.",
    "engine": "Build and check Horovod.",
    "frameworks": "Show the frameworks, and what each cannot do.",
    "tasks": "Show the tasks that ship with this package.",
}


class LazyGroup(click.Group):
    """Group of commands, each a module that is imported only when its command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of commands in the order of ``VERBS``."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import and return a command, or return None if it does not exist."""
        if name not in VERBS:
            return None
        command: click.Command = import_module(f"horovod_train.cli.cmd_{name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="horovod-train")
def cli() -> None:
    """Train with Horovod: one job description for one process or a thousand ranks.

    Exit codes: 0 success, 1 failure of the job, 2 usage or configuration error, 3 numerical error (NaN),
    75 preempted and saved: run the job again to resume it.
    """


def main() -> NoReturn:
    """Run the command line. Print errors as one message, and exit with their exit code."""
    try:
        cli.main(standalone_mode=False)
    except HorovodTrainError as error:
        fail(str(error), error.exit_code)
    except OSError as error:
        fail(f"{error.filename or 'the system'}: {error.strerror or error}", 1)
    except click.exceptions.Abort:
        fail("interrupted", 130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    sys.exit(0)


def fail(message: str, exit_code: int) -> NoReturn:
    """Print an error, and exit."""
    click.echo(f"error: {message}", err=True)
    sys.exit(exit_code)
