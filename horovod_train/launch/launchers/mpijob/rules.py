"""Rules for jobs that run as an MPIJob, checked before anything is sent to the API server.

The API server refuses some invalid values. The operator reports others only in an event, and ignores some
without a message (``docs/kubernetes.md`` lists them).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from horovod_train.config.fields import MAX_DNS_NAME
from horovod_train.errors import Problem
from horovod_train.launch.launchers.mpijob.settings import NAME, Kubernetes

if TYPE_CHECKING:
    from horovod_train.config.schema import Job

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
