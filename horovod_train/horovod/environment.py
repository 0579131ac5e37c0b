"""Environment variables that Horovod and mpirun read."""

from __future__ import annotations

from collections.abc import Mapping
from shutil import which

from horovod_train.config.arguments import has_axes
from horovod_train.config.schema import Job
from horovod_train.config.support import framework_support
from horovod_train.horovod.mpi import loopback_library


def open_mpi_without_ssh() -> dict[str, str]:
    """Return Open MPI's settings for a machine without ssh: it requires a remote shell, even if unused."""
    return {} if which("ssh") or which("rsh") else {"OMPI_MCA_plm_rsh_agent": which("true") or "true"}


def on_loopback(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with which mpirun listens on the loopback only, for ranks on this machine.

    The engine's loopback library, which is preloaded, changes its calls of bind(). Empty: there is no such
    library, or its path cannot be preloaded.
    """
    library = loopback_library()
    # The dynamic loader splits LD_PRELOAD at both characters.
    if library is not None and not set(" :") & set(str(library)):
        others = environ.get("LD_PRELOAD")
        return {"LD_PRELOAD": f"{library}:{others}" if others else str(library)}
    return {}


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
    splits = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"} if has_axes(job.strategy) else {}
    on_stream = framework_support(job.framework).uses_torch_binding
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
        **({"HOROVOD_ENABLE_ASYNC_COMPLETION": "1"} if on_stream else {}),
    }
