"""Launchers, which convert a job into a command, a batch script or a manifest.

``SUPPORT`` is what the launcher ``local`` declares. Its class is in ``hosts.py``, which is not imported to
check a job.
"""

from __future__ import annotations

from horovod_train.config.support import LauncherSupport

SUPPORT = LauncherSupport(f"{__name__}.hosts:LocalLauncher", max_ranks=1)
