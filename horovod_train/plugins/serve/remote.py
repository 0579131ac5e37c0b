"""Client of the HTTP API of ``horovod-train serve``."""

from __future__ import annotations

import json
import math
import os
import ssl
import urllib.request
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from time import monotonic, sleep
from typing import cast
from urllib.error import HTTPError
from urllib.parse import quote, urlencode, urlsplit

from horovod_train.client import JobHandle, JobResult
from horovod_train.config.load import job_file, plain_values, read_tree
from horovod_train.config.schema import Job
from horovod_train.errors import (
    ConfigError,
    KeyUsedError,
    LaunchError,
    LauncherTimeoutError,
    Problem,
    ServerError,
    UserError,
)
from horovod_train.events.file import Record, Series, parsed_records
from horovod_train.launch.base import PATIENCE_S, JobStatus

TOKEN_VARIABLE = "HOROVOD_TRAIN_TOKEN"  # noqa: S105  (name of a variable)
API = "/api/v1"
PAUSE_S = 1.0
LONG_POLL_S = 30.0
MIN_RESPONSE_S, MAX_RESPONSE_S = 1.0, 60.0
"""Time that a response may take; within these limits, what is left of ``retry_timeout_s``."""
SUBMIT_S = 30.0
"""Time that a launcher may take to accept a job."""
STREAM_TIMEOUT_S = 60.0
"""The server sends a comment at least every 15 s while a stream is open."""

RETRIED = {429, 502, 503, 504}
Json = dict[str, object]


@dataclass(frozen=True)
class StreamedEvent:
    """A server-sent event."""

    id: str
    event: str
    data: str


