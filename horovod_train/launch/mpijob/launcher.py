"""Jobs on Kubernetes: rendered, checked, tried on the server, created, watched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal

import yaml

from horovod_train.config.kubernetes_rules import MAX_CONFIG_BYTES
from horovod_train.errors import LaunchError, UserError
from horovod_train.launch.base import JobStatus, LaunchPlan, LaunchRequest, Submitted, Waits
from horovod_train.launch.mpijob.cluster import Cluster
from horovod_train.launch.mpijob.render import JOB_NAME_LABEL, ROLE_LABEL, Manifest, as_yaml, render
from horovod_train.launch.mpijob.validate import check

POLL_S = 1.0
ACCEPT_S = 5.0
API_TIMEOUT_S = 30.0
# Warnings after which nothing will get better by itself.
FATAL_REASONS = {"ValidationError", "FailedCreate", "InvalidImageName"}


class MpiJobLauncher(Waits):
    """Submits an MPIJob to the cluster of the current context."""

    has_files_here = False

    def plan(self, request: LaunchRequest, verb: tuple[str, ...] = ("run",)) -> LaunchPlan:
        """Return the plan: manifests, and how a person would apply them.

        Args:
            request: What to start.
            verb: What its launcher does with the job: a verb of ours, and options.

        Raises:
            ConfigError: The MPIJob, with the job's patch, would not run; it lists every problem.
            UserError: The task's file is too large.
        """
        file = Path(request.job.task.rpartition(":")[0])
        # A file that is not here is one of the image.
        source = file.read_text(encoding="utf-8") if file.suffix == ".py" and file.is_file() else ""
        if len(source) > MAX_CONFIG_BYTES:
            raise UserError(
                f"task: {file} is too large for a ConfigMap", hint="put it into the image, as module:Class"
            )
        manifests = render(request.job, request.run_id, source, verb)
        check(manifests[1], f"MPIJob {request.job.name}")
        path = Path(f"{request.job_id}.yaml")
        return LaunchPlan(
            ("kubectl", "apply", "--server-side", "--filename", str(path)), files={path: as_yaml(manifests)}
        )

    def submit(self, request: LaunchRequest, plan: LaunchPlan) -> str:
        """Create the job; return ``namespace/name``.

        The server is asked first whether it would accept everything. All that is made belongs to the
        MPIJob, and goes with it.

        Raises:
            LaunchError: The server or the operator refuses; in their own words.
        """
        (text,) = plan.files.values()
        manifests: list[Manifest] = list(yaml.safe_load_all(text))
        settings = request.job.launch.kubernetes
        config, mpi_job, *others = manifests
        name = request.job.name
        with closing(Cluster(settings.namespace, settings.api_timeout_s)) as cluster:
            for manifest in manifests:
                cluster.create(manifest, dry_run=True)
            made = cluster.create(mpi_job)
            owner = {
                "apiVersion": mpi_job["apiVersion"],
                "kind": "MPIJob",
                "name": name,
                "uid": made["metadata"]["uid"],
            }
            try:
                for manifest in (config, *others):
                    metadata = {**manifest["metadata"], "ownerReferences": [owner]}
                    cluster.create({**manifest, "metadata": metadata})
                _wait_for_acceptance(cluster, name)
            except LaunchError:
                cluster.delete_mpi_job(name)
                raise
        return f"{settings.namespace}/{name}"

    def status(self, job: Submitted) -> JobStatus:
        """Return how a job stands.

        Raises:
            LaunchError: The API server does not answer.
        """
        namespace, _, name = job.native_id.partition("/")
        with closing(Cluster(namespace, API_TIMEOUT_S)) as cluster:
            return status_in(cluster, name)

    def logs(self, job: Submitted, *, follow: bool) -> Iterator[str]:
        """Yield the launcher's log, which has the output of all ranks; and those of its retries."""
        namespace, _, name = job.native_id.partition("/")
        seen: set[str] = set()
        told = ""
        with closing(Cluster(namespace, API_TIMEOUT_S)) as cluster:
            while True:
                status = status_in(cluster, name)
                has_ended = not follow or status.has_ended
                if status.message not in ("", told) and not has_ended:
                    told = status.message
                    yield f"{status}"
                for pod in _launcher_pods(cluster, name):
                    if pod.metadata.name not in seen and pod.status.phase != "Pending":
                        seen.add(pod.metadata.name)
                        yield from cluster.log(pod.metadata.name, follow=follow)
                if has_ended:
                    return
                sleep(POLL_S)

    def cancel(self, job: Submitted, how: Literal["drain", "stop", "kill"]) -> None:
        """End a job.

        Suspending it takes its pods away; the signal that they get lets the ranks save and leave. A
        job that is to stop is deleted afterwards; one that is drained stays, suspended.

        Raises:
            LaunchError: The server refuses.
        """
        namespace, _, name = job.native_id.partition("/")
        with closing(Cluster(namespace, API_TIMEOUT_S)) as cluster:
            found = cluster.mpi_job(name)
            if found is None:
                return
            if how != "kill":
                cluster.patch_mpi_job(name, {"spec": {"runPolicy": {"suspend": True}}})
                grace_s = _grace_s(found)
                deadline_s = monotonic() + grace_s + API_TIMEOUT_S
                while cluster.pods(f"{JOB_NAME_LABEL}={name}") and monotonic() < deadline_s:
                    sleep(POLL_S)
            if how != "drain":
                cluster.delete_mpi_job(name)


