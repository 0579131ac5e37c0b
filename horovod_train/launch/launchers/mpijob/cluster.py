"""Client of the Kubernetes API; no other file sends requests to it.

The official Python client sends the requests. Its configuration is that of kubectl: KUBECONFIG or
``~/.kube/config`` with its current context, or the service account of the pod that contains this process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from horovod_train.errors import LaunchError, UnansweredError, UserError
from horovod_train.launch.launchers.mpijob.document import Manifest, field, text
from horovod_train.system.optional import import_optional

if TYPE_CHECKING:
    from kubernetes.client import ApiException, CoreV1Event, V1ContainerState, V1Pod

Result = TypeVar("Result")
GROUP, VERSION, PLURAL = "kubeflow.org", "v2beta1", "mpijobs"
# Kinds without a class in the client: kind -> group, version, plural.
CUSTOM = {
    "MPIJob": (GROUP, VERSION, PLURAL),
    "PodMonitor": ("monitoring.coreos.com", "v1", "podmonitors"),
}
# Hint for a kind that the API server does not serve.
INSTALL = {
    "MPIJob": "is the MPI operator installed in this cluster? `kubectl get crd mpijobs.kubeflow.org`",
    "PodMonitor": "install Prometheus' operator, or set launch.kubernetes.pod_monitor: false",
}
KUEUE = "kueue.x-k8s.io"
BEGINNING = "1970-01-01T00:00:00Z"
# Transient HTTP errors: too many requests, API server starting, kubelet unreachable, etcd slow.
PASSING = {429, 500, 502, 503, 504}
# File that contains the namespace of the pod in which this process runs.
OF_THIS_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def _time_of(event: CoreV1Event) -> datetime:
    """Return the time at which an event last occurred."""
    found: datetime | None = event.last_timestamp or event.event_time or event.metadata.creation_timestamp
    return found or datetime.now(UTC)


@dataclass(frozen=True)
class Container:
    """State of a container: reason and message while it waits to start, exit code and time of its end."""

    waiting: tuple[str, str] | None = None
    exit_code: int | None = None
    finished: datetime | None = None


@dataclass(frozen=True)
class Pod:
    """State of a pod; ``containers`` are those whose state the kubelet has reported."""

    name: str
    phase: str
    labels: Mapping[str, str]
    created: datetime
    containers: Sequence[Container] = ()

    @property
    def has_ended(self) -> bool:
        """Whether the pod has terminated; the object may still exist."""
        return self.phase in ("Succeeded", "Failed")


def _pod_of(found: V1Pod) -> Pod:
    meta, status = found.metadata, found.status
    # The API server always sets these; the client's types declare them optional, for requests.
    assert meta is not None
    assert status is not None
    assert meta.name is not None
    assert meta.creation_timestamp is not None
    return Pod(
        meta.name,
        status.phase or "Pending",
        meta.labels or {},
        meta.creation_timestamp,
        [_container_of(each.state) for each in status.container_statuses or [] if each.state],
    )


def _container_of(state: V1ContainerState) -> Container:
    waiting, ended = state.waiting, state.terminated
    return Container(
        (str(waiting.reason), waiting.message) if waiting is not None and waiting.message else None,
        None if ended is None else ended.exit_code,
        None if ended is None else ended.finished_at,
    )


class LogInterruptedError(LaunchError):
    """The connection broke during a response; a retry may succeed."""


class ExistsError(LaunchError):
    """An object of this kind and name exists."""


class ForbiddenError(LaunchError):
    """A missing permission; also the answer of an API server that has just started and knows no Roles yet."""


class UnreachableError(UnansweredError):
    """The API server, or a kubelet, does not respond at present; a later retry may succeed."""


def _namespace_of_context(config: ModuleType) -> str:
    """Return the namespace of kubectl's current context; else that of this pod, else ``default``."""
    try:
        _, active = config.list_kube_config_contexts()
    except config.ConfigException:
        return OF_THIS_POD.read_text(encoding="utf-8").strip() if OF_THIS_POD.exists() else "default"
    return str(active["context"].get("namespace") or "default")


