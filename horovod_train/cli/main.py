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
    "submit": "Start a job, and return immediately.",
    "status": "Show state, progress and slow ranks of a job.",
    "logs": "Show the output of a job.",
    "wait": "Wait until a job has ended; exits with its exit code.",
    "drain": "Request a job to save a checkpoint and exit, without a time limit.",
    "cancel": "End a job; ranks may save a checkpoint within the grace period.",
    "list": "List the jobs of this account.",
    "report": "Write a report of runs, or a comparison, as HTML or Markdown.",
    "study": "Train a job on several numbers of ranks, and show what scaling costs.",
    "render": "Print the command, batch script or manifests of a launch.",
    "plan": "Show the commands, the learning rate and the memory of a job.",
    "worker": "Run one rank; started by a launcher.",
    "serve": "Serve a web page of jobs, and targets and metrics for Prometheus.",
    "ui": "Alias of serve.",
    "targets": "Serve targets and metrics for Prometheus, without the page.",
    "dashboards": "Export dashboards for Grafana and rules for Prometheus.",
    "doctor": "Check this machine, hosts or a cluster.",
    "config": "Show, check and describe job descriptions.",
    "checkpoint": "List, verify, compare and export checkpoints.",
    "engine": "Build and check Horovod.",
    "frameworks": "Show the frameworks and their refused fields.",
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
