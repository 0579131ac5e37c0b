"""Status of an MPIJob, from its conditions, its pods and its warning events."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from horovod_train.events.text import duration
from horovod_train.launch.base import JobStatus
from horovod_train.launch.launchers.mpijob.cluster import Cluster, Pod
from horovod_train.launch.launchers.mpijob.document import Manifest, field, section, sections, text
from horovod_train.launch.launchers.mpijob.render import (
    CANCELLED,
    DRAINED,
    JOB_NAME_LABEL,
    ROLE_LABEL,
)

Warned = tuple[str, str]
CANCELLED_MESSAGE = "requested to save and exit, then deleted; checkpoints are in its run_dir"
# Time that the operator may need to record the end of a launcher, in seconds.
UNNOTICED_S = 60.0
# Reasons of warnings of permanent errors.
FATAL_REASONS = {"ValidationError", "FailedCreate", "InvalidImageName", "ErrResourceExists"}
# The operator gives the same reason for all failures to create workers; this matches admission errors.
_IS_REFUSED = re.compile(r"created failed: .* is (forbidden|invalid)", re.DOTALL)
# Transient, hence not fatal: quota may be freed, and a new namespace has no service account at first.
_MAY_PASS = re.compile(
    r"exceeded quota|timed? ?out|connection refused|looking up service account", re.IGNORECASE
)


def status_of(mpi_job: Manifest, cluster: Cluster) -> JobStatus:
    """Return the status of an MPIJob."""
    name = text(mpi_job, "metadata", "name")
    if (going := _termination_status(mpi_job, cluster)) is not None:
        return going
    conditions = {
        text(condition, "type"): text(condition, "message")
        for condition in sections(mpi_job, "status", "conditions")
        if field(condition, "status") == "True"
    }
    if "Succeeded" in conditions:
        return JobStatus("succeeded", 0)
    if "Failed" in conditions:
        code = _exit_code(cluster, name)
        return JobStatus("preempted" if code == 75 else "failed", code or 1, conditions["Failed"])
    if field(mpi_job, "spec", "runPolicy", "suspend"):
        return _suspended(mpi_job, cluster)
    if "Running" in conditions:
        return JobStatus("running", message=_why_waiting(cluster, name, cluster.warnings(mpi_job)))
    return _before_running(mpi_job, cluster, is_accepted="Created" in conditions)


def ended_at(mpi_job: Manifest) -> datetime | None:
    """Return the completion time of an MPIJob by the operator; None: not completed, or unknown."""
    for condition in sections(mpi_job, "status", "conditions"):
        has_ended = field(condition, "type") in ("Succeeded", "Failed")
        if has_ended and field(condition, "status") == "True" and "lastTransitionTime" in condition:
            return datetime.fromisoformat(text(condition, "lastTransitionTime"))
    return None


def running_pods(cluster: Cluster, name: str) -> list[Pod]:
    """Return the pods of a job that have not ended; ended pods may exist indefinitely."""
    pods = cluster.pods(f"{JOB_NAME_LABEL}={name}")
    return [pod for pod in pods if not pod.has_ended]


def _termination_status(mpi_job: Manifest, cluster: Cluster) -> JobStatus | None:
    """Return the status of a job that was cancelled or deleted; None: it was not."""
    metadata = section(mpi_job, "metadata")
    if CANCELLED in section(metadata, "annotations"):
        if running_pods(cluster, text(metadata, "name")):
            return JobStatus("leaving", message="cancelled: its ranks were requested to save and exit")
        return JobStatus("cancelled", 143, CANCELLED_MESSAGE)
    if "deletionTimestamp" in metadata:
        return JobStatus("leaving", message="it was deleted; its pods are terminating")
    return None


def _suspended(mpi_job: Manifest, cluster: Cluster) -> JobStatus:
    if DRAINED not in section(mpi_job, "metadata", "annotations"):
        return JobStatus(
            "waiting", message="suspended by its queue or a user; starts when spec.runPolicy.suspend is false"
        )
    if running_pods(cluster, text(mpi_job, "metadata", "name")):
        return JobStatus("leaving", message="suspended: its ranks were requested to save and exit")
    return JobStatus(
        "preempted",
        75,
        "suspended: its ranks were requested to save, and have exited; run.log in its folder tells "
        "whether they saved (ranks that hang cannot)",
    )


def _before_running(mpi_job: Manifest, cluster: Cluster, *, is_accepted: bool) -> JobStatus:
    warnings = cluster.warnings(mpi_job)
    if fatal := fatal_warning(warnings):
        return JobStatus("failed", 1, fatal)
    why = _why_waiting(cluster, text(mpi_job, "metadata", "name"), warnings)
    if is_accepted or why:  # the operator sets no condition while it cannot create workers
        return JobStatus("starting", message=why)
    return JobStatus(
        "waiting",
        message="the MPI operator has not processed it; check that it runs: "
        "`kubectl get pods --all-namespaces | grep mpi-operator`. "
        "If it failed to create workers for an earlier job of this name, it pauses for up to 17 minutes",
    )


def fatal_warning(warnings: Iterable[Warned]) -> str:
    """Return the last warning of a permanent error, as ``reason: message``; empty: there is none."""
    fatal = [
        f"{reason}: {message}"
        for reason, message in warnings
        if (reason in FATAL_REASONS or _IS_REFUSED.search(message)) and not _MAY_PASS.search(message)
    ]
    return fatal[-1] if fatal else ""


def _why_waiting(cluster: Cluster, name: str, warned: Sequence[Warned]) -> str:
    """Return which pods are pending and why, or why no launcher runs; empty: no reason is known."""
    all_pods = cluster.pods(f"{JOB_NAME_LABEL}={name}")
    pods = [pod for pod in all_pods if pod.phase == "Pending"]
    # A probe that failed while a container started does not explain why pods wait now.
    lasting = [(reason, message) for reason, message in warned if reason != "Unhealthy"]
    warnings = [f"{reason}: {message}" for reason, message in lasting[-1:]]
    if not pods:
        is_running = any(pod.phase == "Running" for pod in all_pods)
        return (
            _unobserved_end(all_pods)
            or _between_launchers(all_pods)
            or (warnings[0] if warnings and not is_running else "")
        )
    names = ", ".join(sorted(pod.name for pod in pods)[:3]) + (" ..." if len(pods) > 3 else "")
    return "; ".join([f"{names} pending", *(_container_messages(pods) or warnings)])


def _container_messages(pods: Sequence[Pod]) -> list[str]:
    """Return the kubelet's reason and message (with the image) for a container that does not start."""
    for pod in pods:
        for container in pod.containers:
            if container.waiting is not None:
                return [": ".join(container.waiting)]
    return []


