"""``horovod-train``: the entry point, which imports the module of a command only when it is called."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NoReturn

import click

from horovod_train.errors import HorovodTrainError
from horovod_train.version import __version__

COMMANDS = {  # name: module and purpose
    "run": ("horovod_train.cli.run", "Train a job, and wait until it ends."),
    "submit": ("horovod_train.cli.jobs", "Start a job, and return immediately."),
    "status": ("horovod_train.cli.jobs", "Show state, progress and slow ranks of a job."),
    "logs": ("horovod_train.cli.jobs", "Show the output of a job."),
    "wait": ("horovod_train.cli.jobs", "Wait until a job has ended; exits with its exit code."),
    "drain": ("horovod_train.cli.jobs", "Request a job to save a checkpoint and exit, without a time limit."),
    "cancel": ("horovod_train.cli.jobs", "End a job; ranks may save a checkpoint within the grace period."),
    "list": ("horovod_train.cli.jobs", "List the jobs of this account."),
    "report": (
        "horovod_train.plugins.report.command",
        "Write a report of runs, or a comparison, as HTML or Markdown.",
    ),
    "study": (
        "horovod_train.plugins.study.command",
        "Train a job on several numbers of ranks, and show what scaling costs.",
    ),
    "render": ("horovod_train.cli.plan", "Print the command, batch script or manifests of a launch."),
    "plan": ("horovod_train.cli.plan", "Show the commands, the learning rate and the memory of a job."),
    "worker": ("horovod_train.cli.run", "Run one rank; started by a launcher."),
    "serve": (
        "horovod_train.plugins.serve.command",
        "Serve a web page of jobs, and targets and metrics for Prometheus.",
    ),
    "ui": ("horovod_train.plugins.serve.command", "Alias of serve."),
    "targets": (
        "horovod_train.plugins.serve.command",
        "Serve targets and metrics for Prometheus, without the page.",
    ),
    "dashboards": (
        "horovod_train.plugins.dashboards.command",
        "Export dashboards for Grafana and rules for Prometheus.",
    ),
    "doctor": ("horovod_train.cli.doctor", "Check this machine, hosts or a cluster."),
    "config": ("horovod_train.cli.about", "Show, check and describe job descriptions."),
    "checkpoint": ("horovod_train.cli.checkpoint", "List, verify, compare and export checkpoints."),
    "data": ("horovod_train.cli.data", "Index, inspect and verify the files of a job's data."),
    "engine": ("horovod_train.cli.about", "Build and check Horovod."),
    "frameworks": ("horovod_train.cli.about", "Show the frameworks and their refused fields."),
    "tasks": ("horovod_train.cli.about", "Show the tasks that ship with this package."),
}


class LazyGroup(click.Group):
    """Group of commands, each a module that is imported only when its command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of commands in the order of ``COMMANDS``."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import and return a command, or return None if it does not exist."""
        if name not in COMMANDS:
            return None
        module, _ = COMMANDS[name]
        command: click.Command = getattr(import_module(module), f"{name}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="horovod-train")
def cli() -> None:
    """Train with Horovod: one job description for one process or a thousand ranks.

    Exit codes: 0 success, 1 failure of the job, 2 usage or configuration error, 3 numerical error (NaN),
    75 preempted and saved: run the job again to resume it, 128 + n ended by signal n (143 after cancel).
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
