"""Kubernetes manifests of a job; rendering has no side effects.

render          the manifests of a job
field, section  access to Kubernetes objects as plain data: a missing field is empty
merge           merge patches
as_yaml         objects as YAML
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from horovod_train.config.load import dump_job
from horovod_train.config.schema import Job
from horovod_train.launch.console import EVENTS_VARIABLE
from horovod_train.plugins.kubernetes.settings import (
    QUEUE_LABEL,
    Kubernetes,
    Volume,
    num_workers,
    workers_for,
)

Manifest = dict[str, object]
"""A Kubernetes object, as parsed from YAML or JSON."""


def field(document: object, *path: str) -> object:
    """Return the value at a path of keys; None: it does not exist."""
    for name in path:
        if not isinstance(document, Mapping):
            return None
        document = document.get(name)
    return document


def section(document: object, *path: str) -> Mapping[str, object]:
    """Return the mapping at a path of keys; empty: there is none.

    >>> section({"spec": {"runPolicy": {"suspend": True}}}, "spec", "runPolicy")
    {'suspend': True}
    """
    found = field(document, *path)
    return found if isinstance(found, Mapping) else {}


def sections(document: object, *path: str) -> list[Mapping[str, object]]:
    """Return the mappings in the list at a path of keys; empty: there is no list."""
    found = field(document, *path)
    return [part for part in found if isinstance(part, Mapping)] if isinstance(found, list) else []


def text(document: object, *path: str, default: str = "") -> str:
    """Return the value at a path of keys as a string; the default, if it does not exist."""
    found = field(document, *path)
    return default if found is None else str(found)


def texts(document: object, *path: str) -> list[str]:
    """Return the values in the list at a path of keys as strings; empty: there is no list."""
    found = field(document, *path)
    return [str(each) for each in found] if isinstance(found, list) else []


def number(document: object, *path: str, default: int) -> int:
    """Return the integer at a path of keys; the default, if there is none."""
    found = field(document, *path)
    return found if isinstance(found, int) else default


def merge(target: object, patch: Mapping[str, object]) -> Manifest:
    """Return a document with a merge patch applied (RFC 7386): null removes a key, mappings merge."""
    merged: Manifest = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value) if isinstance(value, Mapping) else value
    return merged


class _PlainYaml(yaml.SafeDumper):
    """YAML dumper that writes no aliases, and strings of several lines as blocks."""

    def ignore_aliases(self, data: object) -> bool:
        """Return True, so that repeated objects are written in full."""
        return True


_PlainYaml.add_representer(
    str,
    lambda dumper, value: dumper.represent_scalar(
        "tag:yaml.org,2002:str", value, style="|" if "\n" in value else None
    ),
)


def as_yaml(manifests: list[Manifest]) -> str:
    """Return objects as the documents of one YAML file."""
    return yaml.dump_all(manifests, Dumper=_PlainYaml, sort_keys=False, explicit_start=True)


API_VERSION = "kubeflow.org/v2beta1"
JOB_FOLDER = "/etc/horovod_train"
HOME = "/home/mpiuser"
ENTRYPOINT = "/usr/local/bin/horovod-train-entrypoint"
# Script that the operator writes for elastic jobs; it prints the workers whose pods run.
DISCOVER = "sh /etc/mpi/discover_hosts.sh"
MANAGED_BY, MANAGER = "app.kubernetes.io/managed-by", "horovod-train"
# Annotation of an MPIJob that was suspended so that its ranks save and exit.
DRAINED = "horovod-train/drained"
# Annotation of a cancelled MPIJob, which is deleted when its ranks have exited.
CANCELLED = "horovod-train/cancelled"
JOB_NAME_LABEL = "training.kubeflow.org/job-name"
ROLE_LABEL = "training.kubeflow.org/job-role"
REPLICA_LABEL = "training.kubeflow.org/replica-index"
SPOT_TAINTS = {
    "cloud.google.com/gke-spot": "true",
    "eks.amazonaws.com/capacityType": "SPOT",
    "kubernetes.azure.com/scalesetpriority": "spot",
}
# Added to the grace period of ranks, for sshd and the containers.
EXTRA_GRACE_S = 15


def render(job: Job, run_id: str, task_source: str = "", verb: tuple[str, ...] = ("run",)) -> list[Manifest]:
    """Return the manifests of a job.

        ConfigMap <job>-job         the resolved job, and the task's file
        MPIJob <job>                launcher and workers from one image
        NetworkPolicy <job>         permitted connections to its pods
        PodMonitor <job>            ports that Prometheus scrapes

    ``docs/kubernetes.md`` contains the reasons for the values.

    Args:
        job: Resolved job for the launcher mpijob; it must satisfy the rules for Kubernetes.
        run_id: Name of the run.
        task_source: Content of the task's file, if the image does not contain it.
        verb: Subcommand of ``horovod-train`` that the launcher pod runs, with options.
    """
    kubernetes = job.launch.settings(Kubernetes)
    manifests = [config_map(job, task_source), mpi_job(job, run_id, verb)]
    if kubernetes.network_policy:
        manifests.append(network_policy(job))
    if kubernetes.pod_monitor and job.metrics.enabled:
        manifests.append(pod_monitor(job))
    return manifests


def inner_job(job: Job, *, has_source: bool) -> Job:
    """Return the job that the launcher pod runs: over ssh, on the hosts that the operator lists."""
    launch = job.launch.model_copy(
        update={
            "launcher": "horovodrun",
            # The launcher pod has them in its environment, and passes them to the ranks.
            "secrets": {name: f"env:{name}" for name in job.launch.secrets},
            "kubernetes": Kubernetes(),
            # The CPU request of a rank, because a pod without a CPU limit sees all cores of its node.
            "threads_per_rank": job.launch.threads_per_rank
            or _threads(job.launch.settings(Kubernetes).cpus_per_rank),
            "ssh": job.launch.ssh.model_copy(update={"port": job.launch.settings(Kubernetes).ssh_port}),
        }
    )
    if job.launch.elastic is not None:
        elastic = {"discover": DISCOVER, "ranks_per_host": job.launch.settings(Kubernetes).ranks_per_worker}
        launch = launch.model_copy(update={"elastic": job.launch.elastic.model_copy(update=elastic)})
    changes: dict[str, object] = {"launch": launch}
    if has_source:
        file, _, attribute = job.task.rpartition(":")
        changes["task"] = f"{JOB_FOLDER}/{Path(file).name}:{attribute}"
    if "host" not in job.metrics.model_fields_set:
        # Without host_network, a pod has its own network, and the NetworkPolicy restricts connections.
        changes["metrics"] = job.metrics.model_copy(update={"host": "0.0.0.0"})  # noqa: S104
    return job.model_copy(update=changes)


def config_map(job: Job, task_source: str) -> Manifest:
    """Return the ConfigMap, which is mounted at ``JOB_FOLDER``."""
    data = {"job.json": dump_job(inner_job(job, has_source=bool(task_source)))}
    if task_source:
        data[Path(job.task.rpartition(":")[0]).name] = task_source
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, f"{job.name}-job"),
        "data": data,
    }


def mpi_job(job: Job, run_id: str, verb: tuple[str, ...]) -> Manifest:
    """Return the MPIJob, with the user's patch applied."""
    kubernetes = job.launch.settings(Kubernetes)
    spec: Manifest = {
        "slotsPerWorker": kubernetes.ranks_per_worker,
        "runLauncherAsWorker": False,
        "sshAuthMountPath": f"{HOME}/.ssh",
        "launcherCreationPolicy": _launcher_creation(job),
        "mpiImplementation": "OpenMPI",
        "runPolicy": _run_policy(job),
        "mpiReplicaSpecs": {
            # Never: with OnFailure, the last launcher and its log would be deleted.
            "Launcher": {"replicas": 1, "restartPolicy": "Never", "template": _launcher(job, run_id, verb)},
            # OnFailure: a worker whose sshd has exited is restarted.
            "Worker": {
                "replicas": num_workers(job),
                "restartPolicy": "OnFailure",
                "template": _worker(job),
            },
        },
    }
    manifest = {
        "apiVersion": API_VERSION,
        "kind": "MPIJob",
        "metadata": _metadata(job, job.name),
        "spec": spec,
    }
    return merge(manifest, kubernetes.patch)