class Client:
    """Client of a server, for jobs that run with the server's account and launchers.

    Requests are repeated while the server does not respond, and streams continue after the last line that
    was received. A repeated submission starts no second job.

    Args:
        url: Address of the server, such as ``https://login1:9301``.
        token: Token of the server; None: the value of ``HOROVOD_TRAIN_TOKEN``.
        ca_file: File with the certificates to trust, in PEM format; None: those of the system.
        retry_timeout_s: Time for which a request is repeated while the server does not respond.

    Raises:
        UserError: The URL is not valid, or there is no token.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        ca_file: str | Path | None = None,
        retry_timeout_s: float = 60.0,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(
                f"{url!r} is not the URL of a server", hint="expected, for example, https://login1:9301"
            )
        token = (token or os.environ.get(TOKEN_VARIABLE) or "").strip()
        if not token:
            raise UserError("no token is given", hint=f"pass token=..., or set {TOKEN_VARIABLE}")
        if not token.isascii() or not token.isprintable():
            raise UserError(
                "the token contains characters that no token has", hint="read one line of its file"
            )
        self._url = f"{parts.scheme}://{parts.netloc}{API}"
        self._headers = {"Authorization": f"Bearer {token}"}
        self._patience_s = retry_timeout_s
        context = ssl.create_default_context(cafile=ca_file) if parts.scheme == "https" else None
        is_loopback = parts.hostname in ("localhost", "127.0.0.1", "::1")
        proxies = [urllib.request.ProxyHandler({})] if is_loopback else []
        self._opener = urllib.request.build_opener(
            *proxies, urllib.request.HTTPSHandler(context=context), _NoRedirect
        )

    def submit(
        self,
        job: str | Path | Mapping[str, object] | Job,
        overrides: Mapping[str, object] | None = None,
        *,
        key: str | None = None,
        files: Iterable[str | Path] = (),
    ) -> JobHandle:
        """Start a job on the server, and return without waiting for it.

        Args:
            job: As for ``horovod_train.submit``. If the task is in a file (``task: t.py:Task``), this file
                is uploaded. Environment variables override nothing.
            overrides: Values by dotted path; they override the job.
            key: Any text. If a job was started with this key before, its handle is returned.
            files: Further files of the task, as paths relative to the folder of the job file (to the current
                folder if ``job`` is not a file).

        Raises:
            ConfigError: The job description is not valid; the error lists all problems.
            KeyUsedError: The key was used for a job with another description.
            LaunchError: The launcher rejects the job.
            UserError: The token does not allow it, or a file cannot be uploaded.
            ServerError: The server does not respond.
        """
        if isinstance(job, str | Path):
            path = job_file(str(job))
            tree, folder = read_tree(path), path.parent
        else:
            plain = job.model_dump(mode="json") if isinstance(job, Job) else plain_values(job)
            tree, folder = plain, Path()
        body = {
            "job": tree,
            "overrides": plain_values(overrides or {}),
            "files": {
                name: _text_of(folder / name)
                for name in _uploaded((overrides or {}).get("task", tree.get("task")), folder, files)
            },
        }
        headers = {"Idempotency-Key": quote(key or uuid.uuid4().hex, safe=" ")}
        return JobHandle(RemoteJob(self, self.request("POST", "/jobs", body, headers, takes_s=SUBMIT_S)))

    def jobs(
        self, *, state: Iterable[str] = (), name: str | None = None, launcher: str | None = None
    ) -> list[JobHandle]:
        """Return the jobs of the server, newest first.

        Args:
            state: Only jobs in one of these states; empty: all.
            name: Only jobs of this name.
            launcher: Only jobs of this launcher.
        """
        found: list[JobHandle] = []
        query = [("limit", "200"), *(("state", each) for each in state)]
        query += [(key, value) for key, value in (("name", name), ("launcher", launcher)) if value]
        after: list[tuple[str, str]] = []
        while True:
            page = self.request("GET", f"/jobs?{urlencode([*query, *after])}")
            found += [JobHandle(RemoteJob(self, each)) for each in cast("list[Json]", page["jobs"])]
            if not page["next"]:
                return found
            after = [("after", str(page["next"]))]

    def job(self, job_id: str) -> JobHandle:
        """Return a job by its ID, a unique prefix of it, or its name.

        Raises:
            UserError: No job, or more than one, matches.
        """
        return JobHandle(RemoteJob(self, self.request("GET", f"/jobs/{quote(job_id, safe='')}")))

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        *,
        takes_s: float = 0.0,
    ) -> Json:
        """Send a request, repeatedly if the server does not respond, and return its JSON response.

        Args:
            method: Method of HTTP.
            path: Path below that of the API.
            body: Body, as JSON.
            headers: Further headers.
            takes_s: Time after which the server responds if nothing happens.

        Raises:
            UserError: The server rejects the request; also ConfigError, KeyUsedError and LaunchError.
            ServerError: The server does not respond.
        """
        try:
            data = None if body is None else json.dumps(body).encode()
        except TypeError as error:
            raise UserError(f"the request cannot be sent: {error}") from error
        deadline_s = monotonic() + self._patience_s
        while True:
            try:
                left_s = min(MAX_RESPONSE_S, max(MIN_RESPONSE_S, deadline_s - monotonic()))
                with self._open(method, path, data, headers or {}, takes_s + left_s) as response:
                    return cast("Json", json.loads(response.read()))
            except HTTPError as error:
                if error.code not in RETRIED or monotonic() > deadline_s:
                    raise _as_error(error) from error
            except (OSError, json.JSONDecodeError, UnicodeDecodeError, HTTPException) as error:
                _check_certificate(error)
                if monotonic() > deadline_s:
                    raise ServerError(f"{self._url} does not respond: {error}") from error
            sleep(PAUSE_S)

    def stream(self, path: str) -> Iterator[StreamedEvent]:
        """Yield the events of a stream, up to and including its event ``end``; continue it when it breaks.

        Raises:
            UserError: The server rejects the request; also LaunchError.
            ServerError: The server does not respond.
        """
        last_id, deadline_s = "", monotonic() + self._patience_s
        while True:
            try:
                headers = {"Last-Event-ID": last_id} if last_id else {}
                with self._open("GET", path, None, headers, STREAM_TIMEOUT_S) as response:
                    for each in _parsed(response):
                        deadline_s = monotonic() + self._patience_s
                        last_id = each.id or last_id
                        yield each
                        if each.event == "end":
                            return
                if monotonic() > deadline_s:
                    raise ServerError(f"{self._url}{path}: the stream ended without the event `end`")
            except HTTPError as error:
                if error.code not in RETRIED or monotonic() > deadline_s:
                    raise _as_error(error) from error
            except (OSError, HTTPException) as error:
                _check_certificate(error)
                if monotonic() > deadline_s:
                    raise ServerError(f"{self._url} does not respond: {error}") from error
            sleep(PAUSE_S)

    def _open(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> HTTPResponse:
        request = urllib.request.Request(  # noqa: S310  (http or https)
            self._url + path,
            data,
            {**self._headers, "Content-Type": "application/json", **headers},
            method=method,
        )
        return cast("HTTPResponse", self._opener.open(request, timeout=timeout_s))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Handler that follows no redirects, because another server must not receive the token."""

    def redirect_request(self, *_: object) -> None:
        return None


