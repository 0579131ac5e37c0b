"""What Horovod reads from the environment, and what launchers leave in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from shutil import which

from horovod_train.config.schema import Job
from horovod_train.config.strategies import splits_ranks
from horovod_train.errors import UserError
from horovod_train.horovod.installed import loopback_library

# Of launchers: the program, and its variables for the number of processes and for the number of this one.
LAUNCHERS_OF_RANKS = (
    ("horovodrun", "HOROVOD_SIZE", "HOROVOD_RANK"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpiexec", "PMI_SIZE", "PMI_RANK"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)
LAUNCHERS = (*LAUNCHERS_OF_RANKS, ("torchrun or accelerate", "WORLD_SIZE", "RANK"))

# Frameworks whose sums go through PyTorch's binding, on the stream that computes.
ON_PYTORCH = ("torch", "lightning", "transformers")


def started_as_one_of_many(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started this process: then there is a world to join, even of one rank.

    A single Slurm task is a process alone: ``srun`` sets its variable for every program.
    """
    return any(
        variable in environ and not (variable.startswith("SLURM") and environ[variable] == "1")
        for _, variable, _ in LAUNCHERS_OF_RANKS
    )


@dataclass(frozen=True)
class Started:
    """A launcher has started this process as one of several.

    Attributes:
        program: The launcher.
        number: Of this process.
        count: Of all processes, more than one.
        variable: Of the environment, which says so.
    """

    program: str
    number: str
    count: int
    variable: str

    def __str__(self) -> str:
        which = f"number {self.number} of {self.count} ({self.variable})"
        return f"{self.program} has started this process as {which}"


def started_by(environ: Mapping[str, str]) -> Started | None:
    """Return who has started this process as one of several; None: nobody, or it is the only one.

    What Horovod's and Open MPI's launchers say holds for the ranks that they start, whoever has started
    them.
    """
    for program, size, rank in LAUNCHERS:
        is_one = rank in environ and environ.get(size, "").isdecimal()
        if is_one and int(environ[size]) > 1:
            return Started(program, environ[rank], int(environ[size]), size)
        if is_one and program in ("horovodrun", "mpirun"):
            return None
    return None


def require_launcher(environ: Mapping[str, str]) -> None:
    """Call it where Horovod has one rank: several processes must not train the same job side by side.

    Raises:
        UserError: A launcher that Horovod does not know has started several.
    """
    if (started := started_by(environ)) is not None:
        count = started.count
        raise UserError(
            f"{started}, but Horovod does not know of the others: each would train alone",
            hint=f"start the ranks with `horovod-train run JOB -n {count}` or `horovodrun -np {count} ...`; "
            "in a Slurm allocation with `--launcher slurm-allocation`",
        )


def open_mpi_alone() -> dict[str, str]:
    """Return what Open MPI needs on a machine without ssh: it wants to know one, though it calls nobody."""
    return {} if which("ssh") or which("rsh") else {"OMPI_MCA_plm_rsh_agent": which("true") or "true"}


def open_mpi_on_loopback(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what keeps mpirun from listening on other addresses, where all ranks are on this machine.

    Open MPI has a setting for the interfaces that it calls through, and none for those that it listens on:
    a library of the engine's changes its call of bind().
    """
    settings = {"OMPI_MCA_oob_tcp_if_include": "lo"}
    library = loopback_library()
    # The loader splits names at both.
    if library is not None and not set(" :") & set(str(library)):
        others = environ.get("LD_PRELOAD")
        settings["LD_PRELOAD"] = f"{library}:{others}" if others else str(library)
    return settings


def from_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what horovodrun would have told a rank that ``srun`` has started; empty: it did not.

    HOROVOD_TRAIN_PLACEMENT has the hosts with their numbers of ranks, in the order of ranks.
    """
    if "HOROVOD_TRAIN_PLACEMENT" not in environ or "SLURM_PROCID" not in environ:
        return {}
    sizes = [int(entry.rpartition(":")[2]) for entry in environ["HOROVOD_TRAIN_PLACEMENT"].split(",")]
    node, local_rank = int(environ["SLURM_NODEID"]), int(environ["SLURM_LOCALID"])
    alike = [number for number, size in enumerate(sizes) if size > local_rank]
    return {
        "HOROVOD_RANK": environ["SLURM_PROCID"],
        "HOROVOD_SIZE": str(sum(sizes)),
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(sizes[node]),
        "HOROVOD_CROSS_RANK": str(alike.index(node)),
        "HOROVOD_CROSS_SIZE": str(len(alike)),
        "HOROVOD_HOSTNAME": environ["HOROVOD_TRAIN_PLACEMENT"].split(",")[node].rpartition(":")[0],
    }


def horovod_settings(job: Job) -> dict[str, str]:
    """Return the variables that make Horovod do what a job says."""
    # Ranks that share a model are split into groups when they have met.
    splits = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"} if splits_ranks(job.strategy) else {}
    return {
        **splits,
        # Our buckets are the fusion: Horovod must not join them again. That would cost a copy and
        # make the order of additions depend on timing.
        "HOROVOD_FUSION_THRESHOLD": "0",
        "HOROVOD_CYCLE_TIME": f"{job.allreduce.cycle_time_ms:g}",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": f"{max(1, round(job.health.stall_warning_s))}",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": f"{max(2, round(job.health.stall_shutdown_s))}",
        # Later than the verdict on whoever is missing, which says more than "timed out".
        "HOROVOD_GLOO_TIMEOUT_SECONDS": f"{max(30, round(job.health.stall_shutdown_s) + 60)}",
        "HOROVOD_LOG_HIDE_TIME": "1",
        # A sum on a GPU is waited for by the GPU. The host, which would wait by default, has other work.
        **({"HOROVOD_ENABLE_ASYNC_COMPLETION": "1"} if job.framework in ON_PYTORCH else {}),
    }
