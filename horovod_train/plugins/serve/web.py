"""Base of the HTTP servers: authorization, limits of requests, and the server thread.

    Tokens, read_tokens   tokens of the server, and what each of them allows
    Guard, application    rejection of unauthorized requests, and an application with guarded requests
    RateLimit             rate limit of one token
    Tls, Server           certificate of the server, and the server in its own thread

Requests must contain a token, because login nodes are shared and the loopback address is not private.
Requests from pages of another origin and requests with an unknown host name are rejected.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import json
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Literal, TypeVar, get_args
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from horovod_train.errors import UserError
from horovod_train.plugins.serve.remote import API, TOKEN_VARIABLE
from horovod_train.version import __version__

log = logging.getLogger(__name__)

Role = Literal["read", "cancel", "submit"]
"""Each role includes the earlier ones: read jobs; drain and cancel them; submit them."""

ROLES: tuple[Role, ...] = get_args(Role)
SAFE_METHODS = {"GET", "HEAD", "OPTIONS", "QUERY", "TRACE"}
SUBMIT_PATH = f"{API}/jobs"
MIN_CHARS = 16
MIN_DIFFERENT_CHARS = 6
"""A random token of 16 hexadecimal digits has fewer different ones three times in 100,000."""
RATE_PER_S = 50.0
BURST = 1000
"""Requests of a token: ``RATE_PER_S`` on average, and at most ``BURST`` at once."""


def role_needed(method: str, path: str) -> Role:
    """Return the role that a request needs."""
    if method in SAFE_METHODS:
        return "read"
    return "submit" if path == SUBMIT_PATH else "cancel"


@dataclass(frozen=True)
class AcceptedToken:
    """An accepted token: its role on this server, and its index, for the rate limit."""

    role: Role
    number: int


@dataclass
class RateLimit:
    """Rate limit of one access token (token-bucket algorithm)."""

    left: float = BURST
    updated_s: float = field(default_factory=monotonic)

    def take(self) -> float:
        """Count a request; return 0, or the seconds to wait before a retry."""
        now_s = monotonic()
        self.left = min(BURST, self.left + (now_s - self.updated_s) * RATE_PER_S)
        self.updated_s = now_s
        if self.left < 1:
            return (1 - self.left) / RATE_PER_S
        self.left -= 1
        return 0.0


class Tokens:
    """Accepted tokens.

    Args:
        page_token: Token with the role ``cancel``; it cannot submit jobs, as it is printed in an address.
        file: Token file; it is read again when it changes. None: no further tokens.
        max_role: Highest role of any token.

    Raises:
        UserError: The file cannot be read, is readable by other users, or has an invalid line.
    """

    def __init__(self, page_token: str, file: Path | None = None, max_role: Role = "read") -> None:
        self._page_token: list[tuple[Role, str]] = [("cancel", page_token)]
        self._file = file
        self._max_role = ROLES.index(max_role)
        self._version = _version(file)
        self._of_file = read_tokens(file) if file is not None else []

    def find(self, given: Iterable[str]) -> AcceptedToken | None:
        """Return the first accepted token; None: no token is accepted."""
        self._update()
        for token in given:
            found: AcceptedToken | None = None
            # All tokens are compared, so that the response time does not reveal which one matched.
            for number, (role, accepted) in enumerate([*self._page_token, *self._of_file]):
                if hmac.compare_digest(token.encode(), accepted.encode()):
                    found = AcceptedToken(ROLES[min(ROLES.index(role), self._max_role)], number)
            if found is not None:
                return found
        return None

    def _update(self) -> None:
        """Read the file again if it has changed. An invalid file is reported, and its tokens are removed."""
        version = _version(self._file)
        if self._file is None or version == self._version:
            return
        self._version = version
        try:
            self._of_file = read_tokens(self._file)
        except UserError as error:
            self._of_file = []
            log.warning("no token of %s is accepted: %s", self._file, error)


def _version(file: Path | None) -> tuple[int, int, int] | None:
    """Return values that change with the content of a file."""
    try:
        found = os.stat(file) if file is not None else None  # noqa: PTH116  (for each request)
    except OSError:
        return None
    return None if found is None else (found.st_mtime_ns, found.st_ino, found.st_size)


def read_tokens(file: Path) -> list[tuple[Role, str]]:
    """Return the tokens of a file with their roles.

    A token file has one token per line, after its role; lines that start with # are comments:

        # notebooks
        read 6f1c0d4e8b...
        submit 94be77a2c1...

    Raises:
        UserError: The file cannot be read, is readable by other users, or has an invalid line.
    """
    try:
        with file.open(encoding="utf-8") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            lines = opened.read().splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"the token file {file} cannot be read: {error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(
            f"the token file {file} is accessible to other users (mode {stat.filemode(mode)})",
            hint=f"chmod 600 {file}, and replace its tokens",
        )
    tokens: list[tuple[Role, str]] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        role = next((each for each in ROLES if each == words[0]), None)
        is_weak = len(words) != 2 or len(words[1]) < MIN_CHARS or len(set(words[1])) < MIN_DIFFERENT_CHARS
        if role is None or is_weak:
            raise UserError(
                f"{file}:{number}: expected a role ({', '.join(ROLES)}) and a token of at least "
                f"{MIN_CHARS} characters, {MIN_DIFFERENT_CHARS} of them different",
                hint="generate one with `openssl rand -hex 32`",
            )
        tokens.append((role, words[1]))
    return tokens


def token_of_environment() -> str | None:
    """Return the token in the environment variable; None: it is not set, or empty."""
    return os.environ.get(TOKEN_VARIABLE) or None


def make_token() -> str:
    """Return a random token."""
    return os.urandom(16).hex()


MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_SMALL_BODY_BYTES = 64 * 1024
"""Maximum size of the body of a request that does not submit a job."""
MAX_HEADER_BYTES = 16 * 1024
IDLE_S = 30.0
"""Time after which a connection is closed: without a complete request, or without reading the response."""

MAX_WAITING = 256
"""Connections without a request; with one more, the oldest of them is closed."""

SECURITY_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
SIGN_IN = (files("horovod_train.plugins.serve") / "page_files" / "sign_in.html").read_bytes()
SIGN_IN_POLICY = SECURITY_HEADERS["Content-Security-Policy"].replace(
    "form-action 'none'", "form-action 'self'"
)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Tls:
    """Files of the server's certificate chain and of its private key."""

    certificate: Path
    key: Path