def _gang_size(job: Job) -> int:
    elastic = job.launch.elastic
    workers = num_workers(job) if elastic is None else workers_for(job, elastic.min_ranks)
    return workers + (_launcher_creation(job) == "AtStartup")


def _launcher_creation(job: Job) -> str:
    kubernetes = job.launch.settings(Kubernetes)
    if job.launch.elastic is not None and "launcher_creation" not in kubernetes.model_fields_set:
        return "AtStartup"  # it waits for workers on its own, and not for all of them
    return kubernetes.launcher_creation


def _run_policy(job: Job) -> Manifest:
    kubernetes = job.launch.settings(Kubernetes)
    policy: Manifest = {
        "cleanPodPolicy": kubernetes.clean_pods,
        "backoffLimit": kubernetes.backoff_limit,
        "suspend": kubernetes.suspend,
        **_given(
            activeDeadlineSeconds=kubernetes.deadline_s,
            ttlSecondsAfterFinished=kubernetes.keep_finished_s,
            managedBy=kubernetes.managed_by,
        ),
    }
    if kubernetes.gang != "none":
        policy["schedulingPolicy"] = {
            # The default, workers + 1, deadlocks if the launcher is created after the workers are ready.
            "minAvailable": _gang_size(job),
            **_given(
                queue=kubernetes.gang_queue,
                priorityClass=kubernetes.priority_class,
                scheduleTimeoutSeconds=kubernetes.gang_timeout_s,
            ),
        }
    return policy