class Cluster:
    """Client for one namespace of a cluster.

    Every request raises ``UnreachableError`` if the server does not respond, and ``LaunchError`` with the
    server's message if the server rejects it, for example because of missing permissions.

    Args:
        namespace: Its name; None: that of kubectl's current context, or of this pod.
        timeout_s: Timeout of a request, in seconds.

    Raises:
        UserError: The client is not installed, or not configured.
    """

    def __init__(self, namespace: str | None, timeout_s: float) -> None:
        api = import_optional(
            "kubernetes", needed_by="launcher mpijob", hint="pip install 'horovod_train[kubernetes]'"
        )
        self._http_error: type[Exception] = import_module("urllib3.exceptions").HTTPError
        client = api.client
        try:
            api.config.load_config()
        except api.config.ConfigException as error:
            raise UserError(
                f"no Kubernetes cluster is configured: {error}", hint="set KUBECONFIG; `kubectl cluster-info`"
            ) from error
        self.namespace = namespace or _namespace_of_context(api.config)
        self._timeout_s = timeout_s
        self._api_error = client.ApiException
        settings = client.Configuration.get_default_copy()
        settings.retries = False  # callers retry, with a message; urllib3 would wait three timeouts silently
        self._api = client.ApiClient(settings)
        self._core = client.CoreV1Api(self._api)
        self._networking = client.NetworkingV1Api(self._api)
        self._custom = client.CustomObjectsApi(self._api)
        self._versions = client.VersionApi(self._api)
        self._groups = client.ApisApi(self._api)
        self._authorization = client.AuthorizationV1Api(self._api)

    def create(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Create an object; with ``dry_run``, the server only validates it."""
        kind = text(manifest, "kind")
        options = {
            "field_validation": "Strict",
            "_request_timeout": self._timeout_s,
            **({"dry_run": "All"} if dry_run else {}),
        }
        if kind in CUSTOM:
            make: Callable[..., object] = partial(
                self._custom.create_namespaced_custom_object, *CUSTOM[kind][:2]
            )
            arguments: tuple[object, ...] = (self.namespace, CUSTOM[kind][2], manifest)
        else:
            make = {
                "ConfigMap": self._core.create_namespaced_config_map,
                "NetworkPolicy": self._networking.create_namespaced_network_policy,
            }[kind]
            arguments = (self.namespace, manifest)
        made = self._call(f"{kind} {text(manifest, 'metadata', 'name')}", lambda: make(*arguments, **options))
        found: Manifest = made if isinstance(made, dict) else self._api.sanitize_for_serialization(made)
        return found

    def version(self) -> str:
        """Return the version of the API server."""
        return str(self._call("version", self._patiently(self._versions.get_code)).git_version)

    def serves(self, group: str, version: str) -> bool:
        """Return whether the server serves an API group in this version."""
        return self._found(group, partial(self._custom.get_api_resources, group, version)) is not None

    def has_permission(self, verb: str, group: str, resource: str) -> bool:
        """Return whether the account has a permission in this namespace (SelfSubjectAccessReview).

        Args:
            verb: Such as ``create``.
            group: Group of the resource; empty: the core group.
            resource: Such as ``pods`` or ``pods/log``.
        """
        name, _, part = resource.partition("/")
        attributes = {"namespace": self.namespace, "verb": verb, "group": group, "resource": name}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {**attributes, **({"subresource": part} if part else {})}},
        }
        request = partial(self._authorization.create_self_subject_access_review, review)
        return bool(self._call("permissions", self._patiently(request)).status.allowed)

    def read(self, kind: str, name: str) -> Manifest | None:
        """Return an MPIJob, ConfigMap, PersistentVolumeClaim or Secret by name; None: it does not exist."""
        if kind in CUSTOM:
            group, version, plural = CUSTOM[kind]
            where = (group, version, self.namespace, plural, name)
            return self._found(name, partial(self._custom.get_namespaced_custom_object, *where))
        request = {
            "ConfigMap": self._core.read_namespaced_config_map,
            "PersistentVolumeClaim": self._core.read_namespaced_persistent_volume_claim,
            "Secret": self._core.read_namespaced_secret,
        }[kind]
        return self._found(name, partial(request, name, self.namespace))

    def mpi_jobs(self, selector: str) -> list[Manifest]:
        """Return MPIJobs by a label selector."""
        request = partial(self._custom.list_namespaced_custom_object, GROUP, VERSION, self.namespace, PLURAL)
        return list(
            self._call("MPIJobs", self._patiently(partial(request, label_selector=selector)))["items"]
        )

    def preferred_version(self, group: str) -> str | None:
        """Return the preferred version of an API group; None: the server does not serve the group."""
        groups = self._call(group, self._patiently(self._groups.get_api_versions)).groups
        return next((found.preferred_version.version for found in groups if found.name == group), None)

    def has_queue(self, name: str, version: str) -> bool:
        """Return whether this namespace has a LocalQueue of this name; ``version``: of Kueue's API."""
        where = (KUEUE, version, self.namespace, "localqueues", name)
        return self._found(name, partial(self._custom.get_namespaced_custom_object, *where)) is not None

    def allocatable(self, resource: str) -> list[str]:
        """Return the allocatable quantity of a resource, for each node."""
        nodes = self._call("nodes", self._patiently(self._core.list_node)).items
        return [(node.status.allocatable or {}).get(resource, "0") for node in nodes]

    def patch_mpi_job(self, name: str, patch: Manifest) -> None:
        """Apply a merge patch to an MPIJob."""
        self._call(
            f"MPIJob {name}",
            lambda: self._custom.patch_namespaced_custom_object(
                GROUP,
                VERSION,
                self.namespace,
                PLURAL,
                name,
                patch,
                _content_type="application/merge-patch+json",
                _request_timeout=self._timeout_s,
            ),
        )

    def delete_mpi_job(self, name: str) -> None:
        """Delete an MPIJob and its dependents. It is not an error if it does not exist."""
        where = (GROUP, VERSION, self.namespace, PLURAL, name)
        delete = partial(
            self._custom.delete_namespaced_custom_object, *where, propagation_policy="Foreground"
        )
        self._found(f"MPIJob {name}", delete)

    def warnings(self, mpi_job: Manifest) -> list[tuple[str, str]]:
        """Return (reason, message) of Warning events of this MPIJob (by UID) and its pods, oldest first."""
        name, uid = text(mpi_job, "metadata", "name"), field(mpi_job, "metadata", "uid")
        created = datetime.fromisoformat(text(mpi_job, "metadata", "creationTimestamp", default=BEGINNING))
        pods = re.compile(rf"{re.escape(name)}-(worker-\d+|launcher(-\w+)?)")
        request = partial(self._core.list_namespaced_event, self.namespace)
        found = self._call("events", self._patiently(request))
        mine = []
        for event in found.items:
            who, when = event.involved_object, _time_of(event)
            is_about_it = who.uid == uid or (who.uid is None and who.name == name)
            # Pods of an earlier job of this name had the same names.
            is_about_pods = pods.fullmatch(who.name or "") and when >= created
            if event.type == "Warning" and (is_about_it or is_about_pods):
                mine.append((when, event.reason or "", event.message or ""))
        return [(reason, message) for _, reason, message in sorted(mine)]

    def pods(self, selector: str) -> list[Pod]:
        """Return pods by a label selector."""
        request = partial(self._core.list_namespaced_pod, self.namespace, label_selector=selector)
        return [_pod_of(found) for found in self._call("pods", self._patiently(request)).items]

    def log(self, pod: str, skip: int, *, follow: bool) -> Iterator[str]:
        """Yield the lines of a pod's log; with ``follow``, until the pod ends.

        Args:
            pod: Name of the pod.
            skip: Number of lines at the beginning to skip, because they were read before.
            follow: Wait for further lines.

        Raises:
            LogInterruptedError: The connection broke; there may be further lines.
        """
        response = self._call(
            f"log of {pod}",
            lambda: self._core.read_namespaced_pod_log(
                pod,
                self.namespace,
                follow=follow,
                _preload_content=False,
                _request_timeout=None if follow else self._timeout_s,
            ),
        )
        buffer, number = b"", 0
        try:
            for piece in response.stream(decode_content=False):
                *lines, buffer = (buffer + piece).split(b"\n")
                for line in lines:
                    number += 1
                    if number > skip:
                        yield line.decode(errors="replace")
        except self._http_error as error:
            raise LogInterruptedError(f"log of {pod}: the connection broke: {error}") from error
        if buffer and number >= skip:
            yield buffer.decode(errors="replace")

    def close(self) -> None:
        """Close all connections."""
        self._api.close()

    def _patiently(self, request: Callable[..., Result]) -> Callable[[], Result]:
        return partial(request, _request_timeout=self._timeout_s)

    def _found(self, what: str, request: Callable[..., object]) -> Manifest | None:
        """Return an object as plain data; None: the server responded with 404."""

        def look() -> Manifest | None:
            try:
                found: Manifest = self._api.sanitize_for_serialization(self._patiently(request)())
            except self._api_error as error:
                if error.status == 404:
                    return None
                raise
            return found

        return self._call(what, look)

    def _call(self, what: str, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except self._api_error as error:
            raise self._explained(what, error) from error
        except self._http_error as error:
            raise UnreachableError(
                f"{what}: the API server does not answer: {error}", hint="`kubectl cluster-info`"
            ) from error

    def _explained(self, what: str, error: ApiException) -> LaunchError:
        try:
            message = json.loads(error.body or "")["message"]
        except (TypeError, ValueError, KeyError):
            message = error.reason
        if error.status in PASSING:
            return UnreachableError(f"{what}: {message}", hint="`kubectl cluster-info`")
        if error.status == 409 and "already exists" in str(message):
            return ExistsError(f"{what}: {message}")
        if "exceeded quota" in str(message):
            return LaunchError(f"{what}: {message}", hint="`kubectl describe quota`; ask for less, or wait")
        hints = {
            401: "log in again: the credentials of the current context are not accepted",
            403: "ask for a Role; `horovod-train doctor --kubernetes` lists the missing permissions",
            404: "" if "namespace" in message else INSTALL.get(what.partition(" ")[0], ""),
        }
        kind = ForbiddenError if error.status == 403 else LaunchError
        return kind(f"{what}: {message}", hint=hints.get(error.status, ""))
