"""Talking to Kubernetes: the one file that does.

Everything goes through the official client. Its configuration is that of kubectl: KUBECONFIG or
``~/.kube/config`` with its current context, or the service account of the pod this runs in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from horovod_train.errors import LaunchError, UserError

Result = TypeVar("Result")
Manifest = dict[str, Any]
GROUP, VERSION, PLURAL = "kubeflow.org", "v2beta1", "mpijobs"
# What has no class of its own in the client: kind -> group, version, plural.
CUSTOM = {
    "MPIJob": (GROUP, VERSION, PLURAL),
    "PodMonitor": ("monitoring.coreos.com", "v1", "podmonitors"),
}


class Cluster:
    """A namespace of a cluster.

    Args:
        namespace: Which one.
        timeout_s: How long an answer may take, in seconds.

    Raises:
        UserError: The client is not installed, or not configured.
    """

    def __init__(self, namespace: str, timeout_s: float) -> None:
        try:
            from kubernetes import client
            from kubernetes import config as configuration
        except ImportError as error:
            raise UserError(
                "the launcher mpijob needs the package kubernetes",
                hint="pip install 'horovod_train[kubernetes]'",
            ) from error
        config: Any = configuration
        try:
            config.load_config()
        except config.ConfigException as error:
            raise UserError(
                f"no Kubernetes cluster is configured: {error}", hint="set KUBECONFIG; `kubectl cluster-info`"
            ) from error
        self.namespace = namespace
        self._timeout_s = timeout_s
        self._api_error = client.ApiException
        self._api: Any = client.ApiClient()
        self._core: Any = client.CoreV1Api(self._api)
        self._networking: Any = client.NetworkingV1Api(self._api)
        self._custom: Any = client.CustomObjectsApi(self._api)

    def create(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Create an object; with ``dry_run`` the server only says whether it would.

        Raises:
            LaunchError: The server refuses; in its own words.
        """
        kind = manifest["kind"]
        options = {
            "field_validation": "Strict",
            "_request_timeout": self._timeout_s,
            **({"dry_run": "All"} if dry_run else {}),
        }
        if kind in CUSTOM:
            make = partial(self._custom.create_namespaced_custom_object, *CUSTOM[kind][:2])
            arguments: tuple[Any, ...] = (self.namespace, CUSTOM[kind][2], manifest)
        else:
            make = {
                "ConfigMap": self._core.create_namespaced_config_map,
                "NetworkPolicy": self._networking.create_namespaced_network_policy,
            }[kind]
            arguments = (self.namespace, manifest)
        made = self._call(f"{kind} {manifest['metadata']['name']}", lambda: make(*arguments, **options))
        found: Manifest = made if isinstance(made, dict) else self._api.sanitize_for_serialization(made)
        return found

    def mpi_job(self, name: str) -> Manifest | None:
        """Return an MPIJob; None: there is none of this name."""
        try:
            found: Manifest = self._custom.get_namespaced_custom_object(
                GROUP, VERSION, self.namespace, PLURAL, name, _request_timeout=self._timeout_s
            )
        except self._api_error as error:
            if error.status == 404:
                return None
            raise self._explained(f"MPIJob {name}", error) from error
        return found

    def patch_mpi_job(self, name: str, patch: Mapping[str, Any]) -> None:
        """Change fields of an MPIJob.

        Raises:
            LaunchError: The server refuses.
        """
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
        """Delete an MPIJob, and with it all it owns. One that is gone is no error."""
        try:
            self._custom.delete_namespaced_custom_object(
                GROUP, VERSION, self.namespace, PLURAL, name,
                propagation_policy="Foreground", _request_timeout=self._timeout_s,
            )  # fmt: skip
        except self._api_error as error:
            if error.status != 404:
                raise self._explained(f"MPIJob {name}", error) from error

    def warnings(self, name: str) -> list[tuple[str, str]]:
        """Return (reason, message) of the warnings about an MPIJob and its pods, oldest first."""
        events = self._call(
            "events",
            lambda: self._core.list_namespaced_event(self.namespace, _request_timeout=self._timeout_s),
        )
        return [
            (event.reason or "", event.message or "")
            for event in events.items
            if event.type == "Warning"
            and (
                event.involved_object.name == name
                or (event.involved_object.name or "").startswith(f"{name}-")
            )
        ]

    def pods(self, selector: str) -> list[Any]:
        """Return pods by a label selector."""
        found = self._call(
            "pods",
            lambda: self._core.list_namespaced_pod(
                self.namespace, label_selector=selector, _request_timeout=self._timeout_s
            ),
        )
        return list(found.items)

    def log(self, pod: str, *, follow: bool) -> Iterator[str]:
        """Yield the lines of a pod's log, with ``follow`` until the pod ends."""
        response = self._call(
            f"log of {pod}",
            lambda: self._core.read_namespaced_pod_log(
                pod, self.namespace, follow=follow, _preload_content=False
            ),
        )
        buffer = b""
        for piece in response.stream(decode_content=False):
            *lines, buffer = (buffer + piece).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace")
        if buffer:
            yield buffer.decode(errors="replace")

    def close(self) -> None:
        """Let go of connections."""
        self._api.close()

    def _call(self, what: str, call: Callable[[], Result]) -> Result:
        from urllib3.exceptions import HTTPError

        try:
            return call()
        except self._api_error as error:
            raise self._explained(what, error) from error
        except HTTPError as error:
            raise LaunchError(
                f"{what}: the API server does not answer: {error}", hint="`kubectl cluster-info`"
            ) from error

    def _explained(self, what: str, error: Any) -> LaunchError:
        try:
            message = json.loads(error.body)["message"]
        except (TypeError, ValueError, KeyError):
            message = error.reason
        hints = {
            401: "log in again: the credentials of the current context are not accepted",
            403: "ask for a Role that may create MPIJobs, ConfigMaps and NetworkPolicies, and read pods, "
            "their logs, and events",
            404: "is the MPI operator installed in this cluster? `kubectl get crd mpijobs.kubeflow.org`",
        }
        return LaunchError(f"{what}: {message}", hint=hints.get(error.status, ""))