def _launcher(job: Job, run_id: str, verb: tuple[str, ...]) -> Manifest:
    run = ["horovod-train", *verb, f"{JOB_FOLDER}/job.json", "--resolved", "--run-id", run_id]
    if job.launch.elastic is None:
        hosts = ["--hostfile", "/etc/mpi/hostfile", "-n", str(job.launch.num_ranks or 1)]
        command = [ENTRYPOINT, "launcher", *run, *hosts]
    else:
        # The launcher reads the list of workers repeatedly.
        command = [ENTRYPOINT, *run]
    container = {
        "name": "launcher",
        **_image(job),
        "command": command,
        # Output is all that a client can read when the pods have ended.
        "env": [{"name": EVENTS_VARIABLE, "value": "1"}, *_secrets(job)],
        "resources": {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
        "securityContext": _container_security(job, is_worker=False),
        "volumeMounts": _mounts(job),
    }
    return _pod(job, container, _volumes(job), is_launcher=True)


def _worker(job: Job) -> Manifest:
    kubernetes = job.launch.settings(Kubernetes)
    ports = [{"name": "ssh", "containerPort": kubernetes.ssh_port}]
    if job.metrics.enabled:
        ports += [
            {"name": f"metrics-{local_rank}", "containerPort": job.metrics.port + local_rank}
            for local_rank in range(kubernetes.ranks_per_worker)
        ]
    container = {
        "name": "worker",
        **_image(job),
        "command": [ENTRYPOINT, "worker"],
        "env": [{"name": "SSHD_PORT", "value": str(kubernetes.ssh_port)}],
        "ports": ports,
        # Without a probe, a worker is ready before its sshd listens, and the launcher starts too early.
        "readinessProbe": {
            "tcpSocket": {"port": kubernetes.ssh_port},
            "periodSeconds": 2,
            "failureThreshold": 30,
        },
        "resources": _resources(job),
        "securityContext": _container_security(job, is_worker=True),
        "volumeMounts": [*_mounts(job), {"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108
    }
    shm: Manifest = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": kubernetes.shm_size}}
    return _pod(job, container, [*_volumes(job), shm], is_launcher=False)


def _pod(job: Job, container: Manifest, volumes: list[Manifest], *, is_launcher: bool) -> Manifest:
    kubernetes = job.launch.settings(Kubernetes)
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": round(job.launch.grace_s) + EXTRA_GRACE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": kubernetes.run_as_user,
            "runAsGroup": kubernetes.run_as_user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
        **_given(priorityClassName=kubernetes.priority_class),
    }
    if kubernetes.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in kubernetes.image_pull_secrets]
    if not is_launcher:
        spec |= _placement(job)
    scraped = {} if is_launcher else _scrape_annotations(job)
    annotations = {"sidecar.istio.io/inject": "false", **scraped, **kubernetes.annotations}
    metadata: Manifest = {"annotations": annotations}
    if labels := _labels(job):
        metadata["labels"] = labels
    return {"metadata": metadata, "spec": spec}


def _scrape_annotations(job: Job) -> dict[str, str]:
    """Return annotations for a Prometheus that discovers pods by ``prometheus.io/...`` annotations."""
    if not (job.launch.settings(Kubernetes).scrape_annotations and job.metrics.enabled):
        return {}
    scheme = "http" if job.metrics.tls is None else "https"
    found = {"scrape": "true", "port": str(job.metrics.port), "path": "/metrics", "scheme": scheme}
    return {f"prometheus.io/{name}": value for name, value in found.items()}


def _placement(job: Job) -> Manifest:
    """Return the placement of workers. The launcher tolerates no spot taint: its loss stops all ranks."""
    kubernetes = job.launch.settings(Kubernetes)
    placement: Manifest = {}
    tolerations = [
        {
            "key": toleration.key,
            "operator": "Exists" if toleration.value is None else "Equal",
            **_given(value=toleration.value, effect=toleration.effect),
        }
        for toleration in kubernetes.tolerations
    ]
    if kubernetes.spot:
        tolerations += [
            {"key": key, "operator": "Equal", "value": value} for key, value in SPOT_TAINTS.items()
        ]
    if tolerations:
        placement["tolerations"] = tolerations
    if kubernetes.node_selector:
        placement["nodeSelector"] = dict(kubernetes.node_selector)
    if kubernetes.topology_spread is not None:
        placement["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": kubernetes.topology_spread,
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {JOB_NAME_LABEL: job.name, ROLE_LABEL: "worker"}},
            }
        ]
    if kubernetes.host_network:
        placement |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return placement


