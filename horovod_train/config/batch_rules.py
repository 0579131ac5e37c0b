"""Rules for jobs on hosts: of the batch systems Slurm, PBS, Grid Engine and LSF, and in containers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise

from horovod_train.config.fields import is_command, words_of
from horovod_train.config.schema import Job
from horovod_train.errors import Problem

NODES = {"select", "nodes", "ncpus", "mpiprocs"}
"""Resources of PBS that request nodes."""

BATCH_SYSTEMS = {"slurm": "Slurm", "pbs": "PBS", "gridengine": "Grid Engine", "lsf": "LSF"}
"""Names of batch systems by the names of their launchers, and of their sections in ``launch``."""


def batch_system_of(job: Job) -> str | None:
    """Return the launcher of the job's batch system, also for its allocations; None: another launcher."""
    name = job.launch.launcher.removesuffix("-allocation")
    return name if name in BATCH_SYSTEMS else None


def batch_jobs_keep_their_nodes(job: Job) -> Iterator[Problem]:
    """Refuse elastic jobs in batch systems."""
    name = batch_system_of(job)
    if name is not None and job.launch.elastic is not None:
        yield Problem(
            "launch.elastic",
            "",
            f"is not for {BATCH_SYSTEMS[name]}, whose jobs keep their nodes",
            f"leave it out: launch.{name}.requeue puts the job back into the queue",
        )


def batch_job_is_no_array(job: Job) -> Iterator[Problem]:
    """Refuse options that submit a job array, whose jobs would all be the same run."""
    launch = job.launch
    slurm = [f"--{name}" for name in launch.slurm.options]
    for name, options, array in (
        ("slurm", slurm, r"--array"),
        ("pbs", launch.pbs.options, r"-J"),
        ("gridengine", launch.gridengine.options, r"-t\s"),
        ("lsf", launch.lsf.options, r"-J.*\["),
    ):
        for option in options:
            if re.match(array, option):
                yield Problem(
                    f"launch.{name}.options",
                    repr(option),
                    "submits a job array, and each of its jobs would be this run",
                    f"call `horovod-train run --launcher {name}-allocation` in a batch script of yours",
                )


def options_can_be_split(job: Job) -> Iterator[Problem]:
    """Require options that a shell would accept, because they are split into arguments as a shell does."""
    launch = job.launch
    options = {"pbs": launch.pbs.options, "gridengine": launch.gridengine.options}
    options |= {"container": launch.container.options} if launch.container is not None else {}
    for name, found in options.items():
        for option in found:
            if not is_command(option):
                yield Problem(f"launch.{name}.options", repr(option), "cannot be split", "close its quotes")


def resources_of(option: str) -> set[str]:
    """Return the resources that options of qsub request: ``-l a=1,b=2 -lc=3``."""
    words = words_of([option])
    lists = [word for before, word in pairwise(["", *words]) if before == "-l"]
    lists += [word.removeprefix("-l") for word in words if word.startswith("-l")]
    return {part.partition("=")[0] for each in lists for part in each.split(",")}


def pbs_options_request_no_nodes(job: Job) -> Iterator[Problem]:
    """Refuse requests of nodes, which the number of ranks determines."""
    for option in job.launch.pbs.options:
        if is_command(option) and NODES & resources_of(option):
            yield Problem(
                "launch.pbs.options",
                repr(option),
                "requests nodes, as launch.num_ranks does",
                "use launch.num_ranks, launch.pbs.ranks_per_node and launch.pbs.chunk",
            )


def slurm_interface_has_an_effect(job: Job) -> Iterator[Problem]:
    """Refuse ``launch.slurm.mpi`` without MPI."""
    launch = job.launch
    if launch.slurm.mpi != "auto" and launch.controller != "mpi":
        yield Problem(
            "launch.slurm.mpi",
            repr(launch.slurm.mpi),
            f"has no effect with launch.controller: {launch.controller}",
            "leave it out, or use launch.controller: mpi",
        )


def gridengine_places_ranks(job: Job) -> Iterator[Problem]:
    """Require a parallel environment for several ranks."""
    launch = job.launch
    is_placed = launch.most_ranks == 1 or launch.gridengine.parallel_environment is not None
    if launch.launcher == "gridengine" and not is_placed:
        yield Problem(
            "launch.gridengine.parallel_environment",
            "null",
            f"is needed for {launch.most_ranks} ranks",
            "use one of the parallel environments that `qconf -spl` prints",
        )


def batch_system_supports_controller(job: Job) -> Iterator[Problem]:
    """Refuse Gloo where only the process managers of MPI start ranks."""
    name = batch_system_of(job)
    if name in ("gridengine", "lsf") and job.launch.controller != "mpi":
        yield Problem(
            "launch.controller",
            repr(job.launch.controller),
            f"is not available in {BATCH_SYSTEMS[name]}, where MPI starts the ranks",
            "use mpi",
        )


def container_runs_on_hosts(job: Job) -> Iterator[Problem]:
    """Refuse containers of hosts on Kubernetes."""
    if job.launch.container is not None and job.launch.launcher == "mpijob":
        yield Problem(
            "launch.container",
            repr(job.launch.container.image),
            "is for hosts, and pods have an image of their own",
            "use launch.kubernetes.image",
        )


BATCH_RULES: tuple[Callable[[Job], Iterator[Problem]], ...] = (
    batch_jobs_keep_their_nodes,
    batch_job_is_no_array,
    options_can_be_split,
    pbs_options_request_no_nodes,
    slurm_interface_has_an_effect,
    gridengine_places_ranks,
    batch_system_supports_controller,
    container_runs_on_hosts,
)
