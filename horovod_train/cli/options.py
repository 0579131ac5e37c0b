"""Arguments and options of several commands."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict, TypeVar, Unpack

import click

from horovod_train.config.load import job_file, refuse_script
from horovod_train.errors import UserError
from horovod_train.registry import SCRIPT

if TYPE_CHECKING:
    from horovod_train.config.schema import Job

MAX_NAME_CHARS = 63
Command = TypeVar("Command", bound=Callable[..., object])

job_id_argument = click.argument("job_id", metavar="ID")
job_argument = click.argument("job", metavar="JOB")
job_or_script_arguments = click.argument("job", metavar="JOB | --script FILE [-- ARGS]", nargs=-1)


class JobOrScriptCommand(click.Command):
    """Command that accepts a job, or with ``--script`` the arguments of a script after ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line, and refuse arguments of the script that precede ``--``.

        Raises:
            UsageError: The command line is not valid.
        """
        ours = args[: args.index("--")] if "--" in args else list(args)
        if any(each.partition("=")[0] == "--script" for each in ours):
            self._check_before_dashes(ctx, ours)
        return super().parse_args(ctx, args)

    def _check_before_dashes(self, ctx: click.Context, ours: list[str]) -> None:
        how = "arguments of the script follow after --, as in -- "
        try:
            found = self.make_parser(ctx).parse_args(list(ours))[0].get("job")
        except click.NoSuchOption as error:
            text = f"No such option {error.option_name}: {how}{error.option_name} ..."
            raise click.UsageError(text, ctx) from error
        if isinstance(found, tuple) and found:
            words = " ".join(found)
            raise click.UsageError(f"{words}: {how}{words}", ctx)


dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Print the commands and files of the launch, and do nothing else."
)
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Override a field, for example --set train.epochs=3. May be repeated.",
)


script_option = click.option(
    "--script",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Run a plain Horovod script instead of JOB; its arguments follow after --.",
)


def print_line(text: object) -> None:
    """Print and flush a line, so that the progress of a long command is also visible through a pipe."""
    click.echo(text)


def launch_options(command: Command) -> Command:
    """Add the options that specify where and how a job is started."""
    for option in reversed(
        (
            click.option(
                "-n", "--num-ranks", type=click.IntRange(min=1), metavar="RANKS", help="Number of ranks."
            ),
            click.option(
                "-H",
                "--hosts",
                metavar="HOST:SLOTS,...",
                help="Hosts, and number of ranks on each, for example a:4,b:4.",
            ),
            click.option(
                "--hostfile",
                type=click.Path(path_type=Path),
                help="File with one host per line: 'node01 slots=4' or 'node01:4'.",
            ),
            click.option("--launcher", metavar="NAME", help="Launcher of the ranks: horovodrun, mpirun, ..."),
            click.option("--controller", type=click.Choice(["mpi", "gloo"]), help="Horovod's controller."),
            click.option("--run-id", metavar="NAME", hidden=True),
            # The job is already resolved: its environment variables must not be applied again.
            click.option("--resolved", is_flag=True, hidden=True),
            set_option,
            click.option(
                "--inject",
                multiple=True,
                metavar="FAULT",
                help="Inject a fault, to test recovery: kill:rank=1,step=20. May be repeated.",
            ),
        )
    ):
        command = option(command)
    return command


class LaunchOptions(TypedDict):
    """Arguments that ``launch_options`` adds to a command."""

    num_ranks: int | None
    hosts: str | None
    hostfile: Path | None
    launcher: str | None
    controller: str | None
    script: NotRequired[Path | None]
    run_id: str | None
    resolved: bool
    overrides: tuple[str, ...]
    inject: tuple[str, ...]


def job_of(job: Sequence[str], **options: Unpack[LaunchOptions]) -> Job:
    """Return the job that a command line describes.

    Args:
        job: Argument of the command: the job, or with ``--script`` the arguments of the script.
        options: Options of the command line, which override fields of the job.

    Raises:
        UserError: The job or the hosts are not valid, or cannot be read.
    """
    from horovod_train.config.load import job_from, load_job
    from horovod_train.launch.hosts.hostlist import read_hostfile

    hosts, hostfile = options["hosts"], options["hostfile"]
    if hosts is not None and hostfile is not None:
        raise UserError("--hosts and --hostfile both name hosts", hint="give one of them")
    entries = hosts.split(",") if hosts is not None else read_hostfile(hostfile) if hostfile else None
    flags: dict[str, object] = {
        "launch.num_ranks": options["num_ranks"],
        "launch.hosts": None if entries is None else [entry.strip() for entry in entries],
        "launch.launcher": options["launcher"],
        "launch.controller": options["controller"],
    }
    if options["inject"]:
        flags["health.inject"] = list(options["inject"])
    settings = {name: value for name, value in flags.items() if value is not None}
    if entries is not None and options["num_ranks"] is None:
        settings["launch.num_ranks"] = None  # the number of slots determines the number of ranks
    environ: dict[str, str] | None = {} if options["resolved"] else None
    if (script := options.get("script")) is not None:
        return job_from(
            script_job(script, job), Path(), f"--script {script}", options["overrides"], environ, settings
        )
    return load_job(job_file(require_one_job(job)), options["overrides"], environ, settings)


def require_one_job(names: Sequence[str]) -> str:
    """Return the single job that a command line names.

    Raises:
        UserError: The command line names no job, several jobs, or a script.
    """
    if names:
        refuse_script(names[0])  # checked first, because arguments of the script may follow
    if len(names) != 1:
        found = f"several jobs: {', '.join(names)}" if names else "no job"
        raise UserError(
            f"{found}",
            hint="name one JOB, or a script with --script FILE; arguments of a script follow after --",
        )
    return names[0]


def script_job(script: Path, arguments: Sequence[str]) -> dict[str, object]:
    """Return the job description of a script.

    Raises:
        UserError: The file name does not end in .py.
    """
    if script.suffix != ".py":
        raise UserError(f"--script {script}: a Python file is expected, and its name ends in .py")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", script.stem).strip("-._")[:MAX_NAME_CHARS].rstrip("-._")
    return {
        "name": name or "script",
        "framework": SCRIPT,
        "task": f"{script.absolute()}:__main__",
        "task_args": {"arguments": list(arguments)},
    }