class Refusal(Exception):  # noqa: N818  (part of the normal flow)
    """A request that is rejected before it reaches its endpoint."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers or {}


class Guard:
    """ASGI middleware: rejects unauthorized requests, limits bodies, and sets headers of responses.

    The role of the request's token is in ``request.state.role``, its number in ``request.state.token``.

    Args:
        app: Application behind this middleware.
        names: Accepted host names; empty: any.
        tokens: Accepted tokens; None: no token is required, and the role is ``read``.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str], tokens: Tokens | None) -> None:
        self._app = app
        self._names = names
        self._tokens = tokens
        self._rate_limits: dict[int, RateLimit] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self._check(Request(scope))
            limit_bytes = MAX_BODY_BYTES if scope["path"] == SUBMIT_PATH else MAX_SMALL_BODY_BYTES
            body = await _body(Headers(scope=scope), receive, limit_bytes)
        except Refusal as refusal:
            response = refused(scope, refusal.status, refusal.message)
            if (
                refusal.status == 401
                and scope["path"] == "/"
                and "text/html" in Headers(scope=scope).get("accept", "")
            ):
                response = Response(SIGN_IN, 401, {"Content-Security-Policy": SIGN_IN_POLICY}, "text/html")
            response.headers.update(refusal.headers)
            await response(scope, receive, send_with_headers)
            return
        await self._app(scope, _replay(body, receive), send_with_headers)

    def _check(self, request: Request) -> None:
        """Raise ``Refusal`` for an unauthorized request, and set the role and the name of the cookie."""
        given = request.headers.get("host", "")
        try:
            named = urlsplit(f"//{given}")
            host, port = named.hostname or "", named.port or 80
        except ValueError:
            raise Refusal(400, "invalid Host header") from None
        if self._names and host.lower() not in self._names:
            names = ", ".join(self._names)
            raise Refusal(
                400,
                f"the Host header names {host[:100]!r}; accepted: {names}. Let a proxy send one of these "
                "(nginx: proxy_set_header Host localhost), or start the server with --host and that name",
            )
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != given:
            raise Refusal(403, "request from another origin")
        # Browsers share cookies between the ports of a host.
        request.state.cookie = f"horovod_train_{port}"
        request.state.role, request.state.token = "read", -1
        if self._tokens is None:
            return
        cookie = request.cookies.get(request.state.cookie, "")
        sent = [
            request.query_params.get("token", ""),
            request.headers.get("authorization", "").removeprefix("Bearer "),
        ]
        known = self._tokens.find(sent)
        # Browsers send the origin with every request that changes something.
        if known is None and (request.method in SAFE_METHODS or origin is not None):
            known = self._tokens.find([cookie])
        if known is None:
            raise Refusal(
                401,
                "the token is missing or wrong: use the printed address, or the header "
                "`Authorization: Bearer TOKEN`",
                {"WWW-Authenticate": "Bearer"},
            )
        wait_s = self._rate_limits.setdefault(known.number, RateLimit()).take()
        if wait_s:
            raise Refusal(429, "too many requests", {"Retry-After": str(max(1, round(wait_s)))})
        needed = role_needed(request.method, request.url.path)
        if ROLES.index(known.role) < ROLES.index(needed):
            option = "--allow-cancel" if needed == "cancel" else "--allow-submit"
            raise Refusal(
                403,
                f"this requires the role {needed!r}; the token has {known.role!r} on this server: use "
                f"another token, and start the server with {option}",
            )
        request.state.role, request.state.token = known.role, known.number


