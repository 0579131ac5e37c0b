"""Launcher of jobs on Kubernetes through the MPI operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from horovod_train.config.support import LauncherSupport
from horovod_train.errors import Problem
from horovod_train.launch.launchers.mpijob.settings import Kubernetes

if TYPE_CHECKING:
    from horovod_train.config.schema import Job


NAME = "mpijob"
"""Name of the launcher."""


def rules(job: Job) -> Iterator[Problem]:
    """Yield the problems that prevent a job from running as an MPIJob."""
    from horovod_train.launch.launchers.mpijob.rules import kubernetes_rules

    yield from kubernetes_rules(job)


SUPPORT = LauncherSupport(
    f"{__name__}.launcher:MpiJobLauncher", "kubernetes", Kubernetes, rules, has_own_image=True
)
