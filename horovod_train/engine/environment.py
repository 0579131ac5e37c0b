"""What Horovod reads from the environment, and what launchers leave in it."""

from __future__ import annotations

from collections.abc import Mapping

from horovod_train.config.schema import Job

# One variable of each launcher that says how many ranks it started.
SIZE_VARIABLES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def started_as_one_of_many(environ: Mapping[str, str]) -> bool:
    """Whether a launcher started this process: then there is a world to join, even of one rank.

    A single Slurm task is a process alone: ``srun`` sets its variable for every program.
    """
    return any(
        variable in environ and not (variable.startswith("SLURM") and environ[variable] == "1")
        for variable in SIZE_VARIABLES
    )


def horovod_settings(job: Job) -> dict[str, str]:
    """Return the variables that make Horovod do what a job says."""
    return {
        # Our buckets are the fusion: Horovod must not join them again. That would cost a copy and
        # make the order of additions depend on timing.
        "HOROVOD_FUSION_THRESHOLD": "0",
        "HOROVOD_CYCLE_TIME": f"{job.allreduce.cycle_time_ms:g}",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": f"{max(1, round(job.health.stall_warning_s))}",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": f"{max(2, round(job.health.stall_shutdown_s))}",
        "HOROVOD_LOG_HIDE_TIME": "1",
    }
