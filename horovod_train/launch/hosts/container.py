"""Commands that run ranks in a container of Apptainer or Singularity, with ``mpirun`` outside of it.

The container shares processes, network and shared memory with its host. The MPI library of the host starts
the ranks, and the MPI library of the image connects them, so that both must fit each other:
https://apptainer.org/docs/user/main/mpi.html (the hybrid model).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from horovod_train.config.fields import words_of
from horovod_train.config.launch import Container
from horovod_train.horovod.mpi import Mpi

# Variables of the host's Python and MPI library, which would be used inside of the container, too.
_OF_THE_HOST = (
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "MPI4PY_LIBMPI", "OPAL_PREFIX", "PMIX_INSTALL_PREFIX", "PRTE_PREFIX"),
    *("I_MPI_ROOT", "FI_PROVIDER_PATH", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV"),
)

_RANK = """#!/bin/sh
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
    return _RANK.format(script=in_container(container, [stage, *folders], command))


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
