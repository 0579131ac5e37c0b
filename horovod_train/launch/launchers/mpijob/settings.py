"""The section ``launch.kubernetes``. Rules that relate its fields are in ``rules.py``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from horovod_train.config.fields import DNS_NAME, MAX_DNS_NAME, Count, OneLine, Section

NAME = "mpijob"
"""Name of the launcher."""

DnsLabel = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
"""At most 63 lower-case letters, digits and dashes."""

DnsName = Annotated[str, StringConstraints(pattern=rf"^{DNS_NAME}$", max_length=MAX_DNS_NAME)]
"""DNS labels separated by dots; at most 253 characters."""

Quantity = Annotated[str, StringConstraints(pattern=r"^(\d+(\.\d+)?|\.\d+)(m|[kMGTPE]i?)?$")]
"""Quantity in the notation of Kubernetes: ``500m``, ``2``, ``1.5``, ``64Gi``."""

_KEY = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"


def _has_short_prefix(key: str) -> str:
    if len(key.rpartition("/")[0]) > MAX_DNS_NAME:
        raise ValueError(f"at most {MAX_DNS_NAME} characters may stand before the slash")
    return key


QualifiedName = Annotated[
    str, StringConstraints(pattern=rf"^({DNS_NAME}/)?{_KEY}$"), AfterValidator(_has_short_prefix)
]
"""Key of a label, such as ``topology.kubernetes.io/zone``."""


def _is_no_quota(resource: str) -> str:
    if resource.startswith("requests."):
        raise ValueError("requests. stands before resources in quotas only")
    return resource


ResourceName = Annotated[
    str,
    StringConstraints(pattern=rf"^{DNS_NAME}/{_KEY}$"),
    AfterValidator(_has_short_prefix),
    AfterValidator(_is_no_quota),
]
"""Resource name of a device plug-in, such as ``nvidia.com/gpu``."""

LabelValue = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")]
"""Value of a label."""

AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/[^\s:]*$")]
"""Absolute path in the container."""


class Toleration(Section):
    """Toleration of a node taint."""

    key: QualifiedName
    """Key of the taint."""

    value: LabelValue | None = None
    """Value of the taint; null: any."""

    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; null: any."""


class Volume(Section):
    """Volume that is mounted into every pod. Exactly one of claim, csi_driver and empty_dir must be set."""

    mount_path: AbsolutePath
    """Mount path."""

    claim: DnsName | None = None
    """PersistentVolumeClaim that all nodes can write (ReadWriteMany)."""

    csi_driver: Annotated[DnsName, StringConstraints(max_length=63)] | None = None
    """CSI driver that mounts an object store, such as gcsfuse.csi.storage.gke.io."""

    csi_attributes: dict[OneLine, OneLine] = {}
    """volumeAttributes of the driver, such as ``bucketName``."""

    empty_dir: bool = False
    """Scratch space of each pod."""

    read_only: bool = False
    """Mount read-only."""


class Kubernetes(Section):
    """MPIJob on Kubernetes (kubeflow.org/v2beta1, operator 0.8)."""

    namespace: DnsLabel = "default"
    """Namespace of all objects."""

    image: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][\w./:@-]*$")] | None = None
    """Image of launcher and workers; must contain ``docker/entrypoint``."""

    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """imagePullPolicy."""

    image_pull_secrets: list[DnsName] = []
    """Secrets for a private registry."""

    ranks_per_worker: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks per worker pod (slotsPerWorker)."""

    cpus_per_rank: Quantity | None = None
    """CPU request per rank."""

    memory_per_rank: Quantity | None = None
    """Memory request and limit per rank."""

    gpus_per_rank: Annotated[int, Field(ge=0, le=1)] = 0
    """GPUs per rank, 0 or 1."""

    gpu_resource: ResourceName = "nvidia.com/gpu"
    """Resource name of a GPU."""

    extra_resources: dict[ResourceName, Annotated[int, Field(ge=1, le=1024)]] = {}
    """Further devices of each worker, such as ``rdma/hca: 1``; an rdma/ device adds IPC_LOCK."""

    shm_size: Quantity = "1Gi"
    """Size of /dev/shm of each worker; it counts as memory."""

    host_network: bool = False
    """Let workers use the network of their nodes, for RDMA without a device plug-in."""

    ssh_port: Annotated[int, Field(ge=1024, le=65535)] = 2222
    """Port of sshd in the workers; above 1023, because sshd runs without privileges."""

    run_as_user: Annotated[int, Field(ge=1, le=2**31 - 1)] = 1000
    """User ID in the containers; the default is mpiuser of the image."""

    volumes: list[Volume] = []
    """Volumes of all pods; ``run_dir`` must be on a persistent one."""

    node_selector: dict[QualifiedName, LabelValue] = {}
    """nodeSelector of workers."""

    tolerations: list[Toleration] = []
    """Tolerations of workers."""

    spot: bool = False
    """Allow workers, but not the launcher, on spot nodes (AKS, EKS, GKE)."""

    topology_spread: QualifiedName | None = None
    """Node label over whose values workers are spread evenly, such as topology.kubernetes.io/zone."""

    priority_class: DnsName | None = None
    """PriorityClass of all pods."""

    queue: DnsLabel | None = None
    """LocalQueue of Kueue."""

    gang: Literal["none", "volcano", "scheduler-plugins"] = "none"
    """Gang scheduler configured in the operator: all workers start together, or none."""

    gang_queue: DnsName | None = None
    """Queue of the gang scheduler."""

    gang_timeout_s: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """scheduleTimeoutSeconds of the gang scheduler."""

    suspend: bool = False
    """Create the job without starting it."""

    managed_by: Literal["kubeflow.org/mpi-operator", "kueue.x-k8s.io/multikueue"] | None = None
    """managedBy: the controller that reconciles the job; null: the operator of this cluster."""

    launcher_creation: Literal["AtStartup", "WaitForWorkersReady"] = "WaitForWorkersReady"
    """launcherCreationPolicy."""

    clean_pods: Literal["None", "Running", "All"] = "Running"
    """cleanPodPolicy: which pods are deleted after completion. With None, workers keep their GPUs."""

    backoff_limit: Annotated[int, Field(ge=0, le=1000)] = 3
    """backoffLimit: maximum number of restarts of a failed launcher."""

    deadline_s: Count | None = None
    """activeDeadlineSeconds: maximum duration of the job, in seconds."""

    keep_finished_s: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = 7 * 86400
    """ttlSecondsAfterFinished: time after which the launcher and its log are deleted, in seconds; the next
    ``submit`` deletes the other objects. null: never."""

    network_policy: bool = True
    """Create a NetworkPolicy that allows only traffic from pods of this job, and scrapes of its metrics."""

    pod_monitor: bool = False
    """Create a PodMonitor, so that the Prometheus operator scrapes each rank."""

    scrape_annotations: bool = False
    """Annotate workers (prometheus.io/scrape) for Prometheus without its operator; one rank per worker."""

    labels: dict[QualifiedName, LabelValue] = {}
    """Further labels of the job and its pods."""

    annotations: dict[QualifiedName, OneLine] = {}
    """Further annotations of the pods."""

    patch: dict[str, object] = {}
    """Merge patch (RFC 7386) of the MPIJob for fields that are not listed here; the result is validated."""

    api_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Timeout of requests to the API server, in seconds."""