async def _body(headers: Headers, receive: Receive, limit_bytes: int) -> bytes:
    """Return the body of a request.

    Raises:
        Refusal: It is too large, or is not complete after ``IDLE_S``.
    """
    too_large = Refusal(413, f"the body is larger than {limit_bytes} bytes", {"Connection": "close"})
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(IDLE_S):
            while True:
                message = await receive()
                body += message.get("body", b"")
                if len(body) > limit_bytes:
                    raise too_large
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise Refusal(408, "the request was not complete in time", {"Connection": "close"}) from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that first returns a body that was read, and then waits for the disconnection."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


def refused(scope: Scope, status: int, message: str) -> Response:
    """Return a response for an error: JSON for the API, else text."""
    if scope["path"].startswith(API):
        document = {"kind": "request", "message": message, "hint": "", "problems": []}
        return JSONResponse(document, status)
    return PlainTextResponse(f"{status} {message}\n", status)


def application(host: str, tokens: Tokens | None, *, has_api: bool = False) -> FastAPI:
    """Return an application without endpoints, whose requests are guarded.

    Args:
        host: Address that the server will listen on.
        tokens: Accepted tokens; None: no token is required.
        has_api: Whether to serve an OpenAPI document.
    """
    made = FastAPI(
        title="horovod_train",
        version=__version__,
        openapi_url=f"{API}/openapi.json" if has_api else None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan,
    )

    @made.exception_handler(OSError)
    async def explain_files(request: Request, error: OSError) -> Response:
        return refused(request.scope, 409, f"a file cannot be used: {error}")

    @made.exception_handler(HTTPException)
    async def explain(request: Request, error: HTTPException) -> Response:
        response = refused(request.scope, error.status_code, error.detail)
        response.headers.update(error.headers or {})
        if error.status_code == 405:  # Starlette lists the methods of one route of the path
            response.headers["Allow"] = ", ".join(_methods(made, request.scope))
        return response

    # Responses are compressed, because the page repeatedly requests JSON that is mostly numbers.
    made.add_middleware(GZipMiddleware, minimum_size=1024, compresslevel=4)
    made.add_middleware(Guard, names=names_of(host), tokens=tokens)
    return made


def _methods(app: FastAPI, scope: Scope) -> list[str]:
    """Return the methods of all routes of a path."""
    routes = [route for route in app.routes if isinstance(route, Route)]
    matching = (route for route in routes if route.matches(scope)[0] is not Match.NONE)
    return sorted({method for route in matching for method in route.methods or ()})


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.reader = ThreadPoolExecutor(1)
    yield
    app.state.reader.shutdown(wait=False, cancel_futures=True)


async def read(request: Request, call: Callable[[], Result]) -> Result:
    """Run a blocking function in the reader thread and return its result. Functions run one at a time."""
    return await asyncio.get_running_loop().run_in_executor(request.app.state.reader, call)


