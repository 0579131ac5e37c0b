"""Files that a run needs on each host, secrets of ranks, and commands in containers.

    stage_files       files of a run on a host: the job, environment variables, scripts that start ranks
    pack_code         the user's code
    in_container      commands that run ranks in a container of Apptainer or Singularity
    misfit            why ranks with an MPI library cannot be started by another one's process manager
    Mask              hides secrets in output
    read_secrets      values of secret variables

Secrets of ranks are not written to command lines, logs or the run folder.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shlex
import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from horovod_train.config.fields import words_of
from horovod_train.config.launch import Container
from horovod_train.config.load import dump_job
from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.horovod.mpi import Mpi
from horovod_train.launch.hosts.agent import RANK_VARIABLE, RUN_VARIABLE

# Variables of the host's Python and MPI library, which would be used inside of the container, too.
_OF_THE_HOST = (
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "MPI4PY_LIBMPI", "OPAL_PREFIX", "PMIX_INSTALL_PREFIX", "PRTE_PREFIX"),
    *("I_MPI_ROOT", "FI_PROVIDER_PATH", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV"),
)

_RANK_IN_CONTAINER = """#!/bin/sh
# Starts one rank in the container. Signals are for the rank.
trap '' USR1 USR2
{script}
"""

_SCRIPT = """unset {unset}
set --
for folder in {folders}; do [ ! -d "$folder" ] || set -- "$@" --bind "$folder"; done
[ ! -e /dev/nvidiactl ] || set -- "$@" --nv
[ ! -e /dev/kfd ] || set -- "$@" --rocm
exec {start} "$@" {options} {command}"""


def in_container(container: Container, folders: Iterable[Path | str], command: Iterable[str]) -> str:
    """Return a shell script that runs a command in a container.

    ``mpirun`` is outside of the container, which shares processes, network and shared memory with its host.
    The MPI library of the host starts the ranks, and the MPI library of the image connects them, so that
    both must fit each other: https://apptainer.org/docs/user/main/mpi.html (the hybrid model).

    Args:
        container: Section of the job.
        folders: Folders of the host that have the same path inside, if they exist.
        command: Program and arguments.
    """
    binds = [part for bind in container.binds for part in ("--bind", bind)]
    return _SCRIPT.format(
        unset=" ".join(_OF_THE_HOST),
        folders=shlex.join(dict.fromkeys(map(str, folders))),
        start=f"{container.runtime} exec",
        options=shlex.join([*binds, *words_of(container.options), container.image]),
        command=shlex.join(command),
    )


def rank_script(container: Container, folders: Iterable[Path | str], stage: str) -> str:
    """Return the script that starts a rank in a container, by its script ``inside``."""
    # A shell in the container, so that the rank knows its own PID, and not that of the runtime.
    command = ["/bin/sh", f"{stage}/inside"]
    return _RANK_IN_CONTAINER.format(script=in_container(container, [stage, *folders], command))


def fingerprint_script(container: Container, folders: Iterable[Path | str], task: str | None) -> str:
    """Return the script that prints the fingerprint of the container's environment."""
    module = ("-P", "-m", "horovod_train.horovod.fingerprint")
    return in_container(container, folders, [container.python, *module, *([task] if task else [])])


def misfit(outside: Mpi | None, inside: str) -> str:
    """Return why ranks with an MPI library cannot be started by the process manager of another one.

    Args:
        outside: MPI library of the host; None: it is not used.
        inside: Name and version of the MPI library in the container.

    >>> misfit(None, "Open MPI 4.1.8")
    ''
    """
    if outside is None:
        return ""
    name, _, version = inside.rpartition(" ")
    is_open_mpi = "Open MPI" in (name, outside.name)
    is_same = name == outside.name and version.split(".")[0] == outside.version.split(".")[0]
    both_have_pmi = not is_open_mpi and name not in ("", "unknown")
    if is_same or both_have_pmi:
        return ""
    return f"the engine in the image uses {inside}, and {outside} starts the ranks"


MAX_SHIPPED_BYTES = 64 * 1024 * 1024
# Folders without code, or with private files.
NOT_SHIPPED = {".git", ".venv", "venv", "__pycache__", "node_modules", "runs", ".mypy_cache", ".ruff_cache"}

# Launchers start this script instead of Python, because hosts may differ. -P: files of the working directory
# must not shadow modules.
_RANK = """#!/bin/sh
# One rank of {run_id} on this host.
trap '' USR1 USR2  # until the rank itself listens
{first_beat}cd {folder} 2>/dev/null || cd {stage} || exit 1
set -a
. {stage}/environment
{rank_variable}=$$  # what the rank starts inherits it, but has other numbers
set +a
exec {python} -P -m {program}
"""

# A rank may be stopped before its Python sends heartbeats (health/watches.py). $$ is the PID of the rank.
_FIRST_BEAT = """read -r now_s _ </proc/uptime
rank=${{HOROVOD_RANK:-${{OMPI_COMM_WORLD_RANK:-${{PMI_RANK:-${{SLURM_PROCID:-0}}}}}}}}
echo "$now_s" >"{stage}/alive-$rank-$$"
"""

_DAEMON = """#!/bin/sh
# A daemon of MPI's process manager, known as part of the run so that it does not outlive it.
trap '' USR1 USR2  # batch systems notify all processes of a job
set -a
. {stage}/environment
set +a
daemon={programs}/${{1##*/}}
shift
exec "$daemon" "$@"
"""


