"""Launcher of jobs on Kubernetes through the MPI operator."""

from __future__ import annotations

from horovod_train.config.support import LauncherSupport
from horovod_train.launch.launchers.mpijob.rules import kubernetes_rules
from horovod_train.launch.launchers.mpijob.settings import Kubernetes

SUPPORT = LauncherSupport(
    f"{__name__}.launcher:MpiJobLauncher", "kubernetes", Kubernetes, kubernetes_rules, has_own_image=True
)
