"""The launcher that started this process, from its environment variables.

Ranks that were started by a launcher of another MPI library would each initialize as a world of one rank, and
train the whole job. That is refused before a framework is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from horovod_train.errors import UserError
from horovod_train.horovod.mpi import installed_mpi


@dataclass(frozen=True)
class Variables:
    """Environment variables of a launcher.

    Attributes:
        program: Name of the launcher.
        size: Number of processes.
        rank: Number of this process.
        local_rank: Number of this process on its host.
        starts_ranks: Whether Horovod can use its processes as ranks.
    """

    program: str
    size: str
    rank: str
    local_rank: str
    starts_ranks: bool = True


# In order of priority, because a launcher may run inside another one, such as mpirun in Slurm.
LAUNCHERS = (
    Variables("horovodrun", "HOROVOD_SIZE", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK"),
    Variables("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    Variables("mpiexec", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    Variables("PALS mpiexec", "PALS_SIZE", "PALS_RANKID", "PALS_LOCAL_RANKID"),
    Variables("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    Variables("torchrun or accelerate", "WORLD_SIZE", "RANK", "LOCAL_RANK", starts_ranks=False),
)
# Variables of the interfaces through which MPI libraries receive their rank.
_PMI = ("PMI_FD", "PMI_PORT", "PMI_RANK", "PMI_CONTROL_FD", "PMIX_RANK", "PALS_RANKID")


@dataclass(frozen=True)
class Started:
    """Start of this process by a launcher, with rank ``number`` of ``count`` (the value of ``variable``)."""

    program: str
    number: str
    count: int
    variable: str

    def __str__(self) -> str:
        which = f"number {self.number} of {self.count} ({self.variable})"
        return f"{self.program} has started this process as {which}"


def started_by(environ: Mapping[str, str]) -> Started | None:
    """Return the launcher that has started this process as one of several; None: it is the only one."""
    for each in LAUNCHERS:
        is_one = each.rank in environ and environ.get(each.size, "").isdecimal()
        if is_one and int(environ[each.size]) > 1:
            return Started(each.program, environ[each.rank], int(environ[each.size]), each.size)
        if is_one and each.program in ("horovodrun", "mpirun"):
            return None
    return None


def variables_of(started: Started, environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables by which a launcher was recognized."""
    (row,) = (each for each in LAUNCHERS if each.program == started.program)
    return [name for name in (row.size, row.rank, row.local_rank) if name in environ]


def started_as_one_of_many(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as a rank of a world, possibly of size 1.

    A single Slurm task does not count, because ``srun`` sets its variables for every program.
    """
    return any(
        each.size in environ and not (each.program == "srun" and environ[each.size] == "1")
        for each in LAUNCHERS
        if each.starts_ranks
    )


def number_of(environ: Mapping[str, str], what: str, alone: int) -> int:
    """Return ``rank``, ``size`` or ``local_rank`` of this process from its launcher's variables.

    Args:
        environ: Environment variables.
        what: Name of an attribute of ``Variables``.
        alone: Value without a launcher.

    >>> number_of({"PMI_RANK": "3", "PMI_SIZE": "4"}, "rank", alone=0)
    3
    """
    for each in LAUNCHERS:
        value = environ.get(getattr(each, what), "")
        if each.starts_ranks and value.isdecimal():
            return int(value)
    return alone


def refuse_other_launchers(environ: Mapping[str, str]) -> None:
    """Refuse a start in which each process would be a world of one rank, before Horovod is initialized.

    Raises:
        UserError: The launcher does not belong to the engine's MPI library.
    """
    started, mpi = started_by(environ), installed_mpi()
    if started is None or mpi is None or started.program == "horovodrun":
        return
    is_open_mpi = mpi.name in ("Open MPI", "Spectrum MPI")
    if started.program == "mpirun":
        fits = is_open_mpi
    elif started.program == "srun":
        fits = any(name in environ for name in _PMI)
    elif started.program.startswith("torchrun"):
        fits = False
    else:  # Slurm's interfaces set PMI_RANK as Hydra does
        fits = not is_open_mpi or "PMIX_RANK" in environ or "SLURM_PROCID" in environ
    if not fits:
        raise UserError(
            f"{started}, and the engine uses {mpi}: each process would train alone",
            hint=how_to_start(started, environ),
        )


def require_world(environ: Mapping[str, str], size: int) -> None:
    """Prevent several processes from training the same job independently.

    Args:
        environ: Environment variables, among them those of launchers.
        size: Number of ranks of Horovod.

    Raises:
        UserError: A launcher has started another number of processes.
    """
    started = started_by(environ)
    if started is None or started.count == size:
        return
    ranks = "one rank: each process would train alone" if size == 1 else f"{size} ranks"
    raise UserError(
        f"{started}, but Horovod was initialized with {ranks}", hint=how_to_start(started, environ)
    )


def how_to_start(started: Started, environ: Mapping[str, str]) -> str:
    """Return the commands that start the ranks correctly, instead of a launcher that does not fit."""
    count, mpi = started.count, installed_mpi()
    if "SLURM_JOB_ID" in environ:
        return (
            f"in a Slurm allocation, call `horovod-train run JOB -n {count} --launcher slurm-allocation`, "
            "without srun"
        )
    own = "horovodrun" if mpi is None or mpi.is_for_horovodrun else f"{mpi.programs}/mpirun"
    return (
        f"start the ranks with `horovod-train run JOB -n {count}`, or "
        f"`{own} -np {count} horovod-train worker JOB`"
    )
