"""How an MPIJob stands: by its conditions, its pods and what is warned of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from horovod_train.events.text import duration
from horovod_train.launch.base import JobStatus
from horovod_train.launch.launchers.mpijob.cluster import Cluster
from horovod_train.launch.launchers.mpijob.render import (
    CANCELLED,
    DRAINED,
    JOB_NAME_LABEL,
    ROLE_LABEL,
    Manifest,
)

Warned = tuple[str, str]
CANCELLED_MESSAGE = "asked to save and leave, then deleted; checkpoints are in its run_dir"
# So long the operator may take to note an end, in seconds.
UNNOTICED_S = 60.0
# Warnings after which nothing will get better by itself.
FATAL_REASONS = {"ValidationError", "FailedCreate", "InvalidImageName", "ErrResourceExists"}
# The operator's word for workers that it cannot create, whyever; this is what admission says.
_IS_REFUSED = re.compile(r"created failed: .* is (forbidden|invalid)", re.DOTALL)
# But for these: room may come, and a new namespace gets its service account a little later.
_MAY_PASS = re.compile(
    r"exceeded quota|timed? ?out|connection refused|looking up service account", re.IGNORECASE
)


def status_of(mpi_job: Manifest, cluster: Cluster) -> JobStatus:
    """Return how an MPIJob stands."""
    name = mpi_job["metadata"]["name"]
    if (going := _going(mpi_job["metadata"], cluster)) is not None:
        return going
    conditions = {
        condition["type"]: str(condition.get("message", ""))
        for condition in mpi_job.get("status", {}).get("conditions", [])
        if condition.get("status") == "True"
    }
    if "Succeeded" in conditions:
        return JobStatus("succeeded", 0)
    if "Failed" in conditions:
        code = _exit_code(cluster, name)
        return JobStatus("preempted" if code == 75 else "failed", code or 1, conditions["Failed"])
    if mpi_job["spec"].get("runPolicy", {}).get("suspend"):
        return _suspended(mpi_job, cluster)
    if "Running" in conditions:
        return JobStatus("running", message=_why_waiting(cluster, name, cluster.warnings(mpi_job)))
    return _before_running(mpi_job, cluster, is_taken_up="Created" in conditions)


def ended_at(mpi_job: Manifest) -> datetime | None:
    """Return when an MPIJob ended, as the operator has it; None: it has not, or nobody says when."""
    for condition in mpi_job.get("status", {}).get("conditions", []):
        has_ended = condition["type"] in ("Succeeded", "Failed") and condition.get("status") == "True"
        if has_ended and "lastTransitionTime" in condition:
            return datetime.fromisoformat(condition["lastTransitionTime"])
    return None


def living_pods(cluster: Cluster, name: str) -> list[Any]:
    """Return the pods of a job that have not ended: those that have, may stay for ever."""
    pods = cluster.pods(f"{JOB_NAME_LABEL}={name}")
    return [pod for pod in pods if pod.status.phase not in ("Succeeded", "Failed")]


def _going(metadata: Manifest, cluster: Cluster) -> JobStatus | None:
    """Return how a job stands that was cancelled or deleted; None: it was not."""
    if CANCELLED in metadata.get("annotations", {}):
        if living_pods(cluster, metadata["name"]):
            return JobStatus("leaving", message="cancelled: its ranks were asked to save and leave")
        return JobStatus("cancelled", 143, CANCELLED_MESSAGE)
    if "deletionTimestamp" in metadata:
        return JobStatus("leaving", message="it was deleted; its pods are going")
    return None


def _suspended(mpi_job: Manifest, cluster: Cluster) -> JobStatus:
    if DRAINED not in mpi_job["metadata"].get("annotations", {}):
        return JobStatus(
            "waiting", message="suspended: by its queue, or until spec.runPolicy.suspend is false"
        )
    if living_pods(cluster, mpi_job["metadata"]["name"]):
        return JobStatus("leaving", message="suspended: its ranks were asked to save and leave")
    return JobStatus("preempted", 75, "suspended: its ranks were asked to save and leave, and have left")


def _before_running(mpi_job: Manifest, cluster: Cluster, *, is_taken_up: bool) -> JobStatus:
    warnings = cluster.warnings(mpi_job)
    if fatal := fatal_warning(warnings):
        return JobStatus("failed", 1, fatal)
    why = _why_waiting(cluster, mpi_job["metadata"]["name"], warnings)
    if is_taken_up or why:  # the operator notes nothing as long as it cannot create workers
        return JobStatus("starting", message=why)
    return JobStatus(
        "waiting",
        message="the MPI operator has not taken it up; is it running? "
        "`kubectl get pods --all-namespaces | grep mpi-operator`. "
        "Where it could not create the workers of a job of this name, it lets up to 17 minutes pass",
    )


def fatal_warning(warnings: Iterable[Warned]) -> str:
    """Return the last of (reason, message) after which nothing will get better; empty: there is none."""
    fatal = [
        f"{reason}: {message}"
        for reason, message in warnings
        if (reason in FATAL_REASONS or _IS_REFUSED.search(message)) and not _MAY_PASS.search(message)
    ]
    return fatal[-1] if fatal else ""


def _why_waiting(cluster: Cluster, name: str, warned: Sequence[Warned]) -> str:
    """Return which pods do not run, and what is said of them; empty: all run."""
    all_pods = cluster.pods(f"{JOB_NAME_LABEL}={name}")
    pods = [pod for pod in all_pods if pod.status.phase == "Pending"]
    # A probe that failed while a container started says nothing of what is waited for now.
    lasting = [(reason, message) for reason, message in warned if reason != "Unhealthy"]
    warnings = [f"{reason}: {message}" for reason, message in lasting[-1:]]
    if not pods:
        is_running = any(pod.status.phase == "Running" for pod in all_pods)
        return (
            _unnoticed_end(all_pods)
            or _between_launchers(all_pods)
            or (warnings[0] if warnings and not is_running else "")
        )
    names = ", ".join(sorted(pod.metadata.name for pod in pods)[:3]) + (" ..." if len(pods) > 3 else "")
    return "; ".join([f"{names} pending", *(_said_of_containers(pods) or warnings)])


def _said_of_containers(pods: Sequence[Any]) -> list[str]:
    """Return why a container does not start, as its kubelet says it, the name of the image in it."""
    for pod in pods:
        for container in pod.status.container_statuses or []:
            waiting = container.state.waiting if container.state is not None else None
            if waiting is not None and waiting.message:
                return [f"{waiting.reason}: {waiting.message}"]
    return []


def _unnoticed_end(pods: Sequence[Any]) -> str:
    """Return that a launcher has ended well and the operator takes no note; empty: that is not so."""
    for pod in _launchers_of(pods):
        ends = [
            container.state.terminated.finished_at
            for container in pod.status.container_statuses or []
            if container.state is not None and container.state.terminated is not None
        ]
        if pod.status.phase != "Succeeded" or not all(ends) or not ends:
            continue
        since_s = (datetime.now(UTC) - max(ends)).total_seconds()
        if since_s > UNNOTICED_S:
            return (
                f"its launcher has ended well {duration(since_s)} ago, and the MPI operator has not taken "
                "note; is it running? `kubectl get pods --all-namespaces | grep mpi-operator`"
            )
    return ""


def _launchers_of(pods: Sequence[Any]) -> list[Any]:
    return [pod for pod in pods if (pod.metadata.labels or {}).get(ROLE_LABEL) == "launcher"]


def _between_launchers(pods: Sequence[Any]) -> str:
    """Return that a launcher has failed and the next one is not there yet; empty: that is not so."""
    launchers = _launchers_of(pods)
    failed = [pod for pod in launchers if pod.status.phase == "Failed"]
    if not failed or len(failed) < len(launchers):
        return ""
    return (
        f"its launcher has failed {len(failed)} time(s); Kubernetes starts the next one after a pause that "
        "doubles each time, up to 6 minutes"
    )


def launcher_pods(cluster: Cluster, name: str) -> list[Any]:
    """Return the pods of a job's launcher, its retries among them, oldest first."""
    pods = cluster.pods(f"{JOB_NAME_LABEL}={name},{ROLE_LABEL}=launcher")
    return sorted(pods, key=lambda pod: pod.metadata.creation_timestamp)


def _exit_code(cluster: Cluster, name: str) -> int | None:
    """Return the exit code of the last launcher; None: it is not known."""
    for pod in reversed(launcher_pods(cluster, name)):
        for container in pod.status.container_statuses or []:
            if container.state.terminated is not None:
                return int(container.state.terminated.exit_code)
    return None