def _resources(job: Job) -> Manifest:
    kubernetes = job.launch.settings(Kubernetes)
    ranks = kubernetes.ranks_per_worker
    requests: Manifest = {}
    limits: Manifest = {}
    if kubernetes.cpus_per_rank is not None:
        requests["cpu"] = times(kubernetes.cpus_per_rank, ranks)
    if kubernetes.memory_per_rank is not None:
        requests["memory"] = limits["memory"] = times(kubernetes.memory_per_rank, ranks)
    if kubernetes.gpus_per_rank:
        limits[kubernetes.gpu_resource] = str(kubernetes.gpus_per_rank * ranks)
    limits |= {name: str(count) for name, count in kubernetes.extra_resources.items()}
    return {name: value for name, value in (("requests", requests), ("limits", limits)) if value}


def _threads(cpus: str | None) -> int | None:
    """Return the number of threads for a CPU quantity; None: there is no quantity.

    >>> _threads("4"), _threads("2500m"), _threads("500m"), _threads(None)
    (4, 2, 1, None)
    """
    if cpus is None:
        return None
    return max(1, int(float(cpus.rstrip("m")) / (1000 if cpus.endswith("m") else 1)))


def times(quantity: str, factor: int) -> str:
    """Return a multiple of a quantity.

    >>> times("1500m", 2), times("2.5Gi", 4), times("2", 3)
    ('3000m', '10Gi', '6')
    """
    number = quantity.rstrip("mkMGTPEi")
    return f"{float(number) * factor:g}{quantity[len(number) :]}"


def _container_security(job: Job, *, is_worker: bool) -> Manifest:
    capabilities: Manifest = {"drop": ["ALL"]}
    if is_worker and any(
        name.startswith("rdma/") for name in job.launch.settings(Kubernetes).extra_resources
    ):
        capabilities["add"] = ["IPC_LOCK"]
    return {"allowPrivilegeEscalation": False, "capabilities": capabilities}


