"""Launcher of jobs on Kubernetes through the MPI operator."""

from __future__ import annotations

from horovod_train.config.support import LauncherSupport
from horovod_train.plugins.kubernetes.settings import Kubernetes, kubernetes_rules

SUPPORT = LauncherSupport(
    f"{__name__}.launcher:MpiJobLauncher",
    "kubernetes",
    Kubernetes,
    kubernetes_rules,
    has_own_image=True,
    examine=f"{__name__}.doctor:examine",
)
