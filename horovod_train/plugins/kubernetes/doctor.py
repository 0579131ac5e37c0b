"""Examination of a Kubernetes cluster, through the API server and in pods of the job."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from time import monotonic, sleep
from typing import Any

from horovod_train.checks.hosts import Finding, prevents_jobs
from horovod_train.config.schema import Job
from horovod_train.errors import HorovodTrainError, LaunchError
from horovod_train.events.types import AllreduceTime
from horovod_train.launch.base import LaunchRequest, Submitted
from horovod_train.launch.doctor import AllreduceBenchmark, History, compare
from horovod_train.plugins.kubernetes.cluster import CUSTOM, GROUP, PLURAL, VERSION, Cluster
from horovod_train.plugins.kubernetes.launcher import MpiJobLauncher
from horovod_train.plugins.kubernetes.render import section, text, texts
from horovod_train.plugins.kubernetes.settings import KUEUE, NAME, Kubernetes, num_workers

PODS_TIMEOUT_S = 900.0
POLL_S = 2.0
NEEDED = (
    *((verb, GROUP, PLURAL) for verb in ("create", "get", "list", "patch", "delete")),
    *((verb, "", "configmaps") for verb in ("create", "get")),
    ("list", "", "pods"),
    ("get", "", "pods/log"),
    ("list", "", "events"),
)


def examine(
    request: LaunchRequest, *, is_job: bool, is_measured: bool, report: Callable[[str], None]
) -> tuple[list[Finding], AllreduceBenchmark]:
    """Examine the cluster, and from pods of the job if there is one, the network between them.

    Args:
        request: The job, or any job.
        is_job: Whether the user named the job; otherwise, only the cluster is examined.
        is_measured: Whether to start pods, and to measure.
        report: Receives lines of progress.
    """
    settings = request.job.launch.settings(Kubernetes)
    findings = list(examine_cluster(request.job if is_job else None, settings))
    if not is_job or not is_measured or prevents_jobs(findings):
        return findings, AllreduceBenchmark()
    found, measured = examine_pods(request, report)
    return [*findings, *found], measured


def examine_cluster(job: Job | None, settings: Kubernetes) -> Iterator[Finding]:
    """Yield findings from the API server, without creating objects.

    If ``job`` is None, check whether any job can run, by default in the namespace of kubectl's context.
    """
    try:
        is_chosen = job is not None or "namespace" in settings.model_fields_set
        namespace = settings.namespace if is_chosen else None
        with closing(Cluster(namespace, settings.api_timeout_s)) as cluster:
            yield Finding("", "api server", cluster.version())
            yield _operator(cluster)
            yield _permissions(cluster, settings)
            if not is_chosen and cluster.namespace != settings.namespace:
                yield Finding(
                    "",
                    "namespace",
                    f"kubectl's context has {cluster.namespace}, and jobs without "
                    f"launch.kubernetes.namespace go to {settings.namespace}",
                    "warn",
                    f"set launch.kubernetes.namespace: {cluster.namespace} in jobs",
                )
            if job is not None:
                yield from _job_requirements(cluster, job)
    except HorovodTrainError as error:
        yield Finding("", "api server", error.message, "fail", error.hint)


def _operator(cluster: Cluster) -> Finding:
    if cluster.serves(GROUP, VERSION):
        # Reading the state of the controller would require other permissions.
        found = f"{PLURAL}.{GROUP}/{VERSION} is installed; its controller is not checked"
        return Finding("", "mpi operator", found)
    fix = "install the MPI operator 0.8 or newer (github.com/kubeflow/mpi-operator)"
    return Finding("", "mpi operator", f"{PLURAL}.{GROUP}/{VERSION} is not known", "fail", fix)


def _permissions(cluster: Cluster, settings: Kubernetes) -> Finding:
    group, _, plural = CUSTOM["PodMonitor"]
    needed = [
        *NEEDED,
        *([("create", "networking.k8s.io", "networkpolicies")] if settings.network_policy else []),
        *([("create", group, plural)] if settings.pod_monitor else []),
    ]
    missing = [
        f"{verb} {what}" for verb, group, what in needed if not cluster.has_permission(verb, group, what)
    ]
    if not missing:
        return Finding("", "permissions", f"all {len(needed)} that are needed in {cluster.namespace}")
    fix = f"ask for a Role in {cluster.namespace} that allows it, or use another launch.kubernetes.namespace"
    return Finding("", "permissions", f"may not {', '.join(missing)}", "fail", fix)


def _job_requirements(cluster: Cluster, job: Job) -> Iterator[Finding]:
    kubernetes = job.launch.settings(Kubernetes)
    if kubernetes.cpus_per_rank is None and kubernetes.memory_per_rank is None:
        fix = "set launch.kubernetes.cpus_per_rank and memory_per_rank"
        yield Finding(
            "", "requests", "none: nodes with too little memory evict the workers first", "warn", fix
        )
    for volume in kubernetes.volumes:
        if volume.claim is not None:
            yield _checked("claim", volume.claim, partial(_claim, cluster, volume.claim))
    for source in sorted(set(job.launch.secrets.values())):
        name, _, key = source.partition(":")[2].partition("/")
        yield _checked("secret", source, partial(_secret, cluster, name, key))
    for name in kubernetes.image_pull_secrets:
        yield _checked("pull secret", name, partial(_pull_secret, cluster, name))
    if kubernetes.queue is not None:
        yield _checked("queue", kubernetes.queue, partial(_queue, cluster, kubernetes.queue))
    if kubernetes.pod_monitor:
        group, version, _ = CUSTOM["PodMonitor"]
        fix = "install Prometheus' operator, or set launch.kubernetes.pod_monitor: false"
        is_served = cluster.serves(group, version)
        found = "is known" if is_served else "is not known"
        yield Finding("", "pod monitor", f"{group}/{version} {found}", "ok" if is_served else "fail", fix)
    if kubernetes.gpus_per_rank:
        yield _checked("gpus", kubernetes.gpu_resource, partial(_gpus, cluster, job))


def _checked(what: str, name: str, look: Callable[[], Finding]) -> Finding:
    """Return the finding of a check, or a warning if it is not permitted: jobs may run nevertheless."""
    try:
        return look()
    except LaunchError as error:
        return Finding("", what, f"{name}: {error.message}", "warn", "use an account with this permission")


def _claim(cluster: Cluster, name: str) -> Finding:
    found = cluster.read("PersistentVolumeClaim", name)
    if found is None:
        fix = f"create a PersistentVolumeClaim {name} with accessModes: [ReadWriteMany]"
        return Finding("", "claim", f"there is no {name} in {cluster.namespace}", "fail", fix)
    modes = ", ".join(texts(found, "spec", "accessModes"))
    summary = f"{name}: {text(found, 'status', 'phase', default='unknown')}, {modes}"
    if "ReadWriteMany" in modes:
        return Finding("", "claim", summary)
    fix = "use a claim with ReadWriteMany: pods on several nodes write it"
    return Finding("", "claim", summary, "warn", fix)


def _secret(cluster: Cluster, name: str, key: str) -> Finding:
    fix = f"kubectl create secret generic {name} --from-file={key}"
    return _key_of_secret(cluster, "secret", name, key, fix)


def _pull_secret(cluster: Cluster, name: str) -> Finding:
    fix = f"kubectl create secret docker-registry {name} --docker-server=... --docker-username=..."
    return _key_of_secret(cluster, "pull secret", name, ".dockerconfigjson", fix)


def _key_of_secret(cluster: Cluster, what: str, name: str, key: str, fix: str) -> Finding:
    found = cluster.read("Secret", name)
    if found is not None and key in section(found, "data"):
        return Finding("", what, f"{name} has {key}")
    missing = f"there is no {name} in {cluster.namespace}" if found is None else f"{name} has no {key}"
    return Finding("", what, missing, "fail", fix)


def _queue(cluster: Cluster, name: str) -> Finding:
    version = cluster.preferred_version(KUEUE)
    if version is None:
        fix = "install Kueue, or leave launch.kubernetes.queue out"
        return Finding("", "queue", f"{name}: Kueue is not installed: {KUEUE} is not known", "fail", fix)
    if cluster.has_queue(name, version):
        return Finding("", "queue", name)
    missing = f"there is no {name} in {cluster.namespace}"
    return Finding("", "queue", missing, "fail", "`kubectl get localqueues`")


def _gpus(cluster: Cluster, job: Job) -> Finding:
    kubernetes = job.launch.settings(Kubernetes)
    counts = [int(text) for text in cluster.allocatable(kubernetes.gpu_resource)]
    wanted = kubernetes.gpus_per_rank * kubernetes.ranks_per_worker
    fitting = sum(count // wanted for count in counts)
    workers = num_workers(job)
    found = f"nodes have {sum(counts)} {kubernetes.gpu_resource}, room for {fitting} workers with {wanted}"
    if fitting >= workers:
        return Finding("", "gpus", found)
    fix = "add nodes, use fewer ranks or ranks_per_worker; an autoscaler may add nodes by itself"
    return Finding("", "gpus", f"{found}; {workers} are wanted", "warn", fix)


def examine_pods(
    request: LaunchRequest, report: Callable[[str], None]
) -> tuple[list[Finding], AllreduceBenchmark]:
    """Start pods of the job to examine themselves and their network, report their states, and remove them."""
    launcher = MpiJobLauncher()
    job = request.job
    kubernetes = job.launch.settings(Kubernetes).model_copy(update={"backoff_limit": 0, "suspend": False})
    launch = job.launch.model_copy(update={"kubernetes": kubernetes, "elastic": None})
    examined = job.model_copy(update={"name": f"{job.name[:40].rstrip('-')}-doctor", "launch": launch})
    asking = replace(request, job=examined)
    try:
        plan = launcher.plan(asking, ("doctor", "--json"))
        native_id = launcher.submit(asking, plan)
    except HorovodTrainError as error:
        return [Finding("", "mpi job", error.message, "fail", error.hint)], AllreduceBenchmark()
    submitted = Submitted(asking.job_id, NAME, native_id, asking.log_dir, 0.0)
    try:
        return _check_pods(launcher, submitted, job, report)
    finally:
        launcher.remove(submitted)


def _check_pods(
    launcher: MpiJobLauncher, submitted: Submitted, job: Job, report: Callable[[str], None]
) -> tuple[list[Finding], AllreduceBenchmark]:
    deadline_s, last_status = monotonic() + PODS_TIMEOUT_S, ""
    while not (status := launcher.status(submitted)).has_ended and monotonic() < deadline_s:
        if str(status) != last_status:
            report(f"{submitted.native_id}: {status}")
            last_status = str(status)
        sleep(POLL_S)
    fix = "submit the job itself, and look at its pods: `kubectl describe pods`"
    if not status.has_ended:
        found = f"after {PODS_TIMEOUT_S:g} s they are {status}"
        return [Finding("", "pods", found, "fail", fix)], AllreduceBenchmark()
    lines = list(launcher.logs(submitted, follow=False))
    document = _document("\n".join(lines))
    if document is None:
        last = "\n".join(lines[-5:])
        return [Finding("", "pods", f"{status}\n{last}", "fail", fix)], AllreduceBenchmark()
    findings = [Finding(**fields) for fields in document["findings"]]
    measured = AllreduceBenchmark([AllreduceTime(**row) for row in document["sweep"]])
    if measured.times:
        where = f"{job.launch.settings(Kubernetes).namespace}:{job.launch.num_ranks}"
        history = History(["kubernetes", where], job.launch.controller)
        findings += compare(measured.best("horovod"), history.read())
        history.add(measured)
    return findings, measured


def _document(log: str) -> dict[str, Any] | None:
    """Return the JSON report in the log of the launcher pod, which may start with other lines."""
    start = log.find('{\n  "findings"')
    if start < 0:
        return None
    found: dict[str, Any] = json.JSONDecoder().raw_decode(log[start:])[0]
    return found
