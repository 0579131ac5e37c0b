"""Files that a run needs on each host: the job, environment variables, and scripts that start ranks."""

from __future__ import annotations

import base64
import io
import os
import shlex
import zipfile
from collections.abc import Mapping
from pathlib import Path

from horovod_train.config.load import dump_job
from horovod_train.config.schema import Job
from horovod_train.errors import UserError
from horovod_train.launch.hosts.agent import RANK_VARIABLE, RUN_VARIABLE
from horovod_train.launch.hosts.container import rank_script

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

# A rank may be stopped before its Python sends heartbeats (health/heartbeat.py). $$ is the PID of the rank.
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
