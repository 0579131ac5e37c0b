"""A Kubernetes API server over real HTTP, as small as the launcher needs, and an operator within it.

Not a recording: objects are stored, dry runs are not, unknown fields are refused, and the operator
acts on what it finds.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from horovod_train.plugins.kubernetes import launcher

TOKEN = "a-token-of-the-test"  # noqa: S105
VERSIONS = (
    *("buildDate", "compiler", "gitCommit", "gitTreeState", "gitVersion", "goVersion", "major", "minor"),
    "platform",
)
GROUPS = {"apps": "v1", "kubeflow.org": "v2beta1", "kueue.x-k8s.io": "v1beta2"}
Object = dict[str, Any]


@dataclass
class Api:
    """What the server knows.

    Attributes:
        operator: Called with this and each MPIJob that is created.
        refuses: Answer (status, message) to the creation of a kind.
        objects: By (collection, name).
        forbidden: Verbs and resources that we may not, such as "get pods/log".
        unknown: Groups that are not installed.
        away: So many requests for a collection are answered by a server that is starting.
        away_status: Its answer: 503, or 403 until it knows the Roles.
        breaks_after: Logs break off after so many bytes; None: they do not.
        logs: Text by pod.
        silent_s: Time that passes before an answer.
        requests: Method and path with query of each request.
    """

    operator: Callable[[Api, Object], None] = lambda api, job: None
    refuses: dict[str, tuple[int, str]] = field(default_factory=dict)
    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    forbidden: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    breaks_after: int | None = None
    num_created: int = 0
    silent_s: float = 0.0
    away: dict[str, int] = field(default_factory=dict)
    away_status: int = 503
    logs: dict[str, str] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def is_away(self, collection: str) -> bool:
        """Whether this request meets a server that is starting; ``away`` says how many do."""
        self.away[collection] = self.away.get(collection, 0) - 1
        return self.away[collection] >= 0

    def names(self, kind: str) -> list[str]:
        """Names of the objects of a kind."""
        return [found["metadata"]["name"] for found in self.objects.values() if found.get("kind") == kind]

    def groups(self) -> list[Object]:
        """What is installed, each in the version that this server prefers."""
        versions = {
            name: {"groupVersion": f"{name}/{version}", "version": version}
            for name, version in GROUPS.items()
            if name not in self.unknown
        }
        return [{"name": n, "versions": [v], "preferredVersion": v} for n, v in versions.items()]

    def warn(self, name: str, reason: str, message: str, uid: str = "") -> None:
        """Let there be an event."""
        number = len(self.objects)
        self.objects["events", f"event-{number}"] = {
            "metadata": {"name": f"event-{number}", "namespace": "default"},
            "involvedObject": {"kind": "MPIJob", "name": name, **({"uid": uid} if uid else {})},
            "type": "Warning",
            "reason": reason,
            "message": message,
        }

    def add_condition(self, job: Object, kind: str, message: str = "") -> None:
        """Let the operator say something about a job."""
        conditions = job.setdefault("status", {}).setdefault("conditions", [])
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = {"type": kind, "status": "True", "message": message, "lastTransitionTime": now}
        conditions.append(condition)

    def add_launcher(
        self, job: Object, log: str, exit_code: int | None = None, ended_s_ago: float = 0.0
    ) -> None:
        """Let there be a launcher pod, running or ended."""
        name = f"{job['metadata']['name']}-launcher-x{len(self.logs)}"
        self.logs[name] = log
        end = (datetime.now(UTC) - timedelta(seconds=ended_s_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")
        ended = {"terminated": {"exitCode": exit_code, "finishedAt": end}}
        state: Object = {"running": {}} if exit_code is None else ended
        status = {"name": "launcher", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
        self.objects["pods", name] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "creationTimestamp": "2026-11-22T00:00:00Z",
                "labels": {
                    "training.kubeflow.org/job-name": job["metadata"]["name"],
                    "training.kubeflow.org/job-role": "launcher",
                },
            },
            "status": {
                "phase": "Running" if exit_code is None else "Failed" if exit_code else "Succeeded",
                "containerStatuses": [{**status, "state": state}],
            },
        }

    def add_worker(self, name: str, reason: str, message: str) -> None:
        """Let there be a worker pod whose container does not start."""
        status = {"name": "worker", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
        state = {"waiting": {"reason": reason, "message": message}}
        labels = {"training.kubeflow.org/job-name": "digits", "training.kubeflow.org/job-role": "worker"}
        self.objects["pods", name] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "creationTimestamp": "2026-11-22T00:00:00Z", "labels": labels},
            "status": {"phase": "Pending", "containerStatuses": [{**status, "state": state}]},
        }


def _later(do: Callable[..., None], *arguments: Any) -> None:
    """As a server does what it was asked for: a little later, and not at all when it has ended."""
    timer = threading.Timer(0.3, do, arguments)
    timer.daemon = True
    timer.start()


class _Handler(BaseHTTPRequestHandler):
    api: Api

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        collection, name, query = self._target()
        time.sleep(self.api.silent_s)
        if self.api.is_away(f"pods/{name}" if name.endswith("/log") else collection):
            self._refuse(self.api.away_status, "the server is currently unable to handle the request")
            return
        parts = urlsplit(self.path).path.strip("/").split("/")
        if parts == ["version"]:
            self._answer(dict.fromkeys(VERSIONS, "v1.37.1"))
        elif parts == ["apis"]:
            self._answer({"kind": "APIGroupList", "apiVersion": "v1", "groups": self.api.groups()})
        elif parts[0] == "apis" and len(parts) == 3:
            known = {"kind": "APIResourceList", "groupVersion": "/".join(parts[1:]), "resources": []}
            self._answer(None if parts[1] in self.api.unknown else known)
        elif f"{'get' if name else 'list'} {collection}" in self.api.forbidden:
            self._refuse(403, f"{collection} is forbidden")
        elif name.endswith("/log"):
            self._send(
                200, self.api.logs[name.partition("/")[0]].encode(), "text/plain", self.api.breaks_after
            )
        elif name:
            self._answer(self.api.objects.get((collection, name)))
        else:
            wanted = dict(pair.split("=") for pair in query.get("labelSelector", [""])[0].split(",") if pair)
            items = [
                found
                for (where, _), found in list(self.api.objects.items())
                if where == collection and wanted.items() <= found["metadata"].get("labels", {}).items()
            ]
            self._answer({"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items})

    def do_POST(self) -> None:
        collection, _, query = self._target()
        body = self._body()
        if self.headers.get_all("Content-Type") not in (None, ["application/json"]):
            self._refuse(415, "the body of the request was in an unknown format")
            return
        if body["kind"] == "SelfSubjectAccessReview":
            asked = body["spec"]["resourceAttributes"]
            what = "/".join([asked["resource"], *([asked["subresource"]] if "subresource" in asked else [])])
            is_allowed = f"{asked['verb']} {what}" not in self.api.forbidden
            self._answer({**body, "status": {"allowed": is_allowed}}, 201)
            return
        kind, name = body["kind"], body["metadata"]["name"]
        if kind in self.api.refuses:
            self._refuse(*self.api.refuses[kind])
        elif (collection, name) in self.api.objects:
            self._refuse(409, f'{collection} "{name}" already exists')
        elif query.get("fieldValidation") != ["Strict"]:
            self._refuse(400, "the client is not strict")
        elif query.get("dryRun") == ["All"]:
            self._answer(body, 201)
        else:
            self.api.num_created += 1
            body["metadata"]["uid"] = f"uid-of-{name}-{self.api.num_created}"
            self.api.objects[collection, name] = body
            if kind == "MPIJob":
                self.api.operator(self.api, body)
            self._answer(body, 201)

    def do_PATCH(self) -> None:
        collection, name, _ = self._target()
        assert self.headers["Content-Type"] == "application/merge-patch+json"
        found = self.api.objects[collection, name]
        patch = self._body()
        found["metadata"].setdefault("annotations", {}).update(patch["metadata"].get("annotations", {}))
        found["spec"].setdefault("runPolicy", {}).update(patch["spec"]["runPolicy"])
        if patch["spec"]["runPolicy"].get("suspend"):
            # As the operator does: pods go, and get the time they need.
            _later(self._remove_pods, name)
        self._answer(found)

    def do_DELETE(self) -> None:
        collection, name, _ = self._target()
        if (collection, name) not in self.api.objects:
            self._refuse(404, f'{collection} "{name}" not found')
            return
        self._body()
        metadata = self.api.objects[collection, name]["metadata"]
        if "deletionTimestamp" not in metadata:
            # In the foreground: what it owns goes first, and it stays in sight until then.
            metadata["deletionTimestamp"] = "2026-11-22T00:00:00Z"
            _later(self._remove, (collection, name), metadata["uid"])
        self._answer({"kind": "Status", "status": "Success"})

    def _remove(self, key: tuple[str, str], uid: str) -> None:
        self.api.objects = {
            other: found
            for other, found in self.api.objects.items()
            if other != key
            and uid not in [owner["uid"] for owner in found["metadata"].get("ownerReferences", [])]
        }

    def _remove_pods(self, name: str) -> None:
        for key, found in list(self.api.objects.items()):
            labels = found["metadata"].get("labels", {})
            if key[0] == "pods" and labels.get("training.kubeflow.org/job-name") == name:
                del self.api.objects[key]

    def _target(self) -> tuple[str, str, dict[str, list[str]]]:
        parts = urlsplit(self.path)
        self.api.requests.append(f"{self.command} {self.path}")
        _, _, rest = parts.path.partition("/namespaces/default/")
        rest = rest or parts.path.rpartition("/")[2]  # what belongs to no namespace
        collection, _, name = rest.partition("/")
        return collection, name, parse_qs(parts.query)

    def _body(self) -> Object:
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found: Object = json.loads(text) if text else {}
        return found

    def _refuse(self, status: int, message: str) -> None:
        self._send(status, json.dumps({"kind": "Status", "message": message, "code": status}).encode())

    def _answer(self, document: Object | None, status: int = 200) -> None:
        if document is None:
            self._refuse(404, "not found")
        else:
            self._send(status, json.dumps(document).encode())

    def _send(
        self, status: int, body: bytes, kind: str = "application/json", breaks_after: int | None = None
    ) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            status, body = 401, json.dumps({"message": "Unauthorized"}).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:breaks_after])
        self.close_connection |= breaks_after is not None


@contextmanager
def api_server(api: Api, kubeconfig: Path) -> Iterator[None]:
    """Serve, and write what kubectl and the client read to find the server."""
    handler = type("Handler", (_Handler,), {"api": api})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = False  # closing it waits for the last answer
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    kubeconfig.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "test",
                "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
                "clusters": [
                    {"name": "test", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
                ],
                "users": [{"name": "test", "user": {"token": TOKEN}}],
            }
        )
    )
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    """Serve to this process, which then waits shortly; what is remembered of jobs is in the folder."""
    api = Api()
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setenv("KUBECONFIG", str(folder / "config"))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(folder / "config"))
    monkeypatch.setattr(launcher, "POLL_S", 0.05)
    monkeypatch.setattr(launcher, "ACCEPT_S", 1.0)
    with api_server(api, folder / "config"):
        yield api