def _unobserved_end(pods: Sequence[Pod]) -> str:
    """Return a message if a launcher has succeeded and the operator has not recorded it; else empty."""
    for pod in _launchers_of(pods):
        ended = [container for container in pod.containers if container.exit_code is not None]
        ends = [container.finished for container in ended if container.finished is not None]
        if pod.phase != "Succeeded" or not ends or len(ends) < len(ended):
            continue
        since_s = (datetime.now(UTC) - max(ends)).total_seconds()
        if since_s > UNNOTICED_S:
            return (
                f"its launcher succeeded {duration(since_s)} ago, and the MPI operator has not taken "
                "note; is it running? `kubectl get pods --all-namespaces | grep mpi-operator`"
            )
    return ""


def _launchers_of(pods: Sequence[Pod]) -> list[Pod]:
    return [pod for pod in pods if pod.labels.get(ROLE_LABEL) == "launcher"]


def _between_launchers(pods: Sequence[Pod]) -> str:
    """Return a message if the launcher has failed and its retry does not exist yet; else empty."""
    launchers = _launchers_of(pods)
    failed = [pod for pod in launchers if pod.phase == "Failed"]
    if not failed or len(failed) < len(launchers):
        return ""
    return (
        f"its launcher has failed {len(failed)} time(s); Kubernetes starts the next one after a pause that "
        "doubles each time, up to 6 minutes"
    )


def launcher_pods(cluster: Cluster, name: str) -> list[Pod]:
    """Return the pods of a job's launcher, including retries, oldest first."""
    pods = cluster.pods(f"{JOB_NAME_LABEL}={name},{ROLE_LABEL}=launcher")
    return sorted(pods, key=lambda pod: pod.created)


def _exit_code(cluster: Cluster, name: str) -> int | None:
    """Return the exit code of the last launcher; None: unknown."""
    for pod in reversed(launcher_pods(cluster, name)):
        for container in pod.containers:
            if container.exit_code is not None:
                return container.exit_code
    return None