@dataclass(frozen=True)
class RemoteJob:
    """Access to a job through a server. ``document`` is the job as the server described it."""

    client: Client
    document: Json = field(repr=False)

    @property
    def id(self) -> str:
        """ID of the job."""
        return str(self.document["id"])

    @property
    def launcher(self) -> str:
        """Name of the launcher."""
        return str(self.document["launcher"])

    @property
    def folder(self) -> Path:
        """Run folder, on the server's machine."""
        return Path(str(self.document["folder"]))

    @property
    def _path(self) -> str:
        return f"/jobs/{quote(self.id, safe='')}"

    def status(self) -> JobStatus:
        """Return the status."""
        return status_of(self.client.request("GET", self._path))

    def wait(self, timeout_s: float) -> JobStatus:
        """Block until the job has ended."""
        known_s = monotonic()
        deadline_s = known_s + timeout_s
        while True:
            left_s = max(0.0, min(LONG_POLL_S, deadline_s - monotonic()))
            try:
                found = self.client.request("GET", f"{self._path}/wait?timeout_s={left_s:g}", takes_s=left_s)
            except LaunchError:  # as on the server's machine
                if monotonic() - known_s > PATIENCE_S:
                    raise
            else:
                known_s = monotonic()
                if found["has_ended"]:
                    return status_of(found)
            if monotonic() >= deadline_s:
                raise TimeoutError(f"{self.id} has not ended within {timeout_s:g} s")

    def result(self) -> JobResult:
        """Return the result of a job that has succeeded."""
        found = self.client.request("GET", f"{self._path}/result")
        checkpoint, metrics = found["checkpoint"], cast("Json", found["metrics"])
        return JobResult(
            {name: _number(value) for name, value in metrics.items()},
            Path(str(checkpoint)) if checkpoint else None,
            int(cast("int", found["num_steps"])),
        )

    def logs(self, *, follow: bool) -> Iterator[str]:
        """Yield the readable lines of the output."""
        for each in self._stream("logs", follow=follow):
            yield each.data

    def events(self) -> list[Record]:
        """Return the events so far."""
        return list(parsed_records(each.data for each in self._stream("events", follow=False)))

    def _stream(self, what: str, *, follow: bool) -> Iterator[StreamedEvent]:
        for each in self.client.stream(f"{self._path}/{what}?follow={str(follow).lower()}"):
            if each.event == "error":
                raise LaunchError(str(json.loads(each.data)["message"]))
            if each.event != "end":
                yield each

    def metrics(self) -> Series:
        """Return the values of steps and evaluations."""
        found = self.client.request("GET", f"{self._path}/metrics")
        series = cast("dict[str, dict[str, list[float]]]", found["series"])
        return {
            name: [
                (int(step), _number(value)) for step, value in zip(each["step"], each["value"], strict=True)
            ]
            for name, each in series.items()
        }

    def drain(self) -> None:
        """Request the ranks to save and exit."""
        self.client.request("POST", f"{self._path}/drain")

    def cancel(self, *, now: bool) -> None:
        """End the job, without waiting for it."""
        self.client.request("POST", f"{self._path}/cancel", {"now": now})


def status_of(document: Json) -> JobStatus:
    """Return the status in a job document of the server."""
    names = ("state", "exit_code", "message", "cause", "lost_ranks")
    fields = {name: document[name] for name in names}
    return JobStatus(**{**fields, "lost_ranks": tuple(cast("list[int]", fields["lost_ranks"]))})  # type: ignore[arg-type]


def _number(value: object) -> float:
    """Return a number of a JSON document, which has null for NaN and infinity."""
    return math.nan if value is None else float(cast("float", value))


def _parsed(response: HTTPResponse) -> Iterator[StreamedEvent]:
    """Yield the complete events of an event stream (WHATWG HTML, section 9.2.6)."""
    fields: dict[str, list[str]] = {}
    for raw in response:
        line = raw.decode().rstrip("\n")
        name, _, value = line.partition(":")
        if line and name:
            fields.setdefault(name, []).append(value.removeprefix(" "))
        elif not line and "data" in fields:
            last_id, event = (fields.get(key, [""])[-1] for key in ("id", "event"))
            yield StreamedEvent(last_id, event, "\n".join(fields["data"]))
            fields = {}
        elif not line:
            fields = {}


def _as_error(error: HTTPError) -> Exception:
    """Return the error that a response of the server describes."""
    try:
        document = json.loads(error.read())
        message, hint = str(document["message"]), str(document["hint"])
        problems = [Problem(**each) for each in document["problems"]]
    except (OSError, ValueError, KeyError, TypeError, HTTPException):
        return ServerError(f"{error.url}: {error.code} {error.reason}")
    if problems:
        return ConfigError("the job", problems)
    if error.code >= 500 and document.get("kind") != "unanswered":
        return ServerError(message)
    kinds = {"key_used": KeyUsedError, "launch": LaunchError, "unanswered": LauncherTimeoutError}
    return kinds.get(str(document.get("kind")), UserError)(message, hint=hint)


def _check_certificate(error: Exception) -> None:
    """Raise an error if the certificate of the server is not trusted, because a retry would not help."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, ssl.SSLCertVerificationError):
        raise UserError(
            f"the certificate of the server is not trusted: {reason.verify_message}",
            hint="pass ca_file=..., the certificate of the server or of its authority",
        ) from error


def _uploaded(task: object, folder: Path, files: Iterable[str | Path]) -> list[str]:
    """Return the names of the files to upload, relative to ``folder``.

    Raises:
        UserError: A file is not below ``folder``.
    """
    names = [str(file) for file in files]
    file, colon, _ = task.rpartition(":") if isinstance(task, str) else ("", "", "")
    if colon and file.endswith(".py") and not Path(file).is_absolute() and (folder / file).is_file():
        names.append(file)
    names = [os.path.normpath(name) for name in names]
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise UserError(f"{name} cannot be uploaded: it is not below {folder.resolve()}")
    return list(dict.fromkeys(names))


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be uploaded: {error}") from error