def json_response(document: object) -> Response:
    """Return a JSON response."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return Response(text, media_type="application/json")


def names_of(host: str) -> tuple[str, ...]:
    """Return the accepted host names for a server on an address; empty: any name."""
    if host in ("", "0.0.0.0", "::"):  # noqa: S104  (recognized, not bound to)
        return ()
    name = host.strip("[]").lower()
    return tuple(dict.fromkeys([name, "127.0.0.1", "localhost", "::1"]))


class _Protocol(H11Protocol):
    """HTTP/1.1 connection that is closed if the client does not send a request, or read the response.

    uvicorn itself limits only the time between two requests of a connection.
    """

    waiting_since_s: float | None = None
    """Time since which a request is expected; None: one is being handled."""
    _blocked_since_s: float | None = None
    """Time since which the response cannot be sent."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.waiting_since_s = self.loop.time()
        waiting = [each for each in self.connections if isinstance(each, _Protocol) and each.is_waiting]
        if len(waiting) > MAX_WAITING:
            waiting.sort(key=lambda each: each.waiting_since_s or 0.0)
            for each in waiting[:-MAX_WAITING]:
                each.transport.abort()
        self._timer = self.loop.call_later(IDLE_S / 4, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._blocked_since_s = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._blocked_since_s = None
        super().resume_writing()

    def on_response_complete(self) -> None:
        self.waiting_since_s = self.loop.time()
        super().on_response_complete()

    @property
    def is_waiting(self) -> bool:
        """Whether no request is being handled, and no response is being sent."""
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            return False
        return self.cycle is None or self.cycle.response_complete

    def _close_if_idle(self) -> None:
        if not self.is_waiting:
            self.waiting_since_s = None
        oldest_s = min(
            (each for each in (self.waiting_since_s, self._blocked_since_s) if each is not None),
            default=self.loop.time(),
        )
        if self.loop.time() - oldest_s > IDLE_S:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(IDLE_S / 4, self._close_if_idle)


class _Uvicorn(uvicorn.Server):
    """Server that reports when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


class Server:
    """HTTP server of an application, in its own thread.

    Args:
        application: Application to serve.
        host: Address to listen on.
        port: Port; 0: any free port.
        tls: Certificate and key; None: HTTP.

    Attributes:
        port: Port that the server listens on.
        at_close: Called after the server has stopped.

    Raises:
        UserError: The port is in use, the address is not an address of this host, or the certificate or its
            key cannot be read.
    """

    def __init__(self, application: ASGIApp, host: str, port: int, tls: Tls | None = None) -> None:
        config = uvicorn.Config(
            application,
            http=_Protocol,
            ws="none",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=1,
            backlog=128,
            ssl_certfile=tls.certificate if tls else None,
            ssl_keyfile=tls.key if tls else None,
        )
        try:
            config.load()
        except OSError as error:  # ssl.SSLError is one
            raise UserError(
                f"the certificate or its key cannot be used: {error}",
                hint="--tls-cert and --tls-key expect files in PEM format that belong together",
            ) from error
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            hint = (
                "choose another --port"
                if error.errno == errno.EADDRINUSE
                else "--host must be an address of this host"
            )
            raise UserError(
                f"cannot listen on {host}:{port}: {error.strerror or error}", hint=hint
            ) from error
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self.at_close: Callable[[], None] = lambda: None
        logging.getLogger("uvicorn.error").addFilter(_is_exception)
        self._server = _Uvicorn(config)
        self._has_ended = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()
        self._server.is_up.wait()

    def _run(self) -> None:
        try:
            self._server.run([self._socket])
        finally:
            self._has_ended.set()

    def close(self) -> None:
        """Stop serving. Safe to call twice."""
        if not self._has_ended.is_set():
            self._server.should_exit = True
            self._thread.join(5)
            self._socket.close()
            self.at_close()

    def wait(self) -> None:
        """Block until the server is closed."""
        # Not join(): Python 3.11 regards a thread as ended if its join() was interrupted (bpo-45274).
        self._has_ended.wait()


def _is_exception(record: logging.LogRecord) -> bool:
    """Return whether uvicorn logs an exception of this program, and not a malformed request."""
    return record.exc_info is not None