def stage_files(
    job: Job,
    run_id: str,
    stage: str,
    *,
    python: str,
    mpi_programs: str,
    folder: Path,
    program: tuple[str, ...] = (),
    variables: Mapping[str, str],
) -> dict[str, str]:
    """Return the files of a run on one host, contents by name.

    Args:
        job: Resolved job.
        run_id: Name of the run.
        stage: Folder for the files on the host.
        python: Path of the host's Python.
        mpi_programs: Folder of the programs of the host's MPI library.
        folder: Working directory of ranks, if it exists on the host.
        program: Python module and arguments of a rank; empty: the worker.
        variables: Environment variables of ranks on the host, including secrets.
    """
    python = shlex.quote(job.launch.container.python if job.launch.container is not None else python)
    where = shlex.quote(str(Path(stage) / "code" if job.launch.ship_code else folder))
    lines = [f"{name}={shlex.quote(value)}" for name, value in {**variables, RUN_VARIABLE: stage}.items()]
    worker = ("horovod_train", "worker", "--events", "--run-id", run_id, f"{stage}/job.json")
    files = {
        "job.json": dump_job(job),
        "environment": "\n".join([*lines, ""]),
        "rank": _RANK.format(
            run_id=run_id,
            folder=where,
            stage=stage,
            python=python,
            rank_variable=RANK_VARIABLE,
            program=shlex.join(program or worker),
            first_beat="" if program else _FIRST_BEAT.format(stage=stage),
        ),
        "daemon": _DAEMON.format(stage=stage, programs=shlex.quote(mpi_programs)),
    }
    container = job.launch.container
    if container is not None:
        files["inside"] = files["rank"]
        files["rank"] = rank_script(container, folders_of(job, folder), stage)
    return files


def folders_of(job: Job, folder: Path) -> list[str]:
    """Return the folders of a host that ranks in a container need, besides the files of the run."""
    file = job.task.rpartition(":")[0]
    of_task = [str(Path(file).resolve().parent)] if file.endswith(".py") else []
    of_checkpoints = [job.checkpoint.dir] if job.checkpoint.dir is not None else []
    return [str(folder), job.run_dir, *of_checkpoints, *of_task]


def pack_code(folder: Path) -> str:
    """Return the files of a folder as a zip file in base64, without caches and Python environments.

    Raises:
        UserError: The files are larger than ``MAX_SHIPPED_BYTES``.
    """
    packed, size_bytes = io.BytesIO(), 0
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for root, folders, files in os.walk(folder):
            folders[:] = sorted(name for name in folders if name not in NOT_SHIPPED)
            for name in sorted(files):
                path = Path(root) / name
                if not path.is_file():
                    continue
                size_bytes += path.stat().st_size
                if size_bytes > MAX_SHIPPED_BYTES:
                    raise UserError(
                        f"launch.ship_code: {folder} holds more than {MAX_SHIPPED_BYTES >> 20} MiB",
                        hint="keep data elsewhere, or use a folder that the hosts share",
                    )
                archive.write(path, arcname=str(path.relative_to(folder)))
    return base64.b64encode(packed.getvalue()).decode()


MIN_HIDDEN_CHARS = 6
"""Shorter values are not hidden, because too much of the output would be replaced."""


class Mask:
    """Replacement of secrets by asterisks, line by line.

    A secret with several lines is hidden in each of its lines, and in the escaped forms of JSON and ``repr``.
    """

    def __init__(self, secrets: Collection[str] = ()) -> None:
        lines = {line.strip() for secret in secrets for line in secret.splitlines()}
        pieces = {piece for piece in {*secrets, *lines} if len(piece) >= MIN_HIDDEN_CHARS}
        escaped = {json.dumps(piece)[1:-1] for piece in pieces} | {repr(piece)[1:-1] for piece in pieces}
        # The longest first, because a secret may be a prefix of another.
        self._pieces = sorted(pieces | escaped, key=len, reverse=True)

    def hide(self, text: str) -> str:
        """Return a line with the secrets in it replaced."""
        for piece in self._pieces:
            text = text.replace(piece, "***")
        return text


def too_short_to_hide(secrets: Mapping[str, str]) -> list[str]:
    """Return the names of secrets that logs would show, because all of their lines are too short."""
    return [
        name
        for name, value in sorted(secrets.items())
        if value and not any(len(line.strip()) >= MIN_HIDDEN_CHARS for line in value.splitlines())
    ]


def read_secrets(sources: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of secret variables, by name.

    Args:
        sources: ``env:NAME`` or ``file:/path`` for each variable.
        environ: Environment for ``env:`` sources.

    Raises:
        UserError: A source does not exist, or cannot be read.
    """
    found = {}
    for name, source in sources.items():
        kind, _, where = source.partition(":")
        if kind == "env" and where in environ:
            found[name] = environ[where]
        elif kind == "file":
            try:
                found[name] = Path(where).read_text(encoding="utf-8").rstrip("\n")
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "it is not text"
                raise UserError(f"launch.secrets.{name}: {where} cannot be read: {reason}") from error
        else:
            raise UserError(
                f"launch.secrets.{name}: {source} is not set"
                if kind == "env"
                else f"launch.secrets.{name}: {source} exists on Kubernetes only",
                hint="export it before the launch, or take it from a file: file:/path",
            )
    return found


def without_secrets(sources: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that are sources of secrets."""
    hidden = {source.partition(":")[2] for source in sources.values() if source.startswith("env:")}
    return {name: value for name, value in environ.items() if name not in hidden}