def status_in(cluster: Cluster, name: str) -> JobStatus:
    """Return how an MPIJob stands, by its conditions, its launcher and its warnings."""
    mpi_job = cluster.mpi_job(name)
    if mpi_job is None:
        return JobStatus("cancelled", 143, "it was deleted")
    conditions = {
        condition["type"]: condition
        for condition in mpi_job.get("status", {}).get("conditions", [])
        if condition.get("status") == "True"
    }
    if "Succeeded" in conditions:
        return JobStatus("succeeded", 0)
    if "Failed" in conditions:
        code = _exit_code(cluster, name)
        message = str(conditions["Failed"].get("message", ""))
        return JobStatus("preempted" if code == 75 else "failed", code or 1, message)
    if "Suspended" in conditions or mpi_job["spec"].get("runPolicy", {}).get("suspend"):
        return JobStatus("preempted", 75, "suspended: its ranks were asked to save and leave")
    if "Running" in conditions:
        return JobStatus("running")
    return _status_before_running(cluster.warnings(name), is_created="Created" in conditions)


def _status_before_running(warnings: list[tuple[str, str]], *, is_created: bool) -> JobStatus:
    fatal = [f"{reason}: {message}" for reason, message in warnings if reason in FATAL_REASONS]
    if fatal:
        return JobStatus("failed", 1, fatal[-1])
    last = "{}: {}".format(*warnings[-1]) if warnings else ""
    return JobStatus("starting" if is_created else "waiting", message=last)


def _wait_for_acceptance(cluster: Cluster, name: str) -> None:
    """Return when the operator has taken up a job, or seems not to be asked for it (suspended, queued).

    Raises:
        LaunchError: The operator refuses it.
    """
    deadline_s = monotonic() + ACCEPT_S
    while monotonic() < deadline_s:
        for reason, message in cluster.warnings(name):
            if reason in FATAL_REASONS:
                raise LaunchError(f"MPIJob {name}: {reason}: {message}")
        found = cluster.mpi_job(name)
        if found is not None and found.get("status", {}).get("conditions"):
            return
        sleep(POLL_S / 4)


def _launcher_pods(cluster: Cluster, name: str) -> list[Any]:
    pods = cluster.pods(f"{JOB_NAME_LABEL}={name},{ROLE_LABEL}=launcher")
    return sorted(pods, key=lambda pod: pod.metadata.creation_timestamp)


def _exit_code(cluster: Cluster, name: str) -> int | None:
    """Return the exit code of the last launcher; None: it is not known."""
    for pod in reversed(_launcher_pods(cluster, name)):
        for container in pod.status.container_statuses or []:
            if container.state.terminated is not None:
                return int(container.state.terminated.exit_code)
    return None


def _grace_s(mpi_job: Manifest) -> float:
    template = mpi_job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]
    return float(template["spec"].get("terminationGracePeriodSeconds", 30))