def _image(job: Job) -> Manifest:
    kubernetes = job.launch.settings(Kubernetes)
    return {"image": kubernetes.image, "imagePullPolicy": kubernetes.image_pull_policy}


def _secrets(job: Job) -> list[Manifest]:
    """Return the launcher's environment variables with values from Secrets."""
    secret: list[Manifest] = []
    for name, source in sorted(job.launch.secrets.items()):
        holder, _, key = source.partition(":")[2].partition("/")
        secret.append({"name": name, "valueFrom": {"secretKeyRef": {"name": holder, "key": key}}})
    return secret


def _mounts(job: Job) -> list[Manifest]:
    own = [{"name": "job", "mountPath": JOB_FOLDER, "readOnly": True}]
    return own + [
        {
            "name": f"volume-{number}",
            "mountPath": volume.mount_path,
            **({"readOnly": True} if volume.read_only else {}),
        }
        for number, volume in enumerate(job.launch.settings(Kubernetes).volumes)
    ]


def _volumes(job: Job) -> list[Manifest]:
    own: list[Manifest] = [{"name": "job", "configMap": {"name": f"{job.name}-job"}}]
    return own + [
        {"name": f"volume-{number}", **_source(volume)}
        for number, volume in enumerate(job.launch.settings(Kubernetes).volumes)
    ]


def _source(volume: Volume) -> Manifest:
    if volume.claim is not None:
        return {"persistentVolumeClaim": {"claimName": volume.claim}}
    if volume.csi_driver is not None:
        attributes = {"volumeAttributes": dict(volume.csi_attributes)} if volume.csi_attributes else {}
        return {"csi": {"driver": volume.csi_driver, **attributes}}
    return {"emptyDir": {}}


def network_policy(job: Job) -> Manifest:
    """Return the NetworkPolicy of the pods.

    Pods of the job accept each other on every port, because MPI, Gloo and NCCL choose ports. Pods of all
    namespaces may connect to the metrics ports.
    """
    mine = {"podSelector": {"matchLabels": {JOB_NAME_LABEL: job.name}}}
    ingress: list[Manifest] = [{"from": [mine]}]
    if job.metrics.enabled:
        last = job.metrics.port + job.launch.settings(Kubernetes).ranks_per_worker - 1
        ingress.append(
            {
                "from": [{"namespaceSelector": {}}],
                "ports": [{"protocol": "TCP", "port": job.metrics.port, "endPort": last}],
            }
        )
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(job, job.name),
        "spec": {"podSelector": mine["podSelector"], "policyTypes": ["Ingress"], "ingress": ingress},
    }


def pod_monitor(job: Job) -> Manifest:
    """Return the PodMonitor, with a named port of the workers for each local rank."""
    relabelings = [
        {
            "sourceLabels": [f"__meta_kubernetes_pod_label_{_as_prometheus(REPLICA_LABEL)}"],
            "targetLabel": "worker",
        }
    ]
    endpoints = [
        {"port": f"metrics-{local_rank}", "interval": "15s", "relabelings": relabelings}
        for local_rank in range(job.launch.settings(Kubernetes).ranks_per_worker)
    ]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": _metadata(job, job.name),
        "spec": {
            "selector": {"matchLabels": {JOB_NAME_LABEL: job.name, ROLE_LABEL: "worker"}},
            "podMetricsEndpoints": endpoints,
        },
    }


def _as_prometheus(label: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in label)


def _metadata(job: Job, name: str) -> Manifest:
    kubernetes = job.launch.settings(Kubernetes)
    labels = {MANAGED_BY: MANAGER, **_labels(job)}
    if kubernetes.queue is not None:
        labels[QUEUE_LABEL] = kubernetes.queue
    return {"name": name, "namespace": kubernetes.namespace, "labels": labels}


def _labels(job: Job) -> dict[str, str]:
    return dict(job.launch.settings(Kubernetes).labels)


def _given(**fields: object) -> Manifest:
    return {name: value for name, value in fields.items() if value is not None}
