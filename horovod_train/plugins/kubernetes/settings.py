"""The section ``launch.kubernetes``, and the rules that relate its fields.

    Kubernetes         the section
    kubernetes_rules   rules for jobs that run as an MPIJob, checked before the API server receives it

The API server refuses some invalid values. The operator reports others only in an event, and ignores some
without a message (``docs/kubernetes.md`` lists them).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from horovod_train.config.fields import DNS_NAME, MAX_DNS_NAME, Count, OneLine, Section
from horovod_train.errors import Problem

if TYPE_CHECKING:
    from horovod_train.config.schema import Job


NAME = "mpijob"
"""Name of the launcher."""

KUEUE = "kueue.x-k8s.io"
"""API group of Kueue."""

QUEUE_LABEL = f"{KUEUE}/queue-name"
"""Label of an MPIJob that Kueue manages."""

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
    """Let workers, but not the launcher, tolerate the spot taints of AKS, EKS and GKE. Nodes without the
    taint take both."""

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


MAX_NAME = 63
MAX_CONFIG_BYTES = 900_000
# The API server allows 256 KiB, and this package adds its own annotations.
MAX_ANNOTATIONS_BYTES = 250_000
# Paths that the operator and the image use.
OWN_PATHS = ("/etc/mpi", "/etc/horovod_train", "/home/mpiuser", "/dev/shm", "/tmp")  # noqa: S108
OWN_VARIABLES = re.compile(r"OMPI_MCA_(orte|plm)_\w*|PRTE_\w*|K_MPI_JOB_ROLE|NVIDIA_VISIBLE_DEVICES")
OWN_LABELS = "training.kubeflow.org/"
LOOPBACK = ("127.", "localhost", "::1")
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def num_workers(job: Job) -> int:
    """Return the number of worker pods with which a job starts."""
    return workers_for(job, job.launch.num_ranks or job.launch.most_ranks)


def workers_for(job: Job, num_ranks: int) -> int:
    """Return the number of worker pods for a number of ranks."""
    return -(-num_ranks // job.launch.settings(Kubernetes).ranks_per_worker)


def kubernetes_rules(job: Job) -> Iterator[Problem]:
    """Yield the problems that prevent a job from running as an MPIJob; none for other launchers."""
    if job.launch.launcher != NAME:
        return
    yield from name_problems("name", job.name, workers_for(job, job.launch.most_ranks))
    yield from _ranks(job)
    yield from _metrics(job)
    yield from _image(job)
    yield from _volumes(job)
    yield from _environment(job)
    yield from _scheduling(job)
    yield from _labels(job)


def name_problems(field: str, name: str, num_workers: int) -> Iterator[Problem]:
    """Yield the problems of an MPIJob name, from which the operator derives names of ``num_workers`` pods."""
    if not _DNS_1035.fullmatch(name):
        yield Problem(
            field,
            repr(name),
            "must begin with a lower-case letter, and have only lower-case letters, digits and dashes: pods "
            "are named after it",
            "such as my-job-1",
        )
    longest = f"{name}-worker-{num_workers - 1}"
    if len(longest) > MAX_NAME:
        yield Problem(
            field,
            repr(name),
            f"is too long: the pod {longest} would have {len(longest)} characters, {MAX_NAME} are allowed",
            f"use at most {MAX_NAME - len(longest) + len(name)} characters",
        )


def _ranks(job: Job) -> Iterator[Problem]:
    launch, kubernetes = job.launch, job.launch.settings(Kubernetes)
    if launch.hosts:
        yield Problem("launch.hosts", str(launch.hosts), "has no meaning for an MPIJob: pods are its hosts")
    numbers = {"launch.num_ranks": launch.num_ranks or launch.most_ranks}
    if launch.elastic is not None:
        if launch.num_ranks:
            numbers["launch.elastic.max_ranks"] = launch.elastic.max_ranks or 0
        if launch.elastic.discover is not None:
            yield Problem(
                "launch.elastic.discover",
                repr(launch.elastic.discover),
                "has no effect for an MPIJob: the operator determines the pods",
            )
    for field, number in numbers.items():
        if number % kubernetes.ranks_per_worker:
            yield Problem(
                field,
                str(number),
                f"must be a multiple of launch.kubernetes.ranks_per_worker = {kubernetes.ranks_per_worker}",
            )
    if kubernetes.host_network and kubernetes.ssh_port == 2222:
        yield Problem(
            "launch.kubernetes.ssh_port",
            "2222",
            "with host_network, two jobs on a node would want the same port",
            "choose one that no other job uses",
        )
    last_port = job.metrics.port + kubernetes.ranks_per_worker - 1
    if job.metrics.enabled and job.metrics.port <= kubernetes.ssh_port <= last_port:
        yield Problem(
            "metrics.port",
            str(job.metrics.port),
            f"sshd listens on {kubernetes.ssh_port}, one of these ports",
        )


def _metrics(job: Job) -> Iterator[Problem]:
    kubernetes = job.launch.settings(Kubernetes)
    if kubernetes.scrape_annotations and kubernetes.ranks_per_worker > 1:
        yield Problem(
            "launch.kubernetes.scrape_annotations",
            "true",
            f"names one port, and workers have {kubernetes.ranks_per_worker} ranks with a port each",
            "scrape ports by their names, as docs/monitoring.md shows, or set pod_monitor: true",
        )
    if not kubernetes.pod_monitor:
        return
    for field in ("tls", "basic_auth"):
        if getattr(job.metrics, field) is not None:
            message = "is not supported with launch.kubernetes.pod_monitor: true, which supports neither"
            yield Problem(f"metrics.{field}", "", message, "write a PodMonitor of your own for such jobs")
    if not job.metrics.enabled:
        yield Problem(
            "launch.kubernetes.pod_monitor", "true", "has nothing to scrape: metrics.enabled is false"
        )
    elif "host" in job.metrics.model_fields_set and job.metrics.host.startswith(LOOPBACK):
        yield Problem(
            "metrics.host",
            repr(job.metrics.host),
            "cannot be reached from other pods, so Prometheus would find nothing where "
            "launch.kubernetes.pod_monitor: true sends it",
            "leave it out: ranks in pods listen on all addresses, and a NetworkPolicy says who may come in",
        )


def _image(job: Job) -> Iterator[Problem]:
    image = job.launch.settings(Kubernetes).image
    if image is None:
        yield Problem(
            "launch.kubernetes.image",
            "null",
            "is needed: what the pods run",
            "build one with docker/Dockerfile, and push it to a registry that the cluster can read",
        )
    elif image.endswith(":latest") or (":" not in image.rpartition("/")[2] and "@" not in image):
        yield Problem(
            "launch.kubernetes.image",
            repr(image),
            "has no version: workers that are started later could get another image",
            "add a tag other than latest, or a digest",
        )


def _volumes(job: Job) -> Iterator[Problem]:
    volumes = job.launch.settings(Kubernetes).volumes
    for number, volume in enumerate(volumes):
        path = f"launch.kubernetes.volumes.{number}"
        kinds = [name for name in ("claim", "csi_driver") if getattr(volume, name) is not None]
        kinds += ["empty_dir"] if volume.empty_dir else []
        if len(kinds) != 1:
            found = " and ".join(kinds) or "none of them"
            yield Problem(path, found, "must have exactly one of claim, csi_driver and empty_dir")
        if any(_is_below(volume.mount_path, own) for own in OWN_PATHS):
            yield Problem(
                f"{path}.mount_path",
                repr(volume.mount_path),
                f"is one of {', '.join(OWN_PATHS)}, or below it",
            )
        if [other.mount_path for other in volumes].count(volume.mount_path) > 1:
            yield Problem(f"{path}.mount_path", repr(volume.mount_path), "is mounted twice")
    lasting = [v.mount_path for v in volumes if not v.empty_dir and not v.read_only]
    where = {"run_dir": job.run_dir, "checkpoint.dir": job.checkpoint.dir}
    for field, folder in where.items():
        if folder is not None and not any(_is_below(folder, path) for path in lasting):
            yield Problem(
                field,
                repr(folder),
                "would be lost with the pods: it is not on a persistent, writable volume",
                "mount a claim (launch.kubernetes.volumes), and use a folder below its mount_path",
            )


def _is_below(path: str, folder: str) -> bool:
    return PurePosixPath(path).is_relative_to(folder)


def _environment(job: Job) -> Iterator[Problem]:
    for section, names in (("env", job.launch.env), ("secrets", job.launch.secrets)):
        for name in names:
            if OWN_VARIABLES.fullmatch(name):
                yield Problem(f"launch.{section}.{name}", "", "is set by the operator")
    for name, source in job.launch.secrets.items():
        if not source.startswith("kubernetes:"):
            yield Problem(
                f"launch.secrets.{name}",
                repr(source),
                "cannot be read by pods",
                "put it into a Secret (kubectl create secret generic), and write kubernetes:NAME/KEY",
            )
        elif len(source.removeprefix("kubernetes:").partition("/")[0]) > MAX_DNS_NAME:
            yield Problem(
                f"launch.secrets.{name}", "", f"a Secret's name has at most {MAX_DNS_NAME} characters"
            )


def _scheduling(job: Job) -> Iterator[Problem]:
    kubernetes = job.launch.settings(Kubernetes)
    if kubernetes.gang == "none":
        for field in ("gang_queue", "gang_timeout_s"):
            if getattr(kubernetes, field) is not None:
                yield Problem(
                    f"launch.kubernetes.{field}",
                    repr(getattr(kubernetes, field)),
                    "has no effect with gang: none",
                    "set launch.kubernetes.gang",
                )
    if kubernetes.queue is not None and kubernetes.gang != "none":
        yield Problem(
            "launch.kubernetes.queue",
            repr(kubernetes.queue),
            "cannot be combined with launch.kubernetes.gang: both admit the job",
            "use one",
        )
    grace_s = job.launch.grace_s
    if kubernetes.deadline_s is not None and kubernetes.deadline_s <= grace_s:
        yield Problem(
            "launch.kubernetes.deadline_s",
            str(kubernetes.deadline_s),
            f"leaves no time in addition to grace_s = {grace_s:g}",
        )


def _labels(job: Job) -> Iterator[Problem]:
    for field in ("labels", "annotations"):
        for key in getattr(job.launch.settings(Kubernetes), field):
            if key.startswith(OWN_LABELS):
                yield Problem(f"launch.kubernetes.{field}.{key}", "", f"{OWN_LABELS} belongs to the operator")
    annotations = job.launch.settings(Kubernetes).annotations
    size_bytes = sum(len(text.encode()) for pair in annotations.items() for text in pair)
    if size_bytes > MAX_ANNOTATIONS_BYTES:
        yield Problem(
            "launch.kubernetes.annotations",
            f"{size_bytes} bytes",
            f"must have at most {MAX_ANNOTATIONS_BYTES} together",
            "put long texts into the image, or on a volume",
        )
