"""Client of the Kubernetes API, and validation of an MPIJob before it is sent.

Cluster   client for one namespace of a cluster; no other file sends requests to the API
check     raises an error for an MPIJob that would not run
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from horovod_train.errors import (
    ConfigError,
    LaunchError,
    LauncherTimeoutError,
    Problem,
    UserError,
    did_you_mean,
)
from horovod_train.plugins.kubernetes.render import Manifest, field, number, section, sections, text
from horovod_train.plugins.kubernetes.settings import KUEUE, name_problems
from horovod_train.system.machine import import_optional

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


class UnreachableError(LauncherTimeoutError):
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

    The official Python client sends the requests. Its configuration is that of kubectl: KUBECONFIG or
    ``~/.kube/config`` with its current context, or the service account of the pod that contains this
    process.

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


SCHEMA = Path(__file__).with_name("mpijob-v2beta1.json")
ROLES = ("Launcher", "Worker")


def check(manifest: Mapping[str, object], source: str = "MPIJob") -> None:
    """Raise an error for an MPIJob that would not run.

    There are three kinds of problems: values that the API server rejects, values that make the operator
    create an event and nothing else, and values that are ignored. Rules of the second kind follow
    ValidateMPIJob of operator 0.8.

    Raises:
        ConfigError: Lists all problems of the schema; if there are none, all others; with the field's path.
        UserError: jsonschema is not installed.
    """
    # The other rules require valid types.
    problems = list(schema_problems(manifest)) or [
        *operator_problems(manifest),
        *silent_problems(manifest),
    ]
    if problems:
        raise ConfigError(source, problems)


@cache
def strict_schema() -> Manifest:
    """Return the schema of the resource (CRD) as JSON Schema, in which unknown fields are errors."""
    schema = section(_strict(json.loads(SCHEMA.read_text(encoding="utf-8"))))
    metadata = {"type": "object", "required": ["name"]}
    return {**schema, "properties": {**section(schema, "properties"), "metadata": metadata}}


def _strict(node: object) -> object:
    if isinstance(node, list):
        return [_strict(child) for child in node]
    if not isinstance(node, dict):
        return node
    strict = {key: _strict(child) for key, child in node.items()}
    is_open = strict.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in strict
    if isinstance(strict.get("properties"), dict) and not is_open:
        strict["additionalProperties"] = False
    if strict.get("x-kubernetes-int-or-string"):
        strict.pop("type", None)
    if found := re.fullmatch(r"int(32|64)", text(strict, "format")):
        largest = 2 ** (int(found[1]) - 1) - 1
        strict = {"minimum": -largest - 1, "maximum": largest, **strict}
    return strict


def schema_problems(manifest: Mapping[str, object]) -> Iterator[Problem]:
    """Yield the problems that the API server would report."""
    jsonschema = import_optional(
        "jsonschema", needed_by="checking an MPIJob", hint="pip install 'horovod_train[kubernetes]'"
    )
    validator = jsonschema.Draft202012Validator(strict_schema())
    for found in sorted(validator.iter_errors(manifest), key=lambda one: list(map(str, one.absolute_path))):
        path = [str(part) for part in found.absolute_path]
        if found.validator == "additionalProperties":
            known = found.schema["properties"]
            for name in sorted(set(found.instance) - set(known)):
                yield Problem(
                    ".".join([*path, name]), "", "is not a field of an MPIJob", did_you_mean(name, known)
                )
        elif found.validator == "required":
            missing = sorted(set(found.validator_value) - set(found.instance))
            for name in missing:
                yield Problem(".".join([*path, name]), "", "is missing")
        else:
            yield Problem(".".join(path), repr(found.instance)[:60], found.message[:200])


def operator_problems(manifest: Mapping[str, object]) -> Iterator[Problem]:
    """Yield problems that the API server accepts, and the operator reports only in an event."""
    spec = section(manifest, "spec")
    replicas = section(spec, "mpiReplicaSpecs")
    num_workers = number(replicas, "Worker", "replicas", default=1)
    yield from name_problems("metadata.name", text(manifest, "metadata", "name"), num_workers)
    base = "spec.mpiReplicaSpecs"
    num_launchers = number(replicas, "Launcher", "replicas", default=1)
    if "Launcher" not in replicas:
        yield Problem(f"{base}.Launcher", "", "is missing", did_you_mean("Launcher", replicas))
    elif num_launchers != 1:
        yield Problem(f"{base}.Launcher.replicas", str(num_launchers), "must be 1")
    if num_workers < 1:
        yield Problem(f"{base}.Worker.replicas", str(num_workers), "must be at least 1")
    for role in ROLES:
        policy = text(replicas, role, "restartPolicy", default="Never")
        if policy not in ("Never", "OnFailure"):
            yield Problem(f"{base}.{role}.restartPolicy", repr(policy), "must be Never or OnFailure")
        if role in replicas:
            yield from _container_problems(f"{base}.{role}.template.spec", section(replicas, role))
    slots = number(spec, "slotsPerWorker", default=1)
    if slots < 1:
        yield Problem("spec.slotsPerWorker", str(slots), "must be at least 1")
    yield from _run_policy_problems(section(spec, "runPolicy"))


def _run_policy_problems(run_policy: Mapping[str, object]) -> Iterator[Problem]:
    clean = text(run_policy, "cleanPodPolicy", default="None")
    if clean not in ("None", "Running", "All"):
        yield Problem("spec.runPolicy.cleanPodPolicy", repr(clean), "must be None, Running or All")
    for name in ("ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit"):
        found = number(run_policy, name, default=0)
        if found < 0:
            yield Problem(f"spec.runPolicy.{name}", str(found), "must not be negative")


def _container_problems(path: str, replica: Mapping[str, object]) -> Iterator[Problem]:
    """Yield problems that occur when pods are created."""
    pod = section(replica, "template", "spec")
    volumes = {text(volume, "name") for volume in sections(pod, "volumes")}
    containers = sections(pod, "containers")
    if not containers:
        yield Problem(f"{path}.containers", "", "must have at least one container")
    for place, container in enumerate(containers):
        at = f"{path}.containers.{place}"
        if not text(container, "image"):
            yield Problem(f"{at}.image", "", "is missing")
        yield from _mount_problems(at, sections(container, "volumeMounts"), volumes)
        yield from _port_problems(at, sections(container, "ports"))
        yield from _resource_problems(f"{at}.resources", section(container, "resources"))


def _mount_problems(path: str, mounts: list[Mapping[str, object]], volumes: set[str]) -> Iterator[Problem]:
    places = [text(mount, "mountPath") for mount in mounts]
    for index, mount in enumerate(mounts):
        name, place = text(mount, "name"), places[index]
        if name not in volumes:
            fix = did_you_mean(name, volumes)
            yield Problem(f"{path}.volumeMounts.{index}.name", repr(name), "is not a volume of this pod", fix)
        if places.count(place) > 1:
            yield Problem(f"{path}.volumeMounts.{index}.mountPath", repr(place), "is mounted twice")


def _port_problems(path: str, ports: list[Mapping[str, object]]) -> Iterator[Problem]:
    for index, port in enumerate(ports):
        found = number(port, "containerPort", default=0)
        if not 1 <= found <= 65535:
            yield Problem(f"{path}.ports.{index}.containerPort", str(found), "must be 1 to 65535")
    names = [text(port, "name") for port in ports if "name" in port]
    for name in sorted({name for name in names if names.count(name) > 1 or len(name) > 15}):
        yield Problem(f"{path}.ports", repr(name), "must be unique, and have at most 15 characters")


def _resource_problems(path: str, resources: Mapping[str, object]) -> Iterator[Problem]:
    limits = section(resources, "limits")
    for name, requested in section(resources, "requests").items():
        if name in limits and amount(str(requested)) > amount(text(limits, name)):
            yield Problem(
                f"{path}.requests.{name}", repr(requested), f"is more than its limit {limits[name]!r}"
            )


def amount(quantity: str) -> float:
    """Return a Kubernetes quantity as a number.

    >>> amount("1500m"), amount("2Ki"), amount("3"), amount("1e3")
    (1.5, 2048.0, 3.0, 1000.0)
    """
    found = re.fullmatch(r"(\d+\.?\d*(?:[eE][+-]?\d+)?)(m|[kMGTPE]|[KMGTPE]i)?", quantity)
    if found is None:
        return float("nan")
    number, unit = float(found[1]), found[2] or ""
    if unit == "m":
        return number / 1000
    power = " KMGTPE".index(unit[0].upper()) if unit else 0
    return number * float((1024 if unit.endswith("i") else 1000) ** power)


def silent_problems(manifest: Mapping[str, object]) -> Iterator[Problem]:
    """Yield values that are accepted, and do not have the intended effect."""
    spec = section(manifest, "spec")
    replicas = section(spec, "mpiReplicaSpecs")
    if "Worker" not in replicas:
        yield Problem("spec.mpiReplicaSpecs.Worker", "", "is missing: all ranks would run in the launcher")
    for name in replicas:
        if name not in ROLES:
            yield Problem(
                f"spec.mpiReplicaSpecs.{name}", "", "must be Launcher or Worker", did_you_mean(name, ROLES)
            )
    creation = text(spec, "launcherCreationPolicy", default="AtStartup")
    if creation not in ("AtStartup", "WaitForWorkersReady"):
        yield Problem(
            "spec.launcherCreationPolicy", repr(creation), "must be AtStartup or WaitForWorkersReady"
        )
    managers = ("kubeflow.org/mpi-operator", "kueue.x-k8s.io/multikueue")
    manager = text(spec, "runPolicy", "managedBy", default=managers[0])
    if manager not in managers:
        yield Problem(
            "spec.runPolicy.managedBy",
            repr(manager),
            f"no controller would reconcile it; known: {', '.join(managers)}",
        )
    gang = section(spec, "runPolicy", "schedulingPolicy")
    workers = number(replicas, "Worker", "replicas", default=1)
    gang_size = number(gang, "minAvailable", default=workers + 1)
    if gang and creation == "WaitForWorkersReady" and gang_size > workers:
        yield Problem(
            "spec.runPolicy.schedulingPolicy.minAvailable",
            text(gang, "minAvailable", default="unset"),
            "would wait for a launcher that waits for the workers",
            f"set it to {workers}, the number of workers",
        )
