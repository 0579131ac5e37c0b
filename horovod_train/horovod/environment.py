"""Environment variables that Horovod reads, and those that launchers set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from shutil import which

from horovod_train.config.schema import Job
from horovod_train.config.strategies import has_model_parallel_ranks
from horovod_train.errors import UserError
from horovod_train.horovod.installed import loopback_library

# Launchers: program, variable of the number of processes, variable of the rank of this process.
LAUNCHERS_OF_RANKS = (
    ("horovodrun", "HOROVOD_SIZE", "HOROVOD_RANK"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpiexec", "PMI_SIZE", "PMI_RANK"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)
LAUNCHERS = (*LAUNCHERS_OF_RANKS, ("torchrun or accelerate", "WORLD_SIZE", "RANK"))

# Frameworks whose all-reduces use PyTorch's binding, on the compute stream.
ON_PYTORCH = ("torch", "lightning", "transformers")


def started_as_one_of_many(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started this process as a rank of a world, possibly of size 1.

    A single Slurm task does not count, because ``srun`` sets its variables for every program.
    """
    return any(
        variable in environ and not (variable.startswith("SLURM") and environ[variable] == "1")
        for _, variable, _ in LAUNCHERS_OF_RANKS
    )


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
    """Return the launcher that has started this process as one of several; None: it is the only one.

    Variables of Horovod's and Open MPI's launchers have priority, because these launchers may run inside
    another one, such as Slurm.
    """
    for program, size, rank in LAUNCHERS:
        is_one = rank in environ and environ.get(size, "").isdecimal()
        if is_one and int(environ[size]) > 1:
            return Started(program, environ[rank], int(environ[size]), size)
        if is_one and program in ("horovodrun", "mpirun"):
            return None
    return None


def require_launcher(environ: Mapping[str, str]) -> None:
    """Prevent several processes from training the same job independently. Call it if Horovod has one rank.

    Raises:
        UserError: A launcher that Horovod does not support has started several processes.
    """
    if (started := started_by(environ)) is not None:
        count = started.count
        raise UserError(
            f"{started}, but Horovod was initialized with one rank: each process would train alone",
            hint=f"start the ranks with `horovod-train run JOB -n {count}` or `horovodrun -np {count} ...`; "
            "in a Slurm allocation with `--launcher slurm-allocation`",
        )


def open_mpi_without_ssh() -> dict[str, str]:
    """Return Open MPI's settings for a machine without ssh: it requires a remote shell, even if unused."""
    return {} if which("ssh") or which("rsh") else {"OMPI_MCA_plm_rsh_agent": which("true") or "true"}


def open_mpi_on_loopback(environ: Mapping[str, str]) -> dict[str, str]:
    """Return settings with which mpirun listens on the loopback only, for ranks that are all on this machine.

    Open MPI has a setting for the interfaces of outgoing connections, but none for listening sockets. The
    engine's loopback library, which is preloaded, changes its calls of bind().
    """
    settings = {"OMPI_MCA_oob_tcp_if_include": "lo"}
    library = loopback_library()
    # The dynamic loader splits LD_PRELOAD at both characters.
    if library is not None and not set(" :") & set(str(library)):
        others = environ.get("LD_PRELOAD")
        settings["LD_PRELOAD"] = f"{library}:{others}" if others else str(library)
    return settings


def from_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that horovodrun would set, for a rank started by ``srun``; empty: it was not.

    HOROVOD_TRAIN_PLACEMENT contains the hosts and their numbers of ranks, in the order of ranks.
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
    """Return Horovod's environment variables for a job."""
    # Strategies that split the ranks create process sets after initialization.
    splits = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"} if has_model_parallel_ranks(job.strategy) else {}
    return {
        **splits,
        # The buckets are fused already. Fusion by Horovod would add a copy, and the order of additions would
        # depend on timing.
        "HOROVOD_FUSION_THRESHOLD": "0",
        "HOROVOD_CYCLE_TIME": f"{job.allreduce.cycle_time_ms:g}",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": f"{max(1, round(job.health.stall_warning_s))}",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": f"{max(2, round(job.health.stall_shutdown_s))}",
        # Longer than the stall shutdown, whose error names the missing ranks; Gloo's is "timed out".
        "HOROVOD_GLOO_TIMEOUT_SECONDS": f"{max(30, round(job.health.stall_shutdown_s) + 60)}",
        "HOROVOD_LOG_HIDE_TIME": "1",
        # The GPU waits for an all-reduce. By default, the host would wait, which would delay its other work.
        **({"HOROVOD_ENABLE_ASYNC_COMPLETION": "1"} if job.framework in ON_PYTORCH else {}),
    }
